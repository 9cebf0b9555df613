"""Indices, masks, writes into parts, and what is filled with one value: more of ``support/schedule_rule_cases.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from support.schedule_rule_cases import each, of

# rows that an index names

each("index_select", "b s h; i<s: k", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, dim=-2, index=i))
each("index_select", "h; i<h: k", lambda c, f, x, i: f(x, 0, i))
each("gather", "b s h; i<s: b k h", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, dim=-2, index=i))
each("gather", "b h; i<h: b k", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, -1, i))
each("gather", "b h; i<h: b h", lambda c, f, x, i: f(x, -1, i))
each("gather", "b s h; i<h: b s 1", lambda c, f, x, i: f(x, -1, i))
each("take_along_dim", "b s h; i<s: b k h", lambda c, f, x, i: f(x, i, 1), lambda c, f, x, i: f(x, indices=i, dim=-2))
each("take_along_dim", "b s h; i<s: b k 1", lambda c, f, x, i: f(x, i, dim=1))
each("take_along_dim", "1 s h; i<s: b k 1", lambda c, f, x, i: f(x, i, 1))
each("take_along_dim", "b h; i<h: b k", lambda c, f, x, i: f(x, i, 1))
each("take_along_dim", "s h; i<s: k", lambda c, f, x, i: f(x, i))
each("scatter", "b s h; i<s: b s h; b s h", lambda c, f, x, i, y: f(x, 1, i, y), lambda c, f, x, i, y: f(x, dim=-2, index=i, src=y))
each(
    "scatter",
    "b h; i<h: b 1",
    lambda c, f, x, i: f(x, 1, i, 2.0),
    lambda c, f, x, i: f(x, -1, i, value=2.0),
    lambda c, f, x, i: f(x, -1, i, x.shape[0]),
)
each("scatter", "s h; i<s: 1 h", lambda c, f, x, i: f(x, 0, i, 2.0), lambda c, f, x, i: f(x, 0, i, 1.0, reduce="add"))
each("scatter_add", "b s h; i<s: b s h; b s h", lambda c, f, x, i, y: f(x, 1, i, y), lambda c, f, x, i, y: f(x, dim=-2, index=i, src=y))
each("scatter_add", "b h; i<h: b k; b k", lambda c, f, x, i, y: f(x, -1, i, y))
each(
    "index_add index_copy",
    "b s h; i<s: 1; b 1 h",
    lambda c, f, x, i, y: f(x, 1, i, y),
    lambda c, f, x, i, y: f(x, dim=-2, index=i, source=y),
)
each(
    "index_add",
    "s h; i<s: k; k h",
    lambda c, f, x, i, y: f(x, 0, i, y),
    lambda c, f, x, i, y: f(x, 0, i, y, alpha=2),
    lambda c, f, x, i, y: f(torch.zeros_like(x), 0, i, y),
    lambda c, f, x, i, y: f(x, 0, i, y, alpha=y.shape[-1]),
)
of(
    "index_add",
    "s h; i<s: k; k h",
    lambda c, x, i, y: torch.zeros(c.s, c.h, dtype=y.dtype).index_add(0, i, y),
    lambda c, x, i, y: torch.zeros(c.s, y.shape[1], dtype=y.dtype).index_add_(0, i, y),
)
each("index_copy", "h; i<h: 1; 1", lambda c, f, x, i, y: f(x, 0, i, y))

_INDICES = (
    lambda c, x: x[0],
    lambda c, x: x[:, 0],
    lambda c, x: x[..., 0],
    lambda c, x: x[..., -1:],
    lambda c, x: x[:, :, ::2],
    lambda c, x: x[:, :-1],
    lambda c, x: x[None],
    lambda c, x: x[:, None, 0],
    lambda c, x: x[..., None],
    lambda c, x: x[..., None, :],
    lambda c, x: x[:, 1:, ..., None],
    lambda c, x: x[:, :, : c.h],
    lambda c, x: x[:, : c.s],
    lambda c, x: x[..., : x.shape[-1]],
    lambda c, x: x[...],
    lambda c, x: x[:, [0, 0]],
    lambda c, x: x[..., [0]],
    lambda c, x: x[[0], :, 0],
    lambda c, x: x[torch.tensor([0, 0])],
    lambda c, x: x[:, torch.tensor(0)],
    lambda c, x: x[torch.tensor([0]), :, torch.tensor([0, 0])],
    lambda c, x: x[0, :, [0]],
    lambda c, x: x[:, torch.tensor([[0, 0]])],
    lambda c, x: x[None, :, [0]],
    lambda c, x: x[[0], None, :, [0]],
    lambda c, x: x[torch.arange(x.shape[0]), 0],
    lambda c, x: x[torch.arange(x.shape[0])],
    lambda c, x: x[:, torch.arange(c.s)],
    lambda c, x: x[torch.ones(c.b, dtype=torch.bool)],
    lambda c, x: x[:, torch.ones(c.s, dtype=torch.bool)],
    lambda c, x: x[:, 0:1, 0],
    lambda c, x: x[(slice(None), slice(None), 0)],
    lambda c, x: x[x.shape[0] - 1],
    lambda c, x: x[:, :, x.shape[2] - 1 :],
    lambda c, x: x[:, :, torch.arange(x.shape[2] - 1, -1, -1)],
    lambda c, x: x[torch.ones(c.b, c.s, dtype=torch.bool)],
    lambda c, x: x[:, True],
    lambda c, x: x[0:1],
    lambda c, x: x[..., 0:0],
    lambda c, x: x[-1, ..., 0],
    lambda c, x: x[:, :, None, [0]],
    lambda c, x: x[0, [0]],
)
of("getitem", "b s h", *_INDICES)
of(
    "getitem",
    "b s h; i<s: k",
    lambda c, x, i: x[:, i],
    lambda c, x, i: x[:, i, 0],
    lambda c, x, i: x[0, i],
    lambda c, x, i: x[..., i, :],
    lambda c, x, i: x[:, i, None],
)
of("getitem", "b s h; i<b: k; i<s: k", lambda c, x, i, j: x[i, j], lambda c, x, i, j: x[i, :, j * 0], lambda c, x, i, j: x[i, None, j])
of("getitem", "v h; i<v: b s", lambda c, x, i: x[i], lambda c, x, i: x[i, 0], lambda c, x, i: x[i][..., 0])
of("getitem", "b s h; m: b s", lambda c, x, m: x[m], lambda c, x, m: x[m, 0])
of("getitem", "b s; m: b s", lambda c, x, m: x[m], lambda c, x, m: x[m].sum())
of("getitem", "b s; i<s: b", lambda c, x, i: x[torch.arange(c.b), i], lambda c, x, i: x[torch.arange(x.shape[0]), i])


def put(x: Tensor, index: object, value: object) -> Tensor:
    x[index] = value  # type: ignore[index, assignment]
    return x


_PLACES = (
    lambda c: 0,
    lambda c: slice(1, None),
    lambda c: (slice(None), 0),
    lambda c: (..., 0),
    lambda c: (..., slice(0, 1)),
    lambda c: slice(None),
    lambda c: ...,
    lambda c: (slice(None), slice(0, 1)),
    lambda c: torch.tensor([0]),
    lambda c: (slice(None), [0]),
    lambda c: (torch.tensor([0]), slice(None), torch.tensor([0])),
    lambda c: (slice(None), None),
    lambda c: torch.ones(c.b, dtype=torch.bool),
    lambda c: (..., [0]),
    lambda c: (slice(None), slice(None), slice(None, None, 2)),
)
for _at in _PLACES:
    of(
        "setitem",
        "b s h",
        lambda c, x, at=_at: put(x, at(c), 1.0),
        lambda c, x, at=_at: put(torch.zeros_like(x), at(c), 1.0),
        lambda c, x, at=_at: put(torch.zeros_like(x), at(c), x[at(c)]),
    )
    of(
        "setitem",
        "b s h; b s h",
        lambda c, x, y, at=_at: put(x, at(c), y[at(c)]),
        lambda c, x, y, at=_at: put(torch.zeros(x.shape, dtype=x.dtype), at(c), y[at(c)]),
    )
    of("setitem", "b s h; 1", lambda c, x, y, at=_at: put(x, at(c), y), lambda c, x, y, at=_at: put(torch.zeros_like(x), at(c), y))
of(
    "setitem",
    "b s h; h",
    lambda c, x, y: put(x, (slice(None), 0), y),
    lambda c, x, y: put(x, ..., y),
    lambda c, x, y: put(torch.zeros(c.b, c.s, c.h, dtype=y.dtype), (slice(None), 0), y),
    lambda c, x, y: put(torch.zeros(x.shape, dtype=y.dtype), (0, 0), y),
)
of(
    "setitem",
    "b s h; b h",
    lambda c, x, y: put(x, (slice(None), 0), y),
    lambda c, x, y: put(torch.zeros(c.b, c.s, c.h, dtype=y.dtype), (slice(None), 0), y),
    lambda c, x, y: put(torch.zeros(x.shape, dtype=y.dtype), (slice(None), 0), y),
)
of("setitem", "b s h; m: b s h", lambda c, x, m: put(x, m, 0.0), lambda c, x, m: put(torch.zeros_like(x), m, 1.0))
of(
    "setitem",
    "b s h; m: b s",
    lambda c, x, m: put(x, m, 0.0),
    lambda c, x, m: put(torch.zeros_like(x), m, 1.0),
    lambda c, x, m: put(x, m, x[m] * 2),
)
of(
    "setitem",
    "b s h; i<s: k",
    lambda c, x, i: put(x, (slice(None), i), 0.0),
    lambda c, x, i: put(torch.zeros_like(x), (slice(None), i), 1.0),
)


# written through a view

of(
    "getitem",
    "b s h; b s h",
    lambda c, x, y: written(x, x[:, :1], y[:, :1]),
    lambda c, x, y: written(x, x[..., 0], y[..., 0]),
    lambda c, x, y: written(z := torch.zeros(y.shape, dtype=y.dtype), z[:, 1:], y[:, 1:]),
    lambda c, x, y: written(z := torch.zeros_like(y), z[0], y[0]),
    lambda c, x, y: written(z := torch.zeros_like(x), z.view(-1), y.flatten()),
    lambda c, x, y: written(z := torch.zeros_like(x), z.transpose(0, 1), y.transpose(0, 1)),
)


def written(base: Tensor, view: Tensor, value: Tensor) -> Tensor:
    view.copy_(value)
    return base


of(
    "fill",
    "b s h",
    lambda c, x: filled(x, lambda z: z[0].fill_(1.0)),
    lambda c, x: filled(x, lambda z: z[..., 0].fill_(1.0)),
    lambda c, x: filled(x, lambda z: z.select(-1, 0).zero_()),
    lambda c, x: filled(x, lambda z: z.narrow(1, 0, 1).fill_(2.0)),
    lambda c, x: filled(x, lambda z: z.fill_(3.0)),
)


def filled(x: Tensor, write: object) -> Tensor:
    z = torch.zeros(x.shape, dtype=x.dtype)
    write(z)  # type: ignore[operator]
    return x + z


# filled with one value, of a share's size

for _name in ("zeros", "ones"):
    of(_name, "s h", lambda c, x, n=_name: x + getattr(torch, n)(x.shape), lambda c, x, n=_name: x * getattr(torch, n)(c.s, c.h))
of("empty", "s h", lambda c, x: x + torch.empty(x.shape), lambda c, x: torch.empty(c.s, c.h), random=True)
of(
    "full",
    "s h",
    lambda c, x: x + torch.full(x.shape, 2.0),
    lambda c, x: x * torch.full((c.h,), 2.0),
    lambda c, x: x + torch.full(x.shape, x.shape[-1]),
    lambda c, x: x * torch.full((x.shape[-1],), 3.0).sum(),
    lambda c, x: x * torch.full((x.shape[0], 1), 3.0).cumsum(0),
)
each(
    "new_zeros new_ones",
    "s h",
    lambda c, f, x: f(x, x.shape) + x,
    lambda c, f, x: f(x, (c.s, c.h)) + x,
    lambda c, f, x: f(x, x.shape[-1]),
    lambda c, f, x: f(x, (x.shape[-1],)).sum() * x,
    lambda c, f, x: f(x, 3),
)
each(
    "new_full",
    "s h",
    lambda c, f, x: f(x, x.shape, 2.0) + x,
    lambda c, f, x: f(x, (3,), 2.0),
    lambda c, f, x: f(x, x.shape, x.shape[-1]) + x,
)
each("new_empty", "s h", lambda c, f, x: f(x, x.shape), lambda c, f, x: f(x, (3, c.h)), random=True)
of(
    "zeros_like",
    "s h",
    lambda c, x: torch.zeros_like(x) + x,
    lambda c, x: torch.ones_like(x).sum(-1),
    lambda c, x: torch.ones_like(x).cumsum(-1),
    lambda c, x: torch.ones_like(x[:, :1]).sum(0),
)
of(
    "ones_like",
    "s h",
    lambda c, x: torch.ones_like(x).triu(),
    lambda c, x: x.masked_fill(torch.ones_like(x, dtype=torch.bool).tril(), 0.0),
    lambda c, x: torch.ones_like(x).mean(),
    lambda c, x: torch.nn.functional.normalize(torch.ones_like(x), dim=0),
)
