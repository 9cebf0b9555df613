"""Every element of the heads carries a name of its own through the exchanges, and is asked for it wherever it arrives.

The tag of (position, batch, head row of the fused weight, channel) is a whole number below 2^53, so fp64 moves it
exactly: the projection of [position * b + batch, 1] by weight rows [1, 2^20 * row channel] writes it. ``check_tags``
runs a pass of ``parallel.ulysses.HeadsPass`` forward and backward with an attention that looks at what it gets. What each
rank ought to have is worked out here from the sentences of the design, not from the plan.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.parallel.attention_core import Core
from megatron_sp.parallel.heads import OverlapMode, Sections, Share, plan_heads
from megatron_sp.parallel.parallel_context import SequenceParallel
from megatron_sp.parallel.ulysses import AttentionPlan, HeadsPass
from megatron_sp.utils.numbers import round_up

STEP = float(2**20)


def tags(first: int, count: int, b: int, row_channels: Tensor) -> Tensor:
    """[count, b, len(row_channels)]: tags of positions from ``first`` on."""
    tokens = torch.arange(first * b, (first + count) * b, dtype=torch.float64).view(count, b, 1)
    return tokens + STEP * (1 + row_channels.double())


def channels(rows: list[int], d: int) -> Tensor:
    return torch.tensor([row * d + c for row in rows for c in range(d)], dtype=torch.int64)


def heads_of(rank: int, n: int, r: int, sp: int) -> tuple[list[int], list[int]]:
    """Query heads of an sp rank, ceil(n/sp) for the first ones, and the key/value heads that they use."""
    queries = [int(q) for q in np.array_split(np.arange(n), sp)[rank]]
    return queries, sorted({q // r for q in queries})


def row_of(kind: str, head: int, r: int) -> int:
    """Row of the fused weight in group order: r queries, key, value."""
    return (head // r) * (r + 2) + head % r if kind == "q" else head * (r + 2) + r + (kind == "v")


class Inspector(Core):
    """A core that checks what it gets, hands its queries' tags back, and answers every gradient with tags again."""

    parameters = ()

    def __init__(self, s: int, b: int, d: int, r: int) -> None:
        self.s, self.b, self.d, self.r = s, b, d, r
        self.queries: list[int] = []
        self.keys: list[int] = []
        self.uses: Counter[int] = Counter()  # chunks in which a key/value head is attended to

    def _check(self, x: Tensor, rows: list[int]) -> None:
        want = tags(0, self.s, self.b, channels(rows, self.d))
        assert x.shape == want.shape, f"{tuple(x.shape)} arrived for {tuple(want.shape)}"
        assert torch.equal(x.detach(), want), f"head rows {rows} are not where the plan says"

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queries, keys, s, b, d, r = list(share.queries), list(share.keys), self.s, self.b, self.d, self.r
        self.queries += queries
        self.keys += keys
        if "qkv" in recv_buffers:
            served = Counter(q // r for q in queries)
            if keys and len(set(served.values())) == 1:  # uniform: in group order
                rows = [
                    row
                    for k in keys
                    for row in (*(row_of("q", q, r) for q in queries if q // r == k), row_of("k", k, r), row_of("v", k, r))
                ]
            else:
                rows = [row_of("q", q, r) for q in queries] + [row_of(kind, k, r) for kind in "kv" for k in keys]
            self._check(recv_buffers["qkv"], rows)
            heads = recv_buffers["qkv"].view(s, b, len(rows), d)
            at = {row: i for i, row in enumerate(rows)}
            q, k, v = (heads[:, :, [at[row_of(kind, x, r)] for x in (queries if kind == "q" else keys)]] for kind in "qkv")
        else:
            for kind in "qkv":
                self._check(recv_buffers[kind], [row_of(kind, x, r) for x in (queries if kind == "q" else keys)])
            q, k, v = (recv_buffers[kind].view(s, b, -1, d) for kind in "qkv")
        return (q, k, v) if keys else (q, None, None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        self._check(k.reshape(self.s, self.b, -1), [row_of("k", x, self.r) for x in share.uses])
        self._check(v.reshape(self.s, self.b, -1), [row_of("v", x, self.r) for x in share.uses])
        self.uses.update(share.uses)
        return _Answer.apply(q, k, v, self, share)


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: Inspector, share: Share) -> Tensor:
        ctx.core, ctx.share = core, share
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        core, share = ctx.core, ctx.share
        want = tags(0, core.s, core.b, channels(list(share.queries), core.d))
        assert torch.equal(grad.reshape(want.shape), want), f"the gradient of query heads {list(share.queries)} is not where the plan says"

        def answer(kind: str, heads: range) -> Tensor:
            return tags(0, core.s, core.b, channels([row_of(kind, x, core.r) for x in heads], core.d)).view(core.s, core.b, -1, core.d)

        return answer("q", share.queries), answer("k", share.uses), answer("v", share.uses), None, None


def check_tags(
    group: Group,
    *,
    queries_per_group: int,
    groups: int,
    s: int,
    b: int,
    d: int,
    mode: OverlapMode,
    num_chunks: int = 1,
    overlap: bool = True,
) -> None:
    """There and back again, forward and backward."""
    sp, rank, r, g = group.size(), group.rank(), queries_per_group, groups
    n, local = r * g, round_up(s, sp) // sp
    core = Inspector(s, b, d, r)
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(r, g, d), sp, mode, num_chunks)), d, s, sp=SequenceParallel(group, overlap))
    first = rank * local
    real = max(0, min(local, s - first)) * b  # tokens of this rank that are not padding
    mine = torch.stack([torch.arange(first * b, (first + local) * b).double(), torch.ones(local * b).double()], dim=1)  # [tokens, 2]

    run = HeadsPass(plan, core, mine.view(local, b, 2), train=True)

    def names(count: int) -> Tensor:
        """Weight rows that give row channel i its tag."""
        return torch.stack([torch.ones(count), STEP * (1 + torch.arange(count))], dim=1).double()

    out = torch.full((local * b, n * d), float("nan"), dtype=torch.float64)
    for columns, piece in run.outputs(run.forward(mine, names(g * (r + 2) * d), None)):
        out[:, columns] = piece
    want = tags(first, local, b, torch.arange(n * d)).view(local * b, -1)
    by_row = tags(first, local, b, channels([row_of("q", q, r) for q in range(n)], d)).view(local * b, -1)
    assert torch.equal(out[:real], by_row[:real]), "heads came back to the wrong place"
    assert not out[real:].any(), "padding came back as something"
    queries, keys = heads_of(rank, n, r, sp)
    assert (core.queries, core.keys) == (queries, keys), "the chunks together are not this rank's heads"

    arriving, found, _ = run.backward_to_messages(mine, names(n * d).t().contiguous(), lambda: torch.ones(()))
    assert found is not None and found.item() == 1.0, "the work under the first exchange was not done"
    uses = _uses_of_all(plan, sp)
    for message, handle in arriving:
        pieces = run.by_rows(handle.wait(), message)
        got = torch.cat([piece for _, piece in pieces], dim=1)
        by_rank = [[start // d for start, _ in heads] for heads in message.heads]
        rows = [row for of_rank in by_rank for row in of_rank]
        said = [row for runs, _ in pieces for run_of_rows in runs for row in range(run_of_rows.start, run_of_rows.stop)]
        assert said == [row * d + i for row in rows for i in range(d)], "the rows that the pieces are said to be of"
        times = [1 if row % (r + 2) < r else uses[to][row // (r + 2)] for to, of_rank in enumerate(by_rank) for row in of_rank]
        want = tags(first, local, b, channels(rows, d)).view(local * b, -1)
        want = want * torch.tensor(times, dtype=torch.float64).repeat_interleave(d)
        assert torch.equal(got[:real], want[:real]), f"gradients of the {message.part} message came back to the wrong place"
        assert not got[real:].any(), "the gradient of padding is something"


def _uses_of_all(plan: AttentionPlan, sp: int) -> list[Counter[int]]:
    return [Counter(k for chunk in plan.chunks for k in chunk.shares[rank].uses) for rank in range(sp)]
