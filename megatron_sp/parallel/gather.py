"""All positions of the tp group, for what is computed on every rank of it alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.parallel.tensor_parallel import TensorParallel


def gather_positions(x: Tensor, tp: TensorParallel) -> Tensor:
    """[s/parts, ...] -> [s, ...].

    Backward takes this rank's positions of the gradient and sums nothing: whatever follows must leave the whole gradient, the same one, on
    every rank of the group.
    """
    return x if tp.parts == 1 else _GatherPositions.apply(x, tp)


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return tp.enter_async(x).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        each = grad.shape[0] // ctx.tp.parts
        return grad.narrow(0, ctx.tp.rank * each, each).contiguous(), None
