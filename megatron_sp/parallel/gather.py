"""Gathering of tensors split over ranks, for heads that all ranks compute alike and for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async, broadcast
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import TensorParallel


def gather_positions(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the positions of all tp ranks: [s/parts, ...] -> [s, ...].

    Backward slices this rank's positions from the gradient, without a sum: later layers must produce the same full
    gradient on every rank of the group.
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
    """Gather the positions of all sp ranks, [s/sp, ...] -> [length, ...], without padding; for evaluation, has no backward."""
    return all_gather_async(x.contiguous(), layout.sp.group).wait()[:length]


def last_position(x: Tensor, length: int, layout: ParallelContext) -> Tensor:
    """Broadcast position ``length - 1`` over the sp ranks, [s/sp, ...] -> [...]; for generation, has no backward."""
    owner, at = divmod(length - 1, x.shape[0])
    return broadcast((x[at] if layout.sp.rank == owner else torch.empty_like(x[0])).contiguous(), layout.sp.group, owner)


def agreed(value: int, layout: ParallelContext, device: torch.device) -> int:
    """Return the value of the first rank of the tp and sp groups, on all their ranks.

    Every rank has computed the same value; but if a library rounded differently on one of them, they would generate
    different texts and then hang.
    """
    if layout.tp.size == 1 and layout.sp.size == 1:
        return value
    told = torch.tensor([value], dtype=torch.int64, device=device)
    return int(broadcast(broadcast(told, layout.tp.group), layout.sp.group))
