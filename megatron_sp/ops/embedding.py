"""Rows of a table by index, the gradient added straight into the sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.grad_sink import GradSink
from megatron_sp.ops.memory import empty


def embedding(ids: Tensor, weight: Tensor, *, sink: GradSink | None = None) -> Tensor:
    """Look rows up.

    Args:
        ids: int64, any shape.
        weight: [rows, h].
        sink: receives the gradient of weight.
    Returns:
        [*ids.shape, h].
    """
    return _Embedding.apply(ids, weight, sink)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sink: GradSink | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.param, ctx.sink = weight, sink  # by identity, as the sink knows it; its values are not needed
        out = empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        torch.index_select(weight, 0, ids.reshape(-1), out=out.view(-1, weight.shape[1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,), weight = ctx.saved_tensors, ctx.param
        claimed = ctx.sink.claim(weight) if ctx.sink is not None else None
        view, fresh = (torch.zeros_like(weight), False) if claimed is None else claimed
        if fresh:
            view.zero_()
        view.index_add_(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(view.dtype))
        return None, view if claimed is None else None, None
