"""Sums of squares of several tensors in Triton; the plain form is in ``optim/flat.py``.

A program sums some thousand elements of one tensor in fp32; what is left for fp64 is a sum over programs. Several tensors
share a launch, since a model has more units than a small one's norm takes launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch

_BLOCK, _BLOCKS = 4096, 4  # elements at a time, and how often, of a program
_TOGETHER = 8  # tensors of a launch


@triton.jit
def squares_kernel(
    X0, X1, X2, X3, X4, X5, X6, X7, n0, n1, n2, n3, n4, n5, n6, n7, SUMS, programs, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """A part of one tensor; of a part beyond its end the sum is 0."""
    which = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCKS * BLOCK
    to = SUMS + which * programs + tl.program_id(0)
    if which == 0:
        tl.store(to, _sum_of_squares(X0, n0, first, BLOCKS, BLOCK))
    elif which == 1:
        tl.store(to, _sum_of_squares(X1, n1, first, BLOCKS, BLOCK))
    elif which == 2:
        tl.store(to, _sum_of_squares(X2, n2, first, BLOCKS, BLOCK))
    elif which == 3:
        tl.store(to, _sum_of_squares(X3, n3, first, BLOCKS, BLOCK))
    elif which == 4:
        tl.store(to, _sum_of_squares(X4, n4, first, BLOCKS, BLOCK))
    elif which == 5:
        tl.store(to, _sum_of_squares(X5, n5, first, BLOCKS, BLOCK))
    elif which == 6:
        tl.store(to, _sum_of_squares(X6, n6, first, BLOCKS, BLOCK))
    else:
        tl.store(to, _sum_of_squares(X7, n7, first, BLOCKS, BLOCK))


@triton.jit
def _sum_of_squares(X, n, first, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for block in tl.static_range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < n, other=0.0)
        total += x * x
    return tl.sum(total, 0)


def takes(x: Tensor) -> bool:
    """Return whether a tensor can be among those of ``squares``: one that is not aligned would make the others' accesses narrow."""
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() % 16 == 0 and x.data_ptr() % 16 == 0 and x.numel() > 0


def squares(parts: Sequence[Tensor]) -> Tensor:
    """Return fp32 sums of squares of parts of flat tensors, in an order that depends on their sizes alone: [n].

    Args:
        parts: at least one, each of which ``takes``.
    """
    groups = [parts[i : i + _TOGETHER] for i in range(0, len(parts), _TOGETHER)]
    programs = [ceil_div(max(x.numel() for x in group), _BLOCK * _BLOCKS) for group in groups]
    sizes = [len(group) * each for group, each in zip(groups, programs, strict=True)]
    sums = torch.empty(sum(sizes), dtype=torch.float32, device=parts[0].device)
    for group, each, to in zip(groups, programs, sums.split(sizes), strict=True):
        missing = _TOGETHER - len(group)
        launch(
            squares_kernel, (each, len(group)),
            (*group, *[group[0]] * missing, *(x.numel() for x in group), *[0] * missing, to, each),
            reads=group, writes=[to], warps=8, BLOCKS=_BLOCKS, BLOCK=_BLOCK,
        )  # fmt: skip
    return sums
