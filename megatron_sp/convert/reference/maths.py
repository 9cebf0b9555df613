"""The operations of a transformer as defined in the papers: no kernels, no caches, nothing in place.

Letters: b sequences, s positions, h hidden, n query heads, g key/value heads, d channels of a head, f width of the MLP.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Scale(NamedTuple):
    """Weight and bias of a norm; RMSNorm has no bias."""

    weight: Tensor
    bias: Tensor | None = None


class Linear(NamedTuple):
    """A linear layer, y = x weight^T + bias; weight is [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Rotary(NamedTuple):
    """Rotary position embedding.

    Attributes:
        theta: the base.
        dim: number of channels of each head that are rotated, which are the first ones.
        divided_by: divisor of all positions (linear interpolation).
        stretched: (factor, low, high, original length) of Llama 3.1's scaling, or None.
        neighbours: channels 2 i and 2 i + 1 turn together, not i and i + dim/2.
    """

    theta: float
    dim: int
    divided_by: float = 1.0
    stretched: tuple[float, float, float, float] | None = None
    neighbours: bool = False

    def angles(self, positions: int, dtype: torch.dtype) -> Tensor:
        """Return the rotation angles [s, dim/2]."""
        speeds = [self._speed(self.theta ** (-2 * i / self.dim)) / self.divided_by for i in range(self.dim // 2)]
        return torch.outer(torch.arange(positions, dtype=torch.float64), torch.tensor(speeds, dtype=torch.float64)).to(dtype)

    def _speed(self, speed: float) -> float:
        """Scale one frequency: low ones are divided, high ones kept, with linear interpolation in turns per original length in between."""
        if self.stretched is None:
            return speed
        factor, low, high, length = self.stretched
        turns = length * speed / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return share * speed + (1 - share) * speed / factor


def rotate(x: Tensor, angles: Tensor, *, neighbours: bool = False) -> Tensor:
    """Rotate channel i with channel i + dim/2 of each head, or 2 i with 2 i + 1. x: [b, s, n, d], angles: [s, dim/2]."""
    half = angles.shape[1]
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    if neighbours:
        even, odd, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return torch.cat([turned.flatten(-2), rest], dim=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def norm(x: Tensor, scale: Scale, eps: float, *, rms: bool) -> Tensor:
    """Apply LayerNorm or RMSNorm over the last dim."""
    if not rms:
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * scale.weight
    return y if scale.bias is None else y + scale.bias


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(d)) v, each group of query heads with its key/value head.

    Args:
        q: [b, s, n, d]. k, v: [b, s, g, d].
        allowed: bool, broadcast to [b, 1, s, s].
    Returns:
        [b, s, n * d].
    """
    each = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(each, dim=2) for t in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("bnst,btnd->bsnd", shares, v).flatten(2)


def allowed_pairs(lengths: list[int], s: int, *, causal: bool, window: int | None) -> Tensor:
    """Return the attention mask, bool [b, 1, s, s], True = attend. Padding rows attend to the first key, so that they stay finite."""
    query, key = torch.arange(s)[:, None], torch.arange(s)[None, :]
    seen = torch.ones(s, s, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    inside = key < torch.tensor(lengths)[:, None, None]
    return ((seen & inside) | ((query >= torch.tensor(lengths)[:, None, None]) & (key == 0)))[:, None]


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation named in ``ACTIVATIONS``."""
    if name == "relu":
        return x.clamp(min=0)
    if name == "squared_relu":
        return x.clamp(min=0) ** 2
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    raise ValueError(f"{name} is not an activation: {', '.join(ACTIVATIONS)}")


ACTIVATIONS = ("relu", "squared_relu", "silu", "gelu_tanh", "gelu")
