"""Sums of squares of several tensors in Triton; the plain form is in ``optim/flat.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch

_BLOCK, _BLOCKS = 4096, 4  # elements at a time, and how often, of a program
_TOGETHER = 8  # tensors of a launch: a model has more units than a small one's norm takes launches


@triton.jit
def squares_kernel(
    X0, X1, X2, X3, X4, X5, X6, X7, n0, n1, n2, n3, n4, n5, n6, n7, SUMS, programs, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # a part of one tensor; of a part beyond its end the sum is 0
    which = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCKS * BLOCK
    to = SUMS + which * programs + tl.program_id(0)
    tensors, sizes = (X0, X1, X2, X3, X4, X5, X6, X7), (n0, n1, n2, n3, n4, n5, n6, n7)
    for i in tl.static_range(8):
        if which == i:
            total = tl.zeros((BLOCK,), tl.float32)
            for block in tl.static_range(BLOCKS):
                at = first + block * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(tensors[i] + at, mask=at < sizes[i], other=0.0)
                total += x * x
            tl.store(to, tl.sum(total, 0))  # what is left for fp64 is a sum over programs


def takes(x: Tensor) -> bool:
    """Return whether a tensor can be among those of ``squares``."""
    # one that is not aligned would make the others' accesses narrow
    aligned = x.numel() > 0 and x.numel() % 16 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.float32 and x.is_contiguous() and aligned


def squares(parts: Sequence[Tensor]) -> Tensor:
    """Return fp32 sums of squares, [n], in an order that depends on sizes alone."""
    groups = [parts[i : i + _TOGETHER] for i in range(0, len(parts), _TOGETHER)]
    programs = [ceil_div(max(x.numel() for x in group), _BLOCK * _BLOCKS) for group in groups]
    lengths = [len(group) * count for group, count in zip(groups, programs, strict=True)]
    sums = torch.empty(sum(lengths), dtype=torch.float32, device=parts[0].device)
    for group, count, to in zip(groups, programs, sums.split(lengths), strict=True):
        missing = _TOGETHER - len(group)
        operands = (*group, *[group[0]] * missing, *(x.numel() for x in group), *[0] * missing, to, count)
        launch(
            squares_kernel, (count, len(group)), operands, reads=group, writes=[to], warps=8,
            BLOCKS=_BLOCKS, BLOCK=_BLOCK,
        )  # fmt: skip
    return sums
