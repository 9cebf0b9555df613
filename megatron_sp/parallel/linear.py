"""Tensor-parallel linear layers whose weight gradients are written directly to the main-gradient buffer.

    column-parallel:  y = enter(norm(x)) @ W.T + b              W [out/tp, in]: each rank computes its own columns of y
    row-parallel:     y = leave(act(x) @ W.T) + b (+ residual)  W [out, in/tp]: each rank sums over its own inputs

They are custom autograd functions, for overlap and memory. A preceding norm or activation is recomputed in backward
(one elementwise pass) and its output never saved; the gather of tp_seq is repeated too. The residual is added to the
result inside the op; where the residual branches off, before a norm, the op returns its input as well, so that the
stream's two gradients are added here in one pass.

Backward of the column-parallel layer:
    before:  gather x | dx GEMM | dW GEMM | reduce dx
    now:     gather x during the dx GEMM; reduce dx during the dW GEMM
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
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
    params = (None, None) if norm is None else (norm.weight, norm.bias)
    return _ColumnLinear.apply(x, weight, bias, *params, _ColumnOptions(None if norm is None else norm.spec, tp, main_grad))


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


class _ColumnOptions(NamedTuple):
    """Arguments of the column-parallel op that are not tensors."""

    norm_spec: NormSpec | None
    tp: TensorParallel
    main_grad: MainGrad | None


class _ColumnGrads(NamedTuple):
    """Gradients for autograd, in the order of the op's arguments; None for one that is not needed or is in the main_grad."""

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
        options: _ColumnOptions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tp = options.tp
        ctx.save_for_backward(x, weight, norm_weight, norm_bias)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.params, ctx.options = (weight, bias, norm_weight, norm_bias), options
        ctx.set_materialize_grads(False)
        tp.mark("mlp")
        normed, _ = normed_by(x, norm_in_front(options.norm_spec, norm_weight, norm_bias))
        a = tp.enter_async(normed).wait()
        # the result must not be a view of something made in here: autograd would forbid the rotation of q and k in
        # place
        y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
        multiply(rows_of(a), weight, bias, out=rows_of(y))
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # without a gradient of y only the residual branch was used
        grads = _ColumnGrads(x=passed) if grad is None else _column_backward(ctx, grad, passed)
        return *grads, None


def _column_backward(ctx: Any, grad: Tensor, passed: Tensor | None) -> _ColumnGrads:
    params, tp, main_grad = ctx.params, ctx.options.tp, ctx.options.main_grad
    x, weight, norm_weight, norm_bias = ctx.saved_tensors
    norm = norm_in_front(ctx.options.norm_spec, norm_weight, norm_bias)
    tp.mark("mlp")
    need_x, need_weight, need_bias, need_norm_weight, need_norm_bias = ctx.needs_input_grad[:5]
    need_back = need_x or need_norm_weight or need_norm_bias
    grad2 = rows_of(grad)
    grad_x = grad_weight = grad_bias = grad_norm_weight = grad_norm_bias = None
    normed, stats = normed_by(x, norm) if need_weight or need_back else (x, ())
    gathered = tp.enter_async(normed) if need_weight else None
    reduced: Handle | None = None
    if need_back:
        grad_a = empty((*grad.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
        torch.mm(grad2, weight, out=rows_of(grad_a))
        reduced = tp.leave_async(grad_a)
        del grad_a
    if need_bias:
        grad_bias = put_grad(main_grad, params[1], column_sum(grad2))
    if gathered is not None:
        grad_weight = put_weight_grad(main_grad, params[0], grad2, rows_of(gathered.wait()))
    del normed, gathered
    if reduced is not None and norm is None:
        grad_x = reduced.wait() if passed is None else reduced.wait().add_(passed)
    elif reduced is not None and norm is not None:
        need = need_x, need_norm_weight, need_norm_bias
        grad_x, grad_norm_weight, grad_norm_bias = norm_gradients(
            norm, reduced.wait(), x, stats, need, passed, params=params[2:], main_grad=main_grad
        )
    return _ColumnGrads(grad_x, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias)


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
        grad2, activation = rows_of(gathered.wait()), ctx.activation
        is_one_pass = need_x and need_weight and activation is not None and activation.makes_output_in_backward(x)
        if need_weight and not is_one_pass:
            a = x if activation is None else activation.forward(x)
            grad_weight = put_weight_grad(ctx.main_grad, ctx.params[0], grad2, rows_of(a))
            del a
        if need_x:
            grad_x = empty((*x.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
            torch.mm(grad2, weight, out=rows_of(grad_x))
            if is_one_pass:
                grad_x, a = activation.backward_with_output_(grad_x, x)
                grad_weight = put_weight_grad(ctx.main_grad, ctx.params[0], grad2, rows_of(a))
            elif activation is not None:
                grad_x = activation.backward_(grad_x, x)
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


def norm_in_front(spec: NormSpec | None, weight: Tensor | None, bias: Tensor | None) -> NormInFront | None:
    """Return the norm of these tensors, which an autograd function has to take one by one; None without a norm."""
    if spec is None:
        return None
    assert weight is not None
    return NormInFront(spec, weight, bias)


def normed_by(x: Tensor, norm: NormInFront | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the normed x and the norm's statistics; without a norm (x, ())."""
    return (x, ()) if norm is None else norm_forward(x, norm.weight, norm.bias, norm.spec)


def norm_gradients(
    norm: NormInFront, grad: Tensor, x: Tensor, stats: tuple[Tensor, ...], need: tuple[bool, bool, bool], passed: Tensor | None, *,
    params: tuple[Tensor | None, Tensor | None], main_grad: MainGrad | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Run backward of a norm before a linear layer.

    Args:
        norm: the norm, with the values of its weights.
        grad: gradient of the normed x.
        x: its input.
        stats: its statistics, from ``normed_by``.
        need: flags of x, weight and bias that need a gradient.
        passed: another gradient of x, from the residual branch, which is added.
        params: weight and bias as the main_grad knows them.
        main_grad: receives the gradients of weight and bias.
    Returns:
        Gradients of x, weight and bias for autograd; None for one that is not needed or is in the main_grad.
    """
    grad_x, *sums = norm_backward(grad, x, norm.weight, norm.bias, stats, norm.spec, need, passed)
    weight, bias = (None if g is None or p is None else put_grad(main_grad, p, g) for g, p in zip(sums, params, strict=True))
    return grad_x, weight, bias


def rows_of(x: Tensor) -> Tensor:
    """Reshape [..., c] to [tokens, c]."""
    return x.reshape(-1, x.shape[-1])


def column_sum(x: Tensor) -> Tensor:
    """Sum over tokens, [tokens, c] -> [c], accumulated in fp32 (or wider)."""
    return x.sum(0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None)
