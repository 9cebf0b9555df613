"""y = front(x) @ W.T + b (+ residual), with the weight gradient written straight into the gradient sink.

One autograd function serves every linear layer. Three things are folded into it because they save memory: what stands in front, an
activation or a norm, is computed again in backward (one elementwise pass) and its output never stored; the residual stream is added
by the GEMM, which accumulates on top of it; and where the residual stream leaves, at a norm, the op hands its input on, so that
the two gradients of the stream meet in here and are added in one pass instead of by autograd in one more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.grad_sink import GradSink, put_grad, put_weight_grad
from megatron_sp.ops.memory import empty
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward, norm_forward


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
        sink: receives the gradients of all parameters; else they go through autograd.
    Returns:
        [..., out].
    """
    return _Linear.apply(x, weight, bias, residual, None, None, activation, sink)


def norm_linear(
    x: Tensor, norm: NormInFront, weight: Tensor, bias: Tensor | None = None, *, sink: GradSink | None = None
) -> tuple[Tensor, Tensor]:
    """A norm and the linear layer behind it.

    Args:
        x: [..., in].
        norm: the norm.
        weight: [out, in].
        bias: [out].
        sink: receives the gradients of all parameters; else they go through autograd.
    Returns:
        ([..., out]; x again, for the residual branch: the gradient that arrives there is added in here).
    """
    return _Linear.apply(x, weight, bias, None, norm.weight, norm.bias, norm.spec, sink)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        norm_weight: Tensor | None, norm_bias: Tensor | None, front: Activation | NormSpec | None, sink: GradSink | None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, weight, norm_weight, norm_bias)
        ctx.set_materialize_grads(False)
        # the sink knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.params = weight, bias, norm_weight, norm_bias
        ctx.front, ctx.sink = front, sink
        a, _ = _apply_front(x, front, norm_weight, norm_bias)
        a2 = a.reshape(-1, a.shape[-1])
        # the result must not be a view of something made in here: autograd would forbid the rotation of q and k in place
        y = empty((*x.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
        y2 = y.view(-1, weight.shape[0])
        if residual is not None:
            torch.addmm(residual.reshape(y2.shape), a2, weight.t(), out=y2)
            if bias is not None:
                y2.add_(bias)
        elif bias is not None:
            torch.addmm(bias, a2, weight.t(), out=y2)
        else:
            torch.mm(a2, weight.t(), out=y2)
        return (y, x.view_as(x)) if isinstance(front, NormSpec) else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:  # only the residual branch was used
            return passed, None, None, None, None, None, None, None
        x, weight, norm_weight, norm_bias = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual, *need_norm = ctx.needs_input_grad[:6]
        grad2 = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        a, stats = _apply_front(x, None, None, None)
        if need_weight or isinstance(ctx.front, NormSpec):
            a, stats = _apply_front(x, ctx.front, norm_weight, norm_bias)
        if need_weight:
            grad_weight = put_weight_grad(ctx.sink, ctx.params[0], grad2, a.reshape(-1, a.shape[-1]))
        del a
        if need_bias:
            grad_bias = put_grad(ctx.sink, ctx.params[1], column_sum(grad2))
        norm_grads: list[Tensor | None] = [None, None]
        if need_x or any(need_norm):
            grad_x = empty((*x.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
            torch.mm(grad2, weight, out=grad_x.view(-1, weight.shape[1]))
            if isinstance(ctx.front, Activation):
                grad_x = ctx.front.backward_(grad_x, x)
            elif ctx.front is not None:
                grad_x, *norm_grads = norm_backward(grad_x, x, norm_weight, norm_bias, stats, ctx.front, (need_x, *need_norm), passed)
                norm_grads = [None if g is None else put_grad(ctx.sink, p, g) for g, p in zip(norm_grads, ctx.params[2:], strict=True)]
        return grad_x, grad_weight, grad_bias, grad if need_residual else None, *norm_grads, None, None


def _apply_front(
    x: Tensor, front: Activation | NormSpec | None, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the GEMM multiplies, and the statistics of a norm."""
    if front is None:
        return x, ()
    if isinstance(front, Activation):
        return front.forward(x), ()
    assert norm_weight is not None
    return norm_forward(x, norm_weight, norm_bias, front)


def column_sum(x: Tensor) -> Tensor:
    """[tokens, c] -> [c], accumulated in fp32 (or wider)."""
    return x.sum(0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None)
