"""Biases in Triton: sums over rows that go into their place, and a bias added in one pass.

Many rows are summed in parts, and then the parts (``finish``), as norms end their backward pass. Which rows make a part
depends on the shape alone, and there are no atomics.
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
"""Where a sum goes, contiguous, and whether it overwrites what is there."""
Sum = tuple[Tensor, Target]
"""Parts of a sum over rows, [parts, c] with rows that are contiguous, and where it goes."""

_COLUMNS, _ROWS = 256, 16  # of a step of a part: 512 bytes of a row of 16-bit elements, for a warp to read
_PROGRAMS = 1056  # about as many there are: 8 for each multiprocessor of an H100
_FEW_ROWS = 256  # are summed without parts
_END_COLUMNS, _END_ROWS = 32, 64  # of a step at the end: few columns, so that there are programs enough
TOGETHER = 8
"""Sums of a launch at the end."""


@triton.jit
def column_parts_kernel(X, PARTS, rows, width, stride, per_part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # a block of columns of a part of the rows
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
    P0, P1, P2, P3, P4, P5, P6, P7,
    T0, T1, T2, T3, T4, T5, T6, T7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    fresh, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # a block of columns of one of several sums, of all its parts; bit i of ``fresh``: sum i overwrites what is there
    which = tl.program_id(1)
    is_fresh = ((fresh >> which) & 1) != 0
    parts, targets = (P0, P1, P2, P3, P4, P5, P6, P7), (T0, T1, T2, T3, T4, T5, T6, T7)
    counts, widths = (n0, n1, n2, n3, n4, n5, n6, n7), (w0, w1, w2, w3, w4, w5, w6, w7)
    strides = (s0, s1, s2, s3, s4, s5, s6, s7)
    for i in tl.static_range(8):
        if which == i:
            _finish(parts[i], targets[i], counts[i], widths[i], strides[i], is_fresh, ROWS, BLOCK)


@triton.jit
def _finish(PARTS, TO, parts, width, stride, is_fresh, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = column < width
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * stride + column
        total += tl.load(PARTS + place, mask=(row < parts) & real, other=0.0).to(tl.float32)
    result = tl.sum(total, 0)[None, :]
    result += tl.load(TO + column, mask=real & (is_fresh == 0), other=0.0).to(tl.float32)
    tl.store(TO + column, result.to(TO.dtype.element_ty), mask=real)


@triton.jit
def add_bias_kernel(X, BIAS, Y, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * width + column
    y = tl.load(X + place, mask=mask, other=0.0).to(tl.float32) + bias
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


def put_column_sums(x: Tensor, target: Target) -> None:
    """Put the sum over the rows of x in its place [c]."""
    finish([(column_parts(x), target)])


def column_parts(x: Tensor) -> Tensor:
    """Return parts of the sum over the rows of x: x itself if these are few, else fp32 [parts, c]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    if rows <= _FEW_ROWS:
        return x
    blocks = ceil_div(width, _COLUMNS)
    per_part = ceil_div(ceil_div(rows, min(ceil_div(_PROGRAMS, blocks), ceil_div(rows, 4 * _ROWS))), _ROWS) * _ROWS
    parts = torch.empty(ceil_div(rows, per_part), width, dtype=torch.float32, device=x.device)
    operands = x, parts, rows, width, x.stride(0), per_part
    grid = blocks, parts.shape[0]
    launch(column_parts_kernel, grid, operands, reads=[x], writes=[parts], ROWS=_ROWS, BLOCK=_COLUMNS)
    return parts


def finish(sums: Sequence[Sum]) -> None:
    """Put sums in their places, which differ, several in a launch."""
    for first in range(0, len(sums), TOGETHER):
        some = sums[first : first + TOGETHER]
        unused = [0] * (TOGETHER - len(some))
        parts, targets = [parts for parts, _ in some], [to for _, (to, _) in some]
        fresh = sum(1 << i for i, (_, (_, is_fresh)) in enumerate(some) if is_fresh)
        operands = (
            *parts, *parts[:1] * len(unused), *targets, *targets[:1] * len(unused),
            *(x.shape[0] for x in parts), *unused, *(x.shape[1] for x in parts), *unused,
            *(x.stride(0) for x in parts), *unused, fresh,
        )  # fmt: skip
        grid = max(ceil_div(x.shape[1], _END_COLUMNS) for x in parts), len(some)
        reads = [*parts, *(to for _, (to, is_fresh) in some if not is_fresh)]
        launch(finish_kernel, grid, operands, reads=reads, writes=targets, ROWS=_END_ROWS, BLOCK=_END_COLUMNS)


def add_bias(x: Tensor, bias: Tensor, out: Tensor) -> None:
    """Write x + bias, [rows, c] and [c], to ``out``."""
    rows, width = x.shape
    block = min(power_of_2(width), 1024)
    assert x.is_contiguous() and out.is_contiguous(), "one offset is for both"
    tile = 4096 // block
    launch(
        add_bias_kernel, (ceil_div(rows, tile), ceil_div(width, block)), (x, bias, out, rows, width),
        reads=[x, bias], writes=[out], warps=warps_of(block * tile), ROWS=tile, BLOCK=block,
    )  # fmt: skip
