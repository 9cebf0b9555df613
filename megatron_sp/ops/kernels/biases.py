"""Biases in Triton: sums over rows that go into their place, and a bias and a residual added in one pass.

    column sums     to (+)= sum over the rows of x                      in fp32; the plain form is x.sum(0) and a copy or an addition
    add_bias        y = residual + bias                                 onto which a product is accumulated

Many rows are summed in parts, each by a program for each block of columns, and then the parts (``finish``), which is also how
norms end their backward pass: the sums of their programs are such parts. Which rows make a part depends on the shape
alone, and there are no atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch, power_of_2, warps_of

Target = tuple[Tensor, bool]
"""Where a sum goes, contiguous, and whether it overwrites what is there, or is added."""

_COLUMNS, _ROWS = 256, 16  # of a step of a part: 512 bytes of a row of 16-bit elements, for a warp to read
_PROGRAMS = 1056  # about as many there are: 8 for each multiprocessor of an H100
_FEW_ROWS = 256  # are summed without parts
_END_COLUMNS, _END_ROWS = 32, 64  # of a step at the end: few columns, so that there are programs enough


@triton.jit
def column_parts_kernel(X, PARTS, rows, width, stride, per_part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of a part of the rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    part = tl.program_id(1)
    first = part * per_part
    end = tl.minimum(first + per_part, rows)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < end) & (column < width)
        total += tl.load(X + row.to(tl.int64) * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(PARTS + part * width + column, tl.sum(total, 0)[None, :], mask=column < width)


@triton.jit
def finish_kernel(
    PARTS, FIRST, SECOND, parts, width, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST_FRESH: tl.constexpr, SECOND_FRESH: tl.constexpr,
):  # fmt: skip
    """A block of columns of one of two sums, of all its parts."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    which = tl.program_id(1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < parts) & (column < width)
        total += tl.load(PARTS + (which * parts + row).to(tl.int64) * stride + column, mask=mask, other=0.0).to(tl.float32)
    found = tl.sum(total, 0)[None, :]
    if which == 0:
        _put(FIRST, found, column, width, FIRST_FRESH)
    else:
        _put(SECOND, found, column, width, SECOND_FRESH)


@triton.jit
def _put(TO, found, column, width, FRESH: tl.constexpr):
    if not FRESH:
        found += tl.load(TO + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(TO + column, found.to(TO.dtype.element_ty), mask=column < width)


@triton.jit
def add_bias_kernel(X, BIAS, Y, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of x + bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * width + column
    y = tl.load(X + place, mask=mask, other=0.0).to(tl.float32) + bias
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


def put_column_sums(x: Tensor, target: Target) -> None:
    """Put the sum over the rows of x [rows, c] in its place [c]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    if rows <= _FEW_ROWS:
        finish(x[None], [target])
        return
    blocks = ceil_div(width, _COLUMNS)
    per_part = ceil_div(ceil_div(rows, min(ceil_div(_PROGRAMS, blocks), ceil_div(rows, 4 * _ROWS))), _ROWS) * _ROWS
    parts = torch.empty(1, ceil_div(rows, per_part), width, dtype=torch.float32, device=x.device)
    launch(
        column_parts_kernel, (blocks, parts.shape[1]), (x, parts, rows, width, x.stride(0), per_part), reads=[x], writes=[parts],
        ROWS=_ROWS, BLOCK=_COLUMNS,
    )  # fmt: skip
    finish(parts, [target])


def finish(parts: Tensor, targets: Sequence[Target]) -> None:
    """Put one or two sums over parts [1 or 2, parts, c] in their places."""
    (first, first_fresh), (second, second_fresh) = targets[0], targets[-1]
    width = parts.shape[2]
    added = [to for to, fresh in targets if not fresh]
    launch(
        finish_kernel, (ceil_div(width, _END_COLUMNS), len(targets)), (parts, first, second, parts.shape[1], width, parts.stride(1)),
        reads=[parts, *added], writes=[to for to, _ in targets], ROWS=_END_ROWS, BLOCK=_END_COLUMNS,
        FIRST_FRESH=first_fresh, SECOND_FRESH=second_fresh,
    )  # fmt: skip


def add_bias(x: Tensor, bias: Tensor, out: Tensor) -> None:
    """Write x + bias, [rows, c] and [c], to ``out``; both contiguous."""
    rows, width = x.shape
    block = min(power_of_2(width), 1024)
    assert x.is_contiguous() and out.is_contiguous(), "one offset is for both"
    tile = 4096 // block
    launch(
        add_bias_kernel, (ceil_div(rows, tile), ceil_div(width, block)), (x, bias, out, rows, width), reads=[x, bias], writes=[out],
        warps=warps_of(block * tile), ROWS=tile, BLOCK=block,
    )  # fmt: skip
