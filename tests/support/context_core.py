"""Attention over the positions of all cp ranks in the plainest way: everybody gets all keys and values, and a dense mask.

It stands in for the exchange that is planned from the mask, so that whatever is around it can be tested by itself: who
has which positions, what goes with them, who counts what. It reads the plan's runs and mask, and none of its pieces.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async, all_reduce
from megatron_sp.comm.groups import Group
from megatron_sp.models.attention import SITE_ATTENTION, SoftmaxCore
from megatron_sp.ops.attention import head_row_keys
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.dropout import keep_mask
from megatron_sp.parallel.context_plan import ContextPlan
from megatron_sp.parallel.heads import Share, is_uniform
from megatron_sp.parallel.row_mask import RowMask, Runs


def dense_mask(mask: RowMask, batch: int) -> tuple[Tensor, Tensor]:
    """Which key [b, s, s] each query sees, and each key's number within its document [b, s]."""
    s = mask.length
    at = torch.arange(s)
    allowed = torch.ones(batch, s, s, dtype=torch.bool)
    numbers = at.expand(batch, s).clone()
    if mask.causal:
        allowed &= at[:, None] >= at
    if mask.window is not None:
        allowed &= at[:, None] - at < mask.window
    for sequence in range(batch):
        if mask.documents is not None:
            start, document = 0, torch.zeros(s, dtype=torch.int64)
            for number, end in enumerate(mask.documents[sequence % len(mask.documents)]):
                document[start:end], numbers[sequence, start:end] = number, torch.arange(end - start)
                start = end
            allowed[sequence] &= document[:, None] == document
        if mask.lengths is not None:
            allowed[sequence] &= at < mask.lengths[sequence % len(mask.lengths)]
    return allowed, numbers


class _AllRows(torch.autograd.Function):
    """Rows of all ranks in the order of their positions: [L, ...] -> [s, ...]; the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: tuple[Runs, ...], group: Group) -> Tensor:
        ctx.group, ctx.at = group, positions_of(shares[group.rank()])
        lengths = [len(positions_of(runs)) for runs in shares]
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, max(lengths) - x.shape[0]))
        parts = all_gather_async(padded.contiguous(), group).wait().view(len(shares), max(lengths), *x.shape[1:])
        whole = x.new_empty((sum(lengths), *x.shape[1:]))
        for runs, part in zip(shares, parts, strict=True):
            at = positions_of(runs)
            whole[at] = part[: len(at)]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), ctx.group)[ctx.at], None, None


def positions_of(runs: Runs) -> list[int]:
    """Of these runs, one after another."""
    return [position for start, stop in runs for position in range(start, stop)]


def attention_of_rank(q: Tensor, kv: Tensor, plan: ContextPlan, rank: int, batch: int, rate: float, row_keys: Tensor | None) -> Tensor:
    """Attention [L, m, r, d] of a rank's queries [L, m, r, d] over all keys and values [s, m, 2, d]."""
    allowed, numbers = dense_mask(plan.mask, batch)
    mine, each = positions_of(plan.runs[rank]), q.shape[1] // batch
    seen = allowed[:, mine].repeat_interleave(each, 0)[:, None]  # [m, 1, L, s]
    k, v = kv.unbind(2)
    scores = torch.einsum("lmrd,smd->mrls", q, k) / math.sqrt(q.shape[-1])
    probs = torch.softmax(scores.masked_fill(~seen, -1e300 if q.dtype == torch.float64 else -1e30), -1).masked_fill(~seen, 0.0)
    if rate > 0:
        assert row_keys is not None
        kept = keep_mask(row_keys, plan.mask.length, rate)  # by number within the document
        kept = kept.gather(-1, numbers.repeat_interleave(each, 0)[:, None, None].expand(kept.shape))
        probs = probs * kept / (1.0 - rate)
    return torch.einsum("mrls,smd->lmrd", probs, v)


def plain_core(self: SoftmaxCore, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
    """As ``SoftmaxCore._core``, with several cp ranks too."""
    ctx, layer = self.ctx, self.layer
    if ctx.plan is None:
        return _OWN_CORE(self, q, k, v, share, kept)
    cp = layer.layout.cp
    assert ctx.length == q.shape[0] == k.shape[0] == ctx.plan.lengths[cp.rank] and ctx.whole_length == ctx.plan.mask.length
    groups = len(share.queries) // q.shape[2]
    rate, rows = layer.attention_dropout if ctx.dropout is not None else 0.0, None
    if rate > 0:
        assert ctx.dropout is not None
        keys = ctx.dropout.row_keys(layer.layer, SITE_ATTENTION)
        rows = head_row_keys(keys, groups, q.shape[2], layer.first_head + share.queries.start)
    if not is_uniform(share, self.r):
        k, v = (self._repeated(x, share) for x in (k, v))
    kv = _AllRows.apply(torch.cat((k, v), 2), ctx.plan.runs, cp.group)
    return attention_of_rank(q, kv, ctx.plan, cp.rank, q.shape[1] // groups, rate, rows)


_OWN_CORE = SoftmaxCore._core


@pytest.fixture
def plain_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked from here compute attention with ``plain_core``."""
    monkeypatch.setattr(SoftmaxCore, "_core", plain_core)
