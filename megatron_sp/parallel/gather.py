"""Gathering of tensors split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async, broadcast
from megatron_sp.parallel.parallel_context import ParallelContext, SequenceCut
from megatron_sp.parallel.tensor_parallel import TensorParallel


def gather_positions(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather tp ranks' positions: [s/parts, ...] -> [s, ...]."""
    # backward slices this rank's positions from the gradient, without a sum: later layers must produce the same full
    # gradient on every rank of the group
    return x if tp.parts == 1 else _GatherPositions.apply(x, tp)


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return tp.enter_async(x).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        length = grad.shape[0] // ctx.tp.parts
        return grad.narrow(0, ctx.tp.rank * length, length).contiguous(), None


def whole_sequence(x: Tensor, cut: SequenceCut) -> Tensor:
    """Gather all sp and cp ranks' positions: [padded/sp, ...] -> [s, ...]."""
    # has no backward
    share = all_gather_async(x.contiguous(), cut.sp.group).wait()
    if cut.cp.size > 1:  # each gives as many rows as the one that has most
        longest = max(map(cut.length_of, range(cut.cp.size)))
        missing = longest - share.shape[0]
        share = F.pad(share, (0, 0) * (x.ndim - 1) + (0, missing)) if missing > 0 else share[:longest].contiguous()
    return cut.put_together(list(all_gather_async(share, cut.cp.group).wait().tensor_split(cut.cp.size)))


def last_position(x: Tensor, cut: SequenceCut) -> Tensor:
    """Broadcast the last position."""
    last = cut.whole - 1
    row, (cp_owner, sp_owner, _) = cut.row_of(last), cut.place(last)
    own = (torch.empty_like(x[0]) if row is None else x[row]).contiguous()
    return broadcast(broadcast(own, cut.sp.group, sp_owner), cut.cp.group, cp_owner)


def agreed(values: list[int], layout: ParallelContext, device: torch.device) -> list[int]:
    """Return the first rank's values."""
    # every rank has computed the same values; but if a library rounded differently on one of them, they would generate
    # different texts and then hang
    if layout.tp.size == layout.sp.size == layout.cp.size == 1:
        return values
    first = torch.tensor(values, dtype=torch.int64, device=device)
    for group in (layout.tp.group, layout.sp.group, layout.cp.group):
        first = broadcast(first, group)
    return list(first.tolist())
