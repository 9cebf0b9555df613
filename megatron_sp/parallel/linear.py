"""Tensor-parallel linear layers whose weight gradients are written directly to the main-gradient buffer.

    column-parallel:  y = enter(norm(x)) @ W.T + b              W [out/tp, in]: each rank computes its own columns of y
    row-parallel:     y = leave(act(x) @ W.T) + b (+ residual)  W [out, in/tp]: each rank sums over its own inputs

They are custom autograd functions, for overlap and memory. A preceding norm or activation is recomputed in backward (one elementwise
pass) and its output never saved; the gather of tp_seq is repeated too. The residual is added to the result inside the op; where the
residual branches off, before a norm, the op returns its input as well, so that the stream's two gradients are added here in one pass.

Backward of the column-parallel layer:
    before:  gather x | dx GEMM | dW GEMM | reduce dx
    now:     gather x during the dx GEMM; reduce dx during the dW GEMM
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.main_grad import MainGrad, put_grad, put_weight_grad
from megatron_sp.ops.memory import empty
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward, norm_forward
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: NormInFront | None = None,
    tp: TensorParallel = NO_TP,
    main_grad: MainGrad | None = None,
) -> tuple[Tensor, Tensor]:
    """Column-parallel linear layer, optionally preceded by a norm.

    Args:
        x: [s/parts, ..., in], the same on every rank of the group unless tp_seq splits it.
        weight: [out/tp, in].
        bias: [out/tp].
        norm: applied to x first; its weights are replicated on all ranks.
        tp: the tp group.
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
    Returns:
        (y [s, ..., out/tp], x for the residual branch, whose gradient is added inside this op).
    Source: arXiv:1909.08053 (f and g), arXiv:2205.05198 (tp_seq, and gathering again in backward).
    """
    norm_weight, norm_bias, spec = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.spec)
    return _ColumnLinear.apply(x, weight, bias, norm_weight, norm_bias, spec, tp, main_grad)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    tp: TensorParallel = NO_TP,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """Row-parallel linear layer, optionally preceded by an activation.

    Args:
        x: [s, ..., in/tp] ([..., 2*in/tp] for a gated activation).
        weight: [out, in/tp].
        bias: [out], replicated; added once, after the sum over ranks.
        activation: applied to x first.
        residual: [s/parts, ..., out], added to the result.
        tp: the tp group.
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
    Returns:
        [s/parts, ..., out].
    Source: as ``column_linear``.
    """
    return _RowLinear.apply(x, weight, bias, residual, activation, tp, main_grad)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
        spec: NormSpec | None, tp: TensorParallel, main_grad: MainGrad | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, weight, norm_weight, norm_bias)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.params = weight, bias, norm_weight, norm_bias
        ctx.spec, ctx.tp, ctx.main_grad = spec, tp, main_grad
        ctx.set_materialize_grads(False)
        tp.mark("mlp")
        normed, _ = normed_by(x, norm_weight, norm_bias, spec)
        a = tp.enter_async(normed).wait()
        # the result must not be a view of something made in here: autograd would forbid the rotation of q and k in place
        y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
        multiply(rows_of(a), weight, bias, out=rows_of(y))
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:  # only the residual branch was used
            return passed, None, None, None, None, None, None, None
        x, weight, norm_weight, norm_bias = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        tp.mark("mlp")
        need_x, need_weight, need_bias, need_norm_weight, need_norm_bias = ctx.needs_input_grad[:5]
        grad2, grad_weight, grad_bias, reduced = rows_of(grad), None, None, None
        need_back = need_x or need_norm_weight or need_norm_bias
        normed, stats = normed_by(x, norm_weight, norm_bias, ctx.spec) if need_weight or need_back else (x, ())
        gathered = tp.enter_async(normed) if need_weight else None
        if need_back:
            grad_a = empty((*grad.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
            torch.mm(grad2, weight, out=rows_of(grad_a))
            reduced = tp.leave_async(grad_a)
            del grad_a
        if need_bias:
            grad_bias = put_grad(ctx.main_grad, ctx.params[1], column_sum(grad2))
        if gathered is not None:
            grad_weight = put_weight_grad(ctx.main_grad, ctx.params[0], grad2, rows_of(gathered.wait()))
        del normed, gathered
        if reduced is None:
            return passed if need_x else None, grad_weight, grad_bias, None, None, None, None, None
        if ctx.spec is None:
            grad_x = reduced.wait() if passed is None else reduced.wait().add_(passed)
            return grad_x, grad_weight, grad_bias, None, None, None, None, None
        need = need_x, need_norm_weight, need_norm_bias
        normed_x, norms = norm_gradients(ctx, reduced.wait(), x, norm_weight, norm_bias, stats, need, passed)
        return normed_x, grad_weight, grad_bias, *norms, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: Activation | None,
        tp: TensorParallel, main_grad: MainGrad | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.params = weight, bias
        ctx.activation, ctx.tp, ctx.main_grad = activation, tp, main_grad
        tp.mark("mlp")
        a = x if activation is None else activation.forward(x)
        return project_back(a, weight, bias, residual, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.tp.mark("mlp")
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        gathered = ctx.tp.enter_async(grad)
        grad_x = grad_weight = grad_bias = None
        if need_bias:
            grad_bias = put_grad(ctx.main_grad, ctx.params[1], column_sum(rows_of(grad)))
        grad2 = rows_of(gathered.wait())
        if need_weight:
            a = x if ctx.activation is None else ctx.activation.forward(x)
            grad_weight = put_weight_grad(ctx.main_grad, ctx.params[0], grad2, rows_of(a))
            del a
        if need_x:
            grad_x = empty((*x.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
            torch.mm(grad2, weight, out=rows_of(grad_x))
            if ctx.activation is not None:
                grad_x = ctx.activation.backward_(grad_x, x)
        return grad_x, grad_weight, grad_bias, grad if need_residual else None, None, None, None


def project_back(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tp: TensorParallel) -> Tensor:
    """Compute leave(a @ weight.T) + bias + residual: [s, ..., in/tp] -> [s/parts, ..., out]."""
    y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    if tp.size == 1:  # nothing stands between the GEMM and what is added to it
        multiply(rows_of(a), weight, bias, None if residual is None else rows_of(residual), out=rows_of(y))
        return y
    torch.mm(rows_of(a), weight.t(), out=rows_of(y))
    y = tp.leave_async(y).wait()
    if residual is not None:
        y.add_(residual)
    return y if bias is None else y.add_(bias)


def multiply(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, out: Tensor) -> None:
    """Compute out = a @ weight.T + bias + residual on [tokens, ...] matrices; the GEMM accumulates onto one of the two addends."""
    if residual is not None:
        torch.addmm(residual, a, weight.t(), out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, a, weight.t(), out=out)
    else:
        torch.mm(a, weight.t(), out=out)


def norm_gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: tuple[Tensor, ...],
    need: tuple[bool, bool, bool], passed: Tensor | None,
) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Backward of a preceding norm: (gradient of x plus that of the residual branch, gradients of the norm's parameters for autograd)."""
    grad_x, *grads = norm_backward(grad, x, weight, bias, stats, ctx.spec, need, passed)
    first, second = (None if g is None else put_grad(ctx.main_grad, p, g) for g, p in zip(grads, ctx.params[-2:], strict=True))
    return grad_x, (first, second)


def normed_by(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the normed x and the norm's statistics; without a norm (x, ())."""
    if spec is None:
        return x, ()
    assert weight is not None
    return norm_forward(x, weight, bias, spec)


def rows_of(x: Tensor) -> Tensor:
    """Reshape [..., c] to [tokens, c]."""
    return x.reshape(-1, x.shape[-1])


def column_sum(x: Tensor) -> Tensor:
    """Sum over tokens, [tokens, c] -> [c], accumulated in fp32 (or wider)."""
    return x.sum(0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None)
