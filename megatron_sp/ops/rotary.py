"""Rotary position embedding (arXiv:2104.09864), applied in place, even inside the fused QKV tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.kernels.launch import is_fused


@dataclass(frozen=True)
class RotaryStretch:
    """Slower rotation for longer sequences (arXiv:2306.15595, Llama 3.1)."""

    # a frequency makes original_length / wavelength turns over a pretraining sequence: with fewer than ``low`` it is
    # divided by ``factor``; with more than ``high`` it is kept; in between the two are interpolated. Infinite: all are
    # divided, which is the same as dividing the positions
    factor: float = 1.0
    low: float = math.inf
    high: float = math.inf
    original_length: int = 1

    def apply(self, frequencies: Tensor) -> Tensor:
        # frequencies in radians per position, [n] -> [n]
        slow = frequencies / self.factor
        if math.isinf(self.low):
            return slow
        turns = self.original_length * frequencies / (2 * math.pi)
        stays = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - stays) * slow + stays * frequencies


NOT_STRETCHED = RotaryStretch()


def rotary_tables(
    positions: Tensor, rotated_dim: int, base: float, dtype: torch.dtype = torch.float32,
    stretch: RotaryStretch = NOT_STRETCHED,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cos and sin of position * base^(-2i/rotated_dim), for global positions [s] or [s, b]."""
    # in fp64, so that position 1,000,000 is as accurate as position 1
    exponent = torch.arange(0, rotated_dim, 2, device=positions.device, dtype=torch.float64) / rotated_dim
    angles = positions.to(torch.float64)[..., None] * stretch.apply(base**-exponent)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, *, heads: int = 1, rotated: int = 1) -> Tensor:
    """Rotate heads of ``x`` [s, ..., c] in place: of every ``heads`` consecutive ones the first ``rotated``."""
    # r + 2 and r + 1 in the fused QKV, in which r queries, a key and a value follow each other
    return _Rotary.apply(x, cos, sin, head_dim, heads, rotated)


class _Rotary(torch.autograd.Function):
    # nothing else needs the unrotated values: backward is the rotation by the opposite angle
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int, rotated: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.head_dim, ctx.heads, ctx.rotated = head_dim, heads, rotated
        ctx.mark_dirty(x)
        rotate_(_turning(x, head_dim, heads, rotated), cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand the same gradient to somebody else
        rotate_(_turning(grad, ctx.head_dim, ctx.heads, ctx.rotated), cos, sin, back=True)
        return grad, None, None, None, None, None


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, *, back: bool = False) -> None:
    """Rotate all heads of x [s, ..., c] without a graph."""
    rotate_(_turning(x, head_dim, 1, 1), cos, sin, back=back)


def _turning(x: Tensor, head_dim: int, heads: int, rotated: int) -> Tensor:
    # the heads to rotate: [s, ..., c] -> [s, runs of heads, rotated, head_dim]
    return x.view(x.shape[0], x.shape[1:].numel() // (heads * head_dim), heads, head_dim)[:, :, :rotated]


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate heads [s, m, n, d], ``back`` by the opposite angle."""
    if is_fused(x) and x.stride(-1) == 1:
        from megatron_sp.ops.kernels import rotary

        rotary.rotate_(x, cos, sin, back=back)
        return
    half = cos.shape[-1]  # the pairs are (i, i + half), as in GPT-NeoX, Llama and Megatron
    sin = -sin if back else sin
    first, second = x[..., :half], x[..., half : 2 * half]
    if cos.ndim == 3:
        cos, sin = (t.repeat_interleave(x.shape[1] // t.shape[1], dim=1)[:, :, None, :] for t in (cos, sin))
    else:
        cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    if x.dtype in (torch.bfloat16, torch.float16):
        # fp32 by promotion, rounded once
        rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated_first)
        second.copy_(rotated_second)
        return
    old_first = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(old_first, sin)
