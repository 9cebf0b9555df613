"""RMSNorm of queries, and of keys, over all heads of a token, which tp and sp ranks share (OLMoE, arXiv:2409.02060).

    forward    t = sum of x^2;              r = (t / width + eps)^-1/2;  y = x r w
    backward   u = sum of dy w x;           dx = r dy w - x r^3 u / width;  dw = sum over tokens of dy x r

Each pass has one small sum over the ranks, for queries and keys together. A key head that several ranks hold counts
once in t, and the second term of dx is in the gradient of one of them only: that of its first query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.main_grad import MainGrad, put_grad
from megatron_sp.ops.norm import NormSpec


@dataclass(frozen=True)
class HeadRange:
    """A rank's share of the heads."""

    first: int  # number of its first head
    # as many of its heads, the last ones, are counted by this rank; others are counted by ranks before it
    num_owned: int
    width: int  # channels of all heads of all ranks


@dataclass(frozen=True)
class AllHeadsPlan:
    """Ranges of queries and keys, and the sum over the ranks, in place."""

    ranges: tuple[HeadRange, HeadRange]
    head_dim: int
    spec: NormSpec
    reduce: Callable[[Tensor], Tensor]
    main_grads: tuple[MainGrad | None, MainGrad | None]


def norm_all_heads(q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], plan: AllHeadsPlan) -> tuple[Tensor, Tensor]:
    """Normalize queries [s, b, n d of this rank] and keys [s, b, g d]; ``weights`` are [n d], [g d] of all heads.

    Every rank of tp and sp must call it, and run its backward.
    """
    q, k = _NormAllHeads.apply(q, k, *weights, plan)
    return q, k


class _NormAllHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, plan: AllHeadsPlan
    ) -> tuple[Tensor, ...]:
        parts, d = [(q, q_weight), (k, k_weight)], plan.head_dim
        sums = [_wide(_owned(x, of, d)).square().sum(-1) for (x, _), of in zip(parts, plan.ranges, strict=True)]
        totals = plan.reduce(torch.stack(sums))  # [2, s, b]
        stats = [torch.rsqrt(t / of.width + plan.spec.eps) for t, of in zip(totals, plan.ranges, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *stats)
        ctx.params, ctx.plan = (q_weight, k_weight), plan  # the main_grad knows parameters by identity
        normed = []
        for (x, weight), of, r in zip(parts, plan.ranges, stats, strict=True):
            normed.append((_wide(x) * r[..., None] * _taken(weight, of, x.shape[-1], plan)).to(x.dtype))
        return tuple(normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        plan: AllHeadsPlan = ctx.plan
        xs, weights, stats = ctx.saved_tensors[:2], ctx.saved_tensors[2:4], ctx.saved_tensors[4:]
        wide = [_wide(x) for x in xs]
        by_weight = zip(grads, weights, plan.ranges, strict=True)
        of_normed = [_wide(g) * _taken(w, of, g.shape[-1], plan) for g, w, of in by_weight]
        totals = plan.reduce(torch.stack([(g * x).sum(-1) for g, x in zip(of_normed, wide, strict=True)]))
        grad_xs: list[Tensor | None] = []
        grad_ws: list[Tensor | None] = []
        for i, of in enumerate(plan.ranges):
            x, r, width = wide[i], stats[i][..., None], xs[i].shape[-1]
            grad_x, owned_x = of_normed[i] * r, _owned(x, of, plan.head_dim)
            _owned(grad_x, of, plan.head_dim).sub_(owned_x * (r.pow(3) * (totals[i] / of.width)[..., None]))
            grad_xs.append(grad_x.to(xs[i].dtype))
            if not ctx.needs_input_grad[2 + i]:
                grad_ws.append(None)
                continue
            grad_w, start = torch.zeros(weights[i].shape, dtype=x.dtype, device=x.device), of.first * plan.head_dim
            grad_w[start : start + width] = (_wide(grads[i]) * x * r).sum((0, 1))
            grad_ws.append(put_grad(plan.main_grads[i], ctx.params[i], grad_w))
        return *grad_xs, *grad_ws, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _owned(x: Tensor, of: HeadRange, head_dim: int) -> Tensor:
    return x[..., x.shape[-1] - of.num_owned * head_dim :]


def _taken(weight: Tensor, of: HeadRange, width: int, plan: AllHeadsPlan) -> Tensor:
    mine = _wide(weight[of.first * plan.head_dim : of.first * plan.head_dim + width])
    return mine + 1 if plan.spec.zero_centered else mine
