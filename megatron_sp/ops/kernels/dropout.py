"""Hash dropout in Triton; the plain form, and what the keys are, is in ``ops/dropout.py``.

    y = residual + (keep ? x / (1 - rate) : 0)

The mask exists in registers only, forward and backward.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch, power_of_2

_ROWS, _COLUMNS = 8, 512
_TOKENS = 1024


@triton.jit
def dropout_kernel(
    X, RESIDUAL, ROW_KEYS, Y, rows, width, first_channel, threshold, scale, site,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SITE: tl.constexpr,
):  # fmt: skip
    # ROWS rows and COLUMNS columns; the hash is that of ``ops.dropout.keep_mask``
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    channel_keys = (mix64(first_channel + column.to(tl.int64) + 1) >> 32).to(tl.int32)
    row_keys = tl.load(ROW_KEYS + row, mask=row < rows, other=0)
    if HAS_SITE:
        row_keys = (mix64(row_keys + site) >> 32).to(tl.int32)
    h = row_keys[:, None] ^ channel_keys[None, :]
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * (-2073254261)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(h >= threshold, x * scale, 0.0)
    if HAS_RESIDUAL:
        y += tl.load(RESIDUAL + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def token_keys_kernel(
    SAMPLES, POSITIONS, STEP, KEYS, count, batch, key, STEP_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # BLOCK tokens [s, b]: the key of sample, position and ``key``, into which a step on the device is mixed first
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_sample = tl.load(SAMPLES + at % batch, mask=at < count, other=0)
    if STEP_ON_DEVICE:
        of_sample += (mix64(tl.load(STEP) + key) >> 2) & 0x3FFFFFFFFFFFFFFF
    else:
        of_sample += key
    of_sample = mix64(of_sample)
    of_position = mix64(tl.load(POSITIONS + at // batch, mask=at < count, other=0) + 0x5851F42D)
    tl.store(KEYS + at, mix64(of_sample ^ of_position), mask=at < count)


@triton.jit
def mix64(x):
    # splitmix64's finalizer on int64; the shifts are logical
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (-4658895280553007687)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (-7723592293110705685)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def dropout(
    x: Tensor, row_keys: Tensor, threshold: int, scale: float, *, site: int | None = None, first_channel: int = 0,
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return residual + x * scale where the element's hash is at least ``threshold``, else the residual."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    width = x.shape[-1]
    rows, keys = x.numel() // width, row_keys.expand(x.shape[:-1]).contiguous()
    y = torch.empty_like(x) if out is None else out
    assert y.is_contiguous() and y.dtype == x.dtype
    launch(
        dropout_kernel, (ceil_div(rows, _ROWS), ceil_div(width, _COLUMNS)),
        (x, x if residual is None else residual, keys, y, rows, width, first_channel, threshold, scale, site or 0),
        reads=[x, keys] if residual is None else [x, keys, residual], writes=[y], warps=8,
        ROWS=_ROWS, COLUMNS=min(_COLUMNS, power_of_2(width)), HAS_RESIDUAL=residual is not None,
        HAS_SITE=site is not None,
    )  # fmt: skip
    return y


def token_keys(key: int, step: Tensor | None, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Return keys of tokens, int64 [s, b]; ``key``: of seed and step, or of the seed alone."""
    samples, positions = sample_ids.contiguous(), positions.contiguous()
    keys = torch.empty(positions.numel(), samples.numel(), dtype=torch.int64, device=samples.device)
    launch(
        token_keys_kernel, (ceil_div(keys.numel(), _TOKENS),),
        (samples, positions, samples if step is None else step, keys, keys.numel(), samples.numel(), key),
        reads=[samples, positions] if step is None else [samples, positions, step], writes=[keys],
        STEP_ON_DEVICE=step is not None, BLOCK=_TOKENS,
    )  # fmt: skip
    return keys
