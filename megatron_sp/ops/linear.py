"""y = activation(x) @ W.T + b (+ residual), with the weight gradient written straight into the gradient sink.

One autograd function serves every linear layer. Two things are folded into it because they save memory traffic: the
activation in front (its output is recomputed in backward, never stored) and the addition of the residual stream behind
(the GEMM accumulates on top of it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.grad_sink import GradSink, put_grad, put_weight_grad


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    sink: GradSink | None = None,
) -> Tensor:
    """Linear layer on the last dim.

    Args:
        x: [..., in] ([..., 2*in] with swiglu in front).
        weight: [out, in].
        bias: [out].
        activation: applied to x first.
        residual: [..., out], added to the result.
        sink: receives the gradients of weight and bias; else they go through autograd.
    Returns:
        [..., out].
    """
    return _Linear.apply(x, weight, bias, residual, activation, sink)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        activation: Activation | None, sink: GradSink | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.params = weight, bias  # the sink knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.activation, ctx.sink = activation, sink
        a = x if activation is None else activation.forward(x)
        a2 = a.reshape(-1, a.shape[-1])
        # the result must not be a view of something made in here: autograd would forbid the rotation of q and k in place
        y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=a.dtype, device=a.device)
        y2 = y.view(-1, weight.shape[0])
        if residual is not None:
            torch.addmm(residual.reshape(y2.shape), a2, weight.t(), out=y2)
            if bias is not None:
                y2.add_(bias)
        elif bias is not None:
            torch.addmm(bias, a2, weight.t(), out=y2)
        else:
            torch.mm(a2, weight.t(), out=y2)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        grad2 = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if need_x:
            grad_x = (grad2 @ weight).view(*x.shape[:-1], weight.shape[1])
        if need_weight:
            a = x if ctx.activation is None else ctx.activation.forward(x)
            grad_weight = put_weight_grad(ctx.sink, ctx.params[0], grad2, a.reshape(-1, a.shape[-1]))
        if need_bias:
            grad_bias = put_grad(ctx.sink, ctx.params[1], column_sum(grad2))
        if grad_x is not None and ctx.activation is not None:
            grad_x = ctx.activation.backward(grad_x, x)
        return grad_x, grad_weight, grad_bias, grad if need_residual else None, None, None


def column_sum(x: Tensor) -> Tensor:
    """[tokens, c] -> [c], accumulated in fp32 (or wider)."""
    return x.sum(0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None)
