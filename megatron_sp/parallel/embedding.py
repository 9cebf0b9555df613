"""Embedding lookup whose gradient is added directly to the main_grad.

The table's rows may be split over the tp ranks (arXiv:1909.08053): each rank looks up the rows it holds and fills in
zeros for the others, and the sum over the ranks is the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel


def embedding(ids: Tensor, weight: Tensor, *, tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None) -> Tensor:
    """Look up rows of an embedding table.

    Args:
        ids: int64 [s, ...], the same on every rank of the group.
        weight: [rows/tp, h]; rank r holds rows from r * rows/tp on.
        tp: the group over which the rows are split.
        main_grad: receives the gradient of weight; if None, it goes through autograd.
    Returns:
        [s/parts, ..., h].
    """
    return _Embedding.apply(ids, weight, tp, main_grad)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, tp: TensorParallel, main_grad: MainGrad | None) -> Tensor:
        ctx.save_for_backward(ids)
        tp.mark("embedding")
        ctx.param, ctx.tp, ctx.main_grad = (
            weight,
            tp,
            main_grad,
        )  # by identity, as the main_grad knows it; its values are not needed
        out = empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        rows, elsewhere = _local_rows(ids, weight.shape[0], tp)
        torch.index_select(weight, 0, rows, out=out.view(-1, weight.shape[1]))
        if elsewhere is not None:
            out.view(-1, weight.shape[1]).masked_fill_(elsewhere[:, None], 0.0)
        return tp.leave_async(out).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.tp.mark("embedding")
        (ids,), weight = ctx.saved_tensors, ctx.param
        gathered = ctx.tp.enter_async(grad)
        reserved = ctx.main_grad.reserve(weight) if ctx.main_grad is not None else None
        view, fresh = (torch.zeros_like(weight), False) if reserved is None else reserved
        if fresh:
            view.zero_()
        rows, elsewhere = _local_rows(
            ids, view.shape[0], ctx.tp
        )  # with ZeRO stage 3 the weight itself may be away again
        whole = gathered.wait()
        grad2 = whole.reshape(-1, whole.shape[-1]).to(view.dtype)
        if elsewhere is not None:
            fill = grad2.masked_fill if grad2.dtype == whole.dtype else grad2.masked_fill_  # the widened copy is ours
            grad2 = fill(elsewhere[:, None], 0.0)  # not an index by mask: its size would have to come from the GPU
        view.index_add_(0, rows, grad2)
        return None, view if reserved is None else None, None, None


def _local_rows(ids: Tensor, rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor | None]:
    """Return (local row of each id, flat; mask of ids on other ranks, whose local rows are arbitrary but spread out; None without tp)."""
    flat = ids.reshape(-1)
    if tp.size == 1:
        return flat, None
    local = flat - tp.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.remainder_(rows), elsewhere
