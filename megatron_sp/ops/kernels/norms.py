"""RMSNorm and LayerNorm in Triton; the plain form is ``ops/norm.py``.

    forward     y = (x - mean) * rstd * scale + shift           RMSNorm has mean 0 and no shift
    backward    dx = rstd * (g - mean(g) - n * mean(g * n)) + add      n = (x - mean) * rstd, g = dy * scale
                dscale = sum of dy * n, dshift = sum of dy       each program its own rows, then a sum over programs

Sums over rows stay in fp32, in an order that depends on shapes alone: there are no atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.biases import Sum, Target, finish
from megatron_sp.ops.kernels.launch import WIDEST, ceil_div, launch, power_of_2, warps_of

_TILE = 1024  # elements at a time, of several rows where rows are short
_BACK_TILE = 2048  # the same in backward: an access of 128 bits for each thread and tensor
_MOST_PROGRAMS = 264  # of backward: two for each multiprocessor of an H100, each with its own sums over rows
_MOST_AHEAD = 3  # tiles on their way
_SHARED_BYTES = 96 * 1024  # their memory: Ada and Ampere's small chips have 99 KiB
_WIDE_BLOCK, _WIDE_ROWS = 2048, 4  # of wide rows in backward
# one for each multiprocessor: their rows, 34 MB where 16,384 elements wide, stay in the cache of 50 MB
_MOST_WIDE_PROGRAMS = 132
_WIDEST_NARROW = 4096  # elements of a row that are in registers in backward where accesses are narrow


@triton.jit
def norm_forward_kernel(
    X, WEIGHT, BIAS, Y, STATS, rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    # ROWS rows; wider ones than BLOCK are read once for each pass over them
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    start = row.to(tl.int64) * width
    column = tl.arange(0, BLOCK)[None, :]
    mean = tl.zeros((ROWS, 1), tl.float32)
    if ONE_BLOCK:
        mask = inside & (column < width)
        x = tl.load(X + start + column, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            mean = (tl.sum(x, 1) / width)[:, None]
            x = tl.where(mask, x - mean, 0.0)
        square = tl.sum(x * x, 1)[:, None] / width
    else:
        if CENTERED:
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for first in range(0, width, BLOCK):
                mask = inside & (first + column < width)
                total += tl.load(X + start + first + column, mask=mask, other=0.0).to(tl.float32)
            mean = (tl.sum(total, 1) / width)[:, None]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, width, BLOCK):
            mask = inside & (first + column < width)
            x = tl.load(X + start + first + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(mask, x - mean, 0.0)
            total += x * x
        square = tl.sum(total, 1)[:, None] / width
    rstd = 1.0 / tl.sqrt(square + eps)
    tl.store(STATS + row, rstd, mask=inside)
    if CENTERED:
        tl.store(STATS + rows + row, mean, mask=inside)
    if ONE_BLOCK:
        _store_normed(x * rstd, WEIGHT, BIAS, Y + start, column, column < width, mask, HAS_BIAS, ZERO_CENTERED)
    else:
        for first in range(0, width, BLOCK):
            mask = inside & (first + column < width)
            x = tl.load(X + start + first + column, mask=mask, other=0.0).to(tl.float32)
            here, real = first + column, first + column < width
            _store_normed((x - mean) * rstd, WEIGHT, BIAS, Y + start, here, real, mask, HAS_BIAS, ZERO_CENTERED)


@triton.jit
def _store_normed(normed, WEIGHT, BIAS, Y, column, real, mask, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    y = normed * _scale(WEIGHT, column, real, ZERO_CENTERED)
    if HAS_BIAS:
        y += tl.load(BIAS + column, mask=real, other=0.0).to(tl.float32)
    tl.store(Y + column, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _scale(WEIGHT, column, real, ZERO_CENTERED: tl.constexpr):
    scale = tl.load(WEIGHT + column, mask=real, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    return scale


@triton.jit
def norm_backward_kernel(
    GRAD, X, WEIGHT, STATS, ADD, GRAD_X, SUMS, rows, width, programs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_ADD: tl.constexpr,
    WANTS_X: tl.constexpr, NUM_SUMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # a row is one block; program p takes the rows of tiles p, p + programs, ...: with a row at a time nothing would be
    # on its way while its sums are made, so the next ones are copied to shared memory meanwhile (AHEAD)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    real = column < width
    scale = _scale(WEIGHT, column, real, ZERO_CENTERED)
    of_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=AHEAD):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        mask = inside & real
        start = row.to(tl.int64) * width
        grad = tl.load(GRAD + start + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(STATS + row, mask=inside, other=0.0)
        x = tl.load(X + start + column, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            x = x - tl.load(STATS + rows + row, mask=inside, other=0.0)
        normed = tl.where(mask, x * rstd, 0.0)
        if NUM_SUMS > 0:
            of_scale += grad * normed
        if NUM_SUMS > 1:
            of_shift += grad
        if WANTS_X:
            grad = grad * scale
            back = grad - normed * (tl.sum(grad * normed, 1)[:, None] / width)
            if CENTERED:
                back -= tl.sum(grad, 1)[:, None] / width
            back *= rstd
            if HAS_ADD:
                back += tl.load(ADD + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(GRAD_X + start + column, back.to(GRAD_X.dtype.element_ty), mask=mask)
    if NUM_SUMS > 0:
        tl.store(SUMS + program * width + column, tl.sum(of_scale, 0)[None, :], mask=real)
    if NUM_SUMS > 1:
        tl.store(SUMS + (programs + program) * width + column, tl.sum(of_shift, 0)[None, :], mask=real)


@triton.jit
def wide_norm_backward_kernel(
    GRAD, X, WEIGHT, STATS, ADD, GRAD_X, SUMS, rows, width, programs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_ADD: tl.constexpr,
    WANTS_X: tl.constexpr, NUM_SUMS: tl.constexpr,
):  # fmt: skip
    # rows of several blocks, a few at a time: they are read again from the cache, and change the sums, which are in
    # memory, once
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        start = row * width.to(tl.int64)
        rstd = tl.load(STATS + row, mask=inside, other=0.0)
        mean = tl.zeros((ROWS, 1), tl.float32)
        if CENTERED:
            mean = tl.load(STATS + rows + row, mask=inside, other=0.0)
        along = tl.zeros((ROWS, BLOCK), tl.float32)  # sums of g * n, and of g
        across = tl.zeros((ROWS, BLOCK), tl.float32)
        if WANTS_X:
            for first in range(0, width, BLOCK):
                here = (first + column)[None, :]
                mask = inside & (here < width)
                grad = tl.load(GRAD + start + here, mask=mask, other=0.0).to(tl.float32)
                grad = grad * _scale(WEIGHT, here, here < width, ZERO_CENTERED)
                along += grad * ((tl.load(X + start + here, mask=mask, other=0.0).to(tl.float32) - mean) * rstd)
                across += grad
        of_normed = tl.sum(along, 1)[:, None] / width
        of_mean = tl.sum(across, 1)[:, None] / width
        for first in range(0, width, BLOCK):
            here = (first + column)[None, :]
            mask = inside & (here < width)
            grad = tl.load(GRAD + start + here, mask=mask, other=0.0).to(tl.float32)
            normed = (tl.load(X + start + here, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
            if NUM_SUMS > 0:
                to = SUMS + program.to(tl.int64) * width + here
                _add_to(to, tl.sum(grad * normed, 0)[None, :], here < width, tile == program)
            if NUM_SUMS > 1:
                to = SUMS + (programs + program).to(tl.int64) * width + here
                _add_to(to, tl.sum(grad, 0)[None, :], here < width, tile == program)
            if WANTS_X:
                grad = grad * _scale(WEIGHT, here, here < width, ZERO_CENTERED)
                back = grad - normed * of_normed
                if CENTERED:
                    back -= of_mean
                back *= rstd
                if HAS_ADD:
                    back += tl.load(ADD + start + here, mask=mask, other=0.0).to(tl.float32)
                tl.store(GRAD_X + start + here, back.to(GRAD_X.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # the next rows add to sums that other threads may have written


@triton.jit
def _add_to(SUM, x, real, is_first):
    # add x to memory that no other program touches; the first one overwrites
    known = tl.load(SUM, mask=real, other=0.0)
    tl.store(SUM, tl.where(is_first, x, known + x), mask=real)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return (the normed x, its statistics); ``centered``: LayerNorm; ``zero_centered``: the scale is 1 + weight."""
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    y = torch.empty_like(x)
    stats = torch.empty(2 if centered else 1, rows, dtype=torch.float32, device=x.device)
    block = min(power_of_2(width), WIDEST)  # columns, and rows, that a program works on at a time
    tile = max(1, _TILE // block)
    launch(
        norm_forward_kernel, (ceil_div(rows, tile),),
        (x, weight, weight if bias is None else bias, y, stats, rows, width, eps),
        reads=[x, weight] if bias is None else [x, weight, bias], writes=[y, stats], warps=warps_of(block * tile),
        ROWS=tile, BLOCK=block, ONE_BLOCK=width <= block, CENTERED=centered, HAS_BIAS=bias is not None,
        ZERO_CENTERED=zero_centered,
    )  # fmt: skip
    return y, stats


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, stats: Tensor, need: tuple[bool, bool, bool], add: Tensor | None, *,
    zero_centered: bool, into: tuple[Target | None, Target | None] = (None, None),
    put: Callable[[Sequence[Sum]], None] = finish,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, plus ``add``, of weight and bias, in fp32; None if not needed or ``put`` elsewhere."""
    grad, x, add = grad.contiguous(), x.contiguous(), None if add is None else add.contiguous()
    centered, width = stats.shape[0] == 2, x.shape[-1]
    rows = x.numel() // width
    num_sums = 2 if need[2] else 1 if need[1] else 0
    is_wide = width > (WIDEST if width % 16 == 0 else _WIDEST_NARROW)  # narrow accesses take more registers
    block, tile = (_WIDE_BLOCK, _WIDE_ROWS) if is_wide else (power_of_2(width), max(1, _BACK_TILE // power_of_2(width)))
    programs = min(ceil_div(rows, tile), _MOST_WIDE_PROGRAMS if is_wide else _MOST_PROGRAMS)
    grad_x = torch.empty_like(x) if need[0] else None
    sums = torch.empty(num_sums, programs, width, dtype=torch.float32, device=x.device)
    ahead = {}
    if not is_wide:  # tiles (of both gradients and x), less one, that are on their way while one is computed
        fit = _SHARED_BYTES // (3 * block * tile * x.element_size())
        ahead["AHEAD"] = min(_MOST_AHEAD, 1 + fit) if width % 16 == 0 else 1
    added, to = x if add is None else add, x if grad_x is None else grad_x
    launch(
        wide_norm_backward_kernel if is_wide else norm_backward_kernel, (programs,),
        (grad, x, weight, stats, added, to, sums, rows, width, programs),
        reads=[grad, x, weight, stats] if add is None else [grad, x, weight, stats, add],
        writes=[t for t in (grad_x, sums) if t is not None and t.numel()], warps=8 if block * tile <= 4096 else 16,
        ROWS=tile, BLOCK=block, CENTERED=centered, ZERO_CENTERED=zero_centered, HAS_ADD=add is not None,
        WANTS_X=need[0], NUM_SUMS=num_sums, **ahead,
    )  # fmt: skip
    results: list[Tensor | None] = [None, None]
    here, elsewhere = list[Sum](), list[Sum]()
    for which in range(2):
        target = into[which]
        if need[1 + which] and target is None:
            result = results[which] = torch.empty(width, dtype=torch.float32, device=x.device)
            here.append((sums[which], (result, True)))
        elif need[1 + which] and target is not None:
            elsewhere.append((sums[which], target))
    if here:
        finish(here)
    if elsewhere:
        put(elsewhere)
    return grad_x, results[0], results[1]
