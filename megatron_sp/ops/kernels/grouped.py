"""Weight gradients of several experts in one launch, in Triton; the plain form is a product for each."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch, power_of_2

_TILE_OUT, _TILE_IN = 128, 256  # rows and columns of a gradient that a program makes
_ROWS = 64  # of an expert at a time
_STAGES = 3  # steps whose operands are on their way: 144 KiB of shared memory on Hopper
_SWATH = 8  # tiles below one another whose programs follow each other: they share columns of x in the cache


# torch._grouped_mm rounds such products to 16 bits: a buffer, another pass to add it up, and the error of each rounding
@triton.jit
def grouped_weight_kernel(
    GRAD, X, ROWS, ENDS, OUT, width_out, width_in, grad_stride, x_stride,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, BLOCK: tl.constexpr, SWATH: tl.constexpr, HAS_ROWS: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    # weight[e] (+)= sum over the rows r of expert e, one behind another, of grad[r]^T x[r]
    # a tile of one expert's gradient; an expert without rows has one of zero, or leaves what is there. All of the
    # expert's rows in order, beginning with the first, so that the bits depend on these rows alone
    expert = tl.program_id(1)
    tiles_out, tiles_in = tl.cdiv(width_out, TILE_OUT), tl.cdiv(width_in, TILE_IN)
    swath = tl.program_id(0) // (SWATH * tiles_in)
    within = tl.program_id(0) % (SWATH * tiles_in)
    height = tl.minimum(tiles_out - swath * SWATH, SWATH)
    out = (swath * SWATH + within % height) * TILE_OUT + tl.arange(0, TILE_OUT)
    column_first = within // height * TILE_IN
    column = column_first + tl.arange(0, TILE_IN)
    first = tl.load(ENDS + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    count = (tl.load(ENDS + expert) - first).to(tl.int32)
    step = tl.arange(0, BLOCK)
    # what changes from step to step are single numbers: offsets of every element would take the registers of the sum
    grads = GRAD + first * grad_stride
    from_grad = step[:, None] * grad_stride + out[None, :]
    xs = X + first * x_stride
    from_x = step[:, None] * x_stride + column[None, :]
    total = tl.zeros((TILE_OUT, TILE_IN), tl.float32)
    for done in range(0, count, BLOCK):
        real = (step < count - done)[:, None]
        grad = tl.load(grads + from_grad, mask=real & (out < width_out)[None, :], other=0.0)
        if HAS_ROWS:
            row = tl.load(ROWS + first + done + step, mask=step < count - done, other=0)
            from_row = row[:, None] * x_stride + column[None, :]
            x = tl.load(X + from_row, mask=real & (column < width_in)[None, :], other=0.0)
        else:
            x = tl.load(xs + from_x, mask=real & (column < width_in)[None, :], other=0.0)
            xs += BLOCK * x_stride
        grads += BLOCK * grad_stride
        total = tl.dot(tl.trans(grad), x, total)
    to = OUT + expert.to(tl.int64) * width_out * width_in
    left, right = tl.split(tl.permute(tl.reshape(total, TILE_OUT, 2, TILE_IN // 2), 0, 2, 1))
    half = column_first + tl.arange(0, TILE_IN // 2)
    _put(left, to, out, half, width_out, width_in, count, FRESH)
    _put(right, to, out, half + TILE_IN // 2, width_out, width_in, count, FRESH)


@triton.jit
def _put(total, to, out, column, width_out, width_in, count, FRESH: tl.constexpr):
    inside = (out < width_out)[:, None] & (column < width_in)[None, :]
    place = to + (out[:, None] * width_in + column[None, :])
    if not FRESH:
        inside = inside & (count > 0)
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


def weight_grads(out: Tensor, grad: Tensor, x: Tensor, ends: Tensor, rows: Tensor | None, *, fresh: bool) -> None:
    """Write (``fresh``) or add products grad.T @ x to ``out`` [E, out, in], fp32.

    Rows of grad [n, out], sorted by expert, end at ``ends``, int32 [E]; ``rows``, int64 [n]: the row of x for each.
    """
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    experts, width_out, width_in = out.shape
    tile_out = min(max(power_of_2(width_out), 32), _TILE_OUT)
    tile_in = min(max(power_of_2(width_in), 32), _TILE_IN)
    launch(
        grouped_weight_kernel, (ceil_div(width_out, tile_out) * ceil_div(width_in, tile_in), experts),
        (grad, x, ends if rows is None else rows, ends, out, width_out, width_in, grad.stride(0), x.stride(0)),
        reads=[grad, x, ends, *(() if rows is None else (rows,)), *(() if fresh else (out,))], writes=[out], warps=8,
        stages=_STAGES + (rows is not None),
        TILE_OUT=tile_out, TILE_IN=tile_in, BLOCK=_ROWS, SWATH=_SWATH, HAS_ROWS=rows is not None, FRESH=fresh,
    )  # fmt: skip


def takes(out: Tensor, grad: Tensor, x: Tensor) -> bool:
    """Return whether ``weight_grads`` computes these products: from 16 bits into fp32."""
    is_narrow = grad.dtype == x.dtype and grad.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and out.dtype == torch.float32 and out.is_contiguous() and out.shape[1] * out.shape[2] < 2**31
