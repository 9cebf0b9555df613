"""The masks that dropout draws on all ranks, put together for the whole model, which must then compute what the split one has computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The masks (0, or 1 / (1 - p)) of all calls of ``F.dropout`` in here, in their order."""
    found: list[Tensor] = []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        found.append(torch.bernoulli(torch.full_like(x.detach(), 1 - p)) / (1 - p))
        return x * found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield found


@contextmanager
def replayed(masks: list[list[Tensor]], tp: int, sp: int) -> Iterator[None]:
    """``F.dropout`` takes these masks, of all ranks (sp outside, tp inside), call by call."""
    calls = iter(zip(*masks, strict=True))

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x if not training or p == 0.0 else x * joined(list(next(calls)), x.shape, tp, sp)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield
    assert next(calls, None) is None, "the whole model dropped less often"


def joined(parts: list[Tensor], shape: torch.Size, tp: int, sp: int) -> Tensor:
    """One mask of the whole from those of the ranks: equal where ranks have the same, different where they have shares.

    Heads [b, n, s, s] are shared over tp, then over sp; positions [b, s, h] over sp, then over tp.
    """
    if parts[0].shape == shape:
        assert all(torch.equal(part, parts[0]) for part in parts), "what is whole on all ranks was dropped differently"
        return parts[0]
    grid = [parts[i * tp : (i + 1) * tp] for i in range(sp)]
    shares = shape[1] // parts[0].shape[1]
    if shares == tp * sp:
        order = [row[j] for j in range(tp) for row in grid] if len(shape) == 4 else parts
    else:  # positions, over sp alone
        assert shares == sp, f"{[list(p.shape) for p in parts]} are no shares of {list(shape)}"
        assert all(torch.equal(part, row[0]) for row in grid for part in row), "tp ranks have the same positions and other masks"
        order = [row[0] for row in grid]
    assert not any(torch.equal(a, b) for i, a in enumerate(order) for b in order[:i]), "shares were dropped alike"
    return torch.cat(order, 1)


def of_all_ranks(masks: list[Tensor]) -> list[list[Tensor]]:
    """The masks of every rank, which have the same shapes on all of them. Collective."""
    found: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    for mask in masks:
        parts = [torch.empty_like(mask, memory_format=torch.contiguous_format) for _ in found]
        dist.all_gather(parts, mask.contiguous())
        for own, part in zip(found, parts, strict=True):
            own.append(part)
    return found
