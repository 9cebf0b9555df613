"""Rotary position embedding, applied in place to the queries and keys inside the fused QKV tensor.

The pairs are (i, i + rotated/2), the "half" convention of GPT-NeoX, Llama and Megatron (arXiv:2104.09864). In place,
because nothing else needs the unrotated values: a rotation is inverted by the opposite angle, which is also its backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, rotated_dim: int, base: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/rotated_dim).

    Args:
        positions: int64 [s], global positions.
        rotated_dim: how many channels of each head are rotated; even.
        base: theta.
        dtype: of the tables; angles are computed in fp64 so that position 1,000,000 is as exact as position 1.
    Returns:
        two tensors [s, rotated_dim / 2].
    """
    exponent = torch.arange(0, rotated_dim, 2, device=positions.device, dtype=torch.float64) / rotated_dim
    angles = positions.to(torch.float64)[:, None] * base**-exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int, head_dim: int) -> Tensor:
    """Rotate the queries and keys of ``qkv`` in place and return it.

    Args:
        qkv: [s, b, g * (queries_per_group + 2) * head_dim], contiguous, rows in group order (queries, key, value).
        cos, sin: [s, rotated/2] from ``rotary_tables``.
    """
    return _Rotary.apply(qkv, cos, sin, queries_per_group, head_dim)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int, head_dim: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.queries_per_group, ctx.head_dim = queries_per_group, head_dim
        ctx.mark_dirty(qkv)
        rotate_(_queries_and_keys(qkv, queries_per_group, head_dim), cos, sin)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand the same gradient to somebody else
        rotate_(_queries_and_keys(grad, ctx.queries_per_group, ctx.head_dim), cos, -sin)
        return grad, None, None, None, None


def _queries_and_keys(qkv: Tensor, queries_per_group: int, head_dim: int) -> Tensor:
    """[s, b, g*(r+2)*d] -> [s, b*g, r+1, d], a view without the values."""
    s, b, width = qkv.shape
    return qkv.view(s, b * (width // ((queries_per_group + 2) * head_dim)), queries_per_group + 2, head_dim)[:, :, :-1]


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first 2 * cos.shape[-1] channels of x [s, m, n, d] in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    if x.dtype in (torch.bfloat16, torch.float16):
        rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin  # fp32 by promotion, rounded once
        first.copy_(rotated_first)
        second.copy_(rotated_second)
        return
    old_first = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(old_first, sin)
