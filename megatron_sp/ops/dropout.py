"""Dropout without random state: the mask is a hash of (seed, step, sample, layer, site, position, channel).

So it is the same in every parallel layout, in recomputation and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.kernels.launch import is_fused, is_fused_on


@dataclass(frozen=True)
class DropoutKeys:
    """A well-mixed key for each token, int64 [s, b]."""

    token_keys: Tensor

    @classmethod
    def create(cls, seed: int, step: int | Tensor, sample_ids: Tensor, positions: Tensor) -> DropoutKeys:
        # of global indices of samples [b] and positions [s]; a step on the device may change under a captured graph
        if is_fused_on(sample_ids.device) and sample_ids.numel() > 0 and positions.numel() > 0:
            from megatron_sp.ops.kernels import dropout

            key = _mix64_int(seed)
            if isinstance(step, Tensor):
                return cls(dropout.token_keys(key, step, sample_ids, positions))
            return cls(dropout.token_keys(_mix64_int(key + step), None, sample_ids, positions))
        if isinstance(step, int):
            of_step: int | Tensor = _mix64_int(_mix64_int(seed) + step)
        else:
            of_step = (_mix64(_mix64_int(seed) + step) >> 2) & _LOW_62
        keys = _mix64(sample_ids + of_step)  # [b]
        return cls(_mix64(keys[None, :] ^ _mix64(positions + 0x5851F42D)[:, None]))

    def row_keys(self, layer: int, site: int) -> Tensor:
        # of one dropout site of one layer, int32 [s, b]
        return fold32(_mix64(self.token_keys + _site_key(layer, site)))

    def rows(self, layer: int, site: int) -> DropoutRows:
        # the same for ``hash_dropout``: Triton's kernels compute them where they need them
        if is_fused_on(self.token_keys.device):
            return DropoutRows(self.token_keys, _site_key(layer, site))
        return DropoutRows(self.row_keys(layer, site))


class DropoutRows(NamedTuple):
    """Keys from which the mask of each row is drawn."""

    keys: Tensor  # of the rows, int32 [s, b]; with ``site`` those of the tokens, int64
    site: int | None = None  # key of the site, which is yet to be mixed into ``keys``


def hash_dropout(
    x: Tensor, rate: float, row_keys: Tensor, *, site: int | None = None, first_channel: int = 0,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply dropout, scaled by 1/(1-rate), to x [..., c], and add ``residual``; keys as in ``DropoutRows``, [...]."""
    if rate == 0.0:
        return x if residual is None else residual + x
    return _HashDropout.apply(x, rate, row_keys, site, first_channel, residual)


def keep_mask(row_keys: Tensor, num_channels: int, rate: float, first_channel: int = 0) -> Tensor:
    """Return the mask, bool [*row_keys.shape, num_channels]."""
    # int32 arithmetic is fast on CPUs and GPUs: two odd multiplications around one xor-shift, and the signed result is
    # compared with a threshold, so the best-mixed upper bits decide
    channels = torch.arange(first_channel, first_channel + num_channels, device=row_keys.device, dtype=torch.int64)
    channel_keys = fold32(_mix64(channels + 1))
    h = row_keys[..., None] ^ channel_keys
    h.mul_(0x7FEB352D)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))  # a logical shift: int32 would carry the sign
    h.mul_(-2073254261)  # 0x846CA68B as int32, from the same search for low-bias hashes as the first factor
    return h >= _threshold(rate)


def dropped(
    x: Tensor, rate: float, row_keys: Tensor, *, site: int | None = None, first_channel: int = 0,
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``hash_dropout`` without a graph; that of a gradient is its backward."""
    scale = 1.0 / (1.0 - rate)
    if is_fused(x):
        from megatron_sp.ops.kernels import dropout

        threshold, more = _threshold(rate), {"residual": residual, "out": out}
        return dropout.dropout(x, row_keys, threshold, scale, site=site, first_channel=first_channel, **more)
    row_keys = row_keys if site is None else fold32(_mix64(row_keys + site))
    mask = keep_mask(row_keys, x.shape[-1], rate, first_channel)
    # what is dropped is multiplied by 0 here, and left out by Triton's kernel: NaN stays NaN here, and is 0 there
    if residual is None:
        return (x * mask).mul_(scale)
    return torch.addcmul(residual, x, mask.to(x.dtype), value=scale, out=out)


class _HashDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rate: float, row_keys: Tensor, site: int | None, first_channel: int,
        residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(row_keys)
        ctx.rate, ctx.site, ctx.first_channel = rate, site, first_channel
        return dropped(x, rate, row_keys, site=site, first_channel=first_channel, residual=residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (row_keys,) = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = dropped(grad, ctx.rate, row_keys, site=ctx.site, first_channel=ctx.first_channel)
        return grad_x, None, None, None, None, grad if ctx.needs_input_grad[5] else None


def _threshold(rate: float) -> int:
    # the least hash of an element that is kept, in int32
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)  # a rate within 2^-33 of 1 would not fit


def fold32(keys: Tensor) -> Tensor:
    """Take the upper 32 bits of int64 keys."""
    return (keys >> 32).to(torch.int32)


def _mix64(x: Tensor) -> Tensor:
    # splitmix64's finalizer on an int64 tensor (products wrap)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _site_key(layer: int, site: int) -> int:
    return _mix64_int((layer << 8) + site + 1)


_LOW_62 = (1 << 62) - 1


def _mix64_int(x: int) -> int:
    # the same on a Python integer, so that scalars need no kernel; the result is in [0, 2^62)
    x &= (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (x ^ (x >> 31)) >> 2
