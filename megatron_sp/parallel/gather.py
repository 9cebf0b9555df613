"""What is spread over ranks, whole on every one of them: for heads that all compute alike, and for using a model without training it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async, broadcast
from megatron_sp.parallel.parallel_context import ParallelContext
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


def whole_sequence(x: Tensor, length: int, layout: ParallelContext) -> Tensor:
    """[s/sp, ...] of each sp rank -> [length, ...], without padding; for evaluation, there is no backward."""
    return all_gather_async(x.contiguous(), layout.sp.group).wait()[:length]


def last_position(x: Tensor, length: int, layout: ParallelContext) -> Tensor:
    """[s/sp, ...] of each sp rank -> [...], what stands at position ``length - 1``; for generation, there is no backward."""
    owner, at = divmod(length - 1, x.shape[0])
    return broadcast((x[at] if layout.sp.rank == owner else torch.empty_like(x[0])).contiguous(), layout.sp.group, owner)


def agreed(value: int, layout: ParallelContext, device: torch.device) -> int:
    """What the first rank of the tp and sp groups says, on all of them.

    Every rank has computed the same; but should a library round differently on one of them, they would generate different texts and
    then wait for each other.
    """
    if layout.tp.size == 1 and layout.sp.size == 1:
        return value
    told = torch.tensor([value], dtype=torch.int64, device=device)
    return int(broadcast(broadcast(told, layout.tp.group), layout.sp.group))
