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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, holds_all, put_column_sum, put_weight_grad
from megatron_sp.ops.memory import empty, is_small_result
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward_to, norm_forward
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

Params = tuple[Tensor | None, ...]


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
    params = _ColumnParams(weight, bias) if norm is None else _ColumnParams(weight, bias, norm.weight, norm.bias)
    options = _ColumnOptions(None if norm is None else norm.spec, tp, main_grad, params)
    return _ColumnLinear.apply(options, x, *passed_to_autograd(main_grad, x, params))


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
    params = _RowParams(weight, bias)
    return _RowLinear.apply(_RowOptions(activation, tp, main_grad, params), x, residual, *passed_to_autograd(main_grad, x, params))


def passed_to_autograd(main_grad: MainGrad | None, x: Tensor, params: Params) -> Params:
    """Return the parameters that an op has to hand to autograd: none if the main_grad holds all of them.

    Autograd runs a node for each parameter that it knows, in every backward pass, with nothing for it. It has to know
    them if the op's input needs no gradient, since else it would not run the op's backward at all.
    """
    return () if x.requires_grad and holds_all(main_grad, params) else params


def needed(flags: Sequence[bool], params: Params) -> Sequence[bool]:
    """Return which parameters need a gradient, given autograd's flags of those that were handed to it (all or none)."""
    return flags or [p is not None and p.requires_grad for p in params]


class _ColumnParams(NamedTuple):
    """Parameters of the column-parallel op, in the order of its arguments."""

    weight: Tensor
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class _ColumnOptions(NamedTuple):
    """Arguments of the column-parallel op that are not tensors of autograd."""

    norm_spec: NormSpec | None
    tp: TensorParallel
    main_grad: MainGrad | None
    params: _ColumnParams


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _ColumnOptions, x: Tensor, *passed: Tensor | None) -> tuple[Tensor, Tensor]:
        tp, (weight, bias, norm_weight, norm_bias) = options.tp, options.params
        ctx.save_for_backward(x)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.options = options
        ctx.set_materialize_grads(False)
        tp.mark("mlp")
        normed, _ = normed_by(x, norm_in_front(options.norm_spec, norm_weight, norm_bias))
        a = tp.enter_async(normed).wait()
        return projected(a, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # without a gradient of y only the residual branch was used
        grad_x, *of_params = (passed, None, None, None, None) if grad is None else _column_backward(ctx, grad, passed)
        return None, grad_x, *of_params[: len(ctx.needs_input_grad) - 2]


def _column_backward(ctx: Any, grad: Tensor, passed: Tensor | None) -> tuple[Tensor | None, ...]:
    options: _ColumnOptions = ctx.options
    params, tp, main_grad = options.params, options.tp, options.main_grad
    weight, bias, norm_weight, norm_bias = params
    (x,) = ctx.saved_tensors
    norm = norm_in_front(options.norm_spec, norm_weight, norm_bias)
    tp.mark("mlp")
    need_x = ctx.needs_input_grad[1]
    need_weight, need_bias, need_norm_weight, need_norm_bias = needed(ctx.needs_input_grad[2:], params)
    need_back = need_x or need_norm_weight or need_norm_bias
    grad2 = rows_of(grad)
    grad_x = grad_weight = grad_bias = grad_norm_weight = grad_norm_bias = None
    normed, stats = normed_by(x, norm) if need_weight or need_back else (x, ())
    gathered = tp.enter_async(normed) if need_weight else None
    reduced: Handle | None = None
    if need_back:
        reduced = tp.leave_async(projected_by(grad, weight))
    if need_bias and bias is not None:
        grad_bias = put_column_sum(main_grad, bias, grad2)
    if gathered is not None:
        grad_weight = put_weight_grad(main_grad, weight, grad2, rows_of(gathered.wait()))
    del normed, gathered
    if reduced is not None and norm is None:
        grad_x = reduced.wait() if passed is None else reduced.wait().add_(passed)
    elif reduced is not None and norm is not None:
        need = need_x, need_norm_weight, need_norm_bias
        grad_x, grad_norm_weight, grad_norm_bias = norm_gradients(norm, reduced.wait(), x, stats, need, passed, main_grad=main_grad)
    return grad_x, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias


class _RowParams(NamedTuple):
    """Parameters of the row-parallel op, in the order of its arguments."""

    weight: Tensor
    bias: Tensor | None


class _RowOptions(NamedTuple):
    """Arguments of the row-parallel op that are not tensors of autograd."""

    activation: Activation | None
    tp: TensorParallel
    main_grad: MainGrad | None
    params: _RowParams


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _RowOptions, x: Tensor, residual: Tensor | None, *passed: Tensor | None) -> Tensor:
        (weight, bias), activation, tp = options.params, options.activation, options.tp
        ctx.save_for_backward(x)
        ctx.options = options
        tp.mark("mlp")
        a = x if activation is None else activation.forward(x)
        return project_back(a, weight, bias, residual, tp)

    @staticmethod
    def backward(ctx: Any, passed: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options: _RowOptions = ctx.options
        (weight, bias), activation, tp, main_grad = options.params, options.activation, options.tp, options.main_grad
        tp.mark("mlp")
        (x,) = ctx.saved_tensors
        _, need_x, need_residual, *flags = ctx.needs_input_grad
        need_weight, need_bias = needed(flags, options.params)
        gathered = tp.enter_async(passed)
        grad_x = grad_weight = grad_bias = None
        if need_bias and bias is not None:
            grad_bias = put_column_sum(main_grad, bias, rows_of(passed))
        grad = gathered.wait()
        grad2 = rows_of(grad)
        one_pass = activation if need_x and need_weight and activation is not None and activation.makes_output_in_backward(x) else None
        if need_weight and one_pass is None:
            a = x if activation is None else activation.forward(x)
            grad_weight = put_weight_grad(main_grad, weight, grad2, rows_of(a))
            del a
        if need_x:
            grad_x = projected_by(grad, weight)
            if one_pass is not None:
                grad_x, a = one_pass.backward_with_output_(grad_x, x)
                grad_weight = put_weight_grad(main_grad, weight, grad2, rows_of(a))
            elif activation is not None:
                grad_x = activation.backward_(grad_x, x)
        return None, grad_x, passed if need_residual else None, *((grad_weight, grad_bias) if flags else ())


def project_back(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tp: TensorParallel) -> Tensor:
    """Compute leave(a @ weight.T) + bias + residual: [s, ..., in/tp] -> [s/parts, ..., out]."""
    if tp.size == 1 and residual is None:
        return projected(a, weight, bias)
    y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    if tp.size == 1 and residual is not None:  # nothing stands between the GEMM and what is added to it
        multiply(rows_of(a), weight, bias, rows_of(residual), out=rows_of(y))
        return y
    torch.mm(rows_of(a), weight.t(), out=rows_of(y))
    y = tp.leave_async(y).wait()
    if residual is not None:
        y.add_(residual)
    return y if bias is None else y.add_(bias)


def projected(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a @ weight.T + bias: [..., in] -> [..., out].

    The result is no view of something made in an autograd function: autograd would forbid changing it in place.
    """
    if is_small_result(a, weight.shape[0]):
        return F.linear(a, weight, bias)
    y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    multiply(rows_of(a), weight, bias, out=rows_of(y))
    return y


def projected_by(grad: Tensor, weight: Tensor) -> Tensor:
    """Compute grad @ weight, the gradient of the input of ``projected``: [..., out] -> [..., in]."""
    if is_small_result(grad, weight.shape[1]):
        return torch.matmul(grad, weight)
    grad_a = empty((*grad.shape[:-1], weight.shape[1]), dtype=grad.dtype, device=grad.device)
    torch.mm(rows_of(grad), weight, out=rows_of(grad_a))
    return grad_a


def multiply(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, out: Tensor) -> None:
    """Compute out = a @ weight.T + bias + residual on [tokens, ...] matrices; the GEMM accumulates onto one of the two addends."""
    if residual is not None and bias is not None and is_fused(out):
        from megatron_sp.ops.kernels import biases

        biases.add_bias(residual, bias, out)  # instead of a copy of the residual before the product, and a pass for the bias behind it
        torch.addmm(out, a, weight.t(), out=out)
    elif residual is not None:
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
    main_grad: MainGrad | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Run backward of a norm before a linear layer.

    Args:
        norm: the norm, with its parameters.
        grad: gradient of the normed x.
        x: its input.
        stats: its statistics, from ``normed_by``.
        need: flags of x, weight and bias that need a gradient.
        passed: another gradient of x, from the residual branch, which is added.
        main_grad: receives the gradients of weight and bias.
    Returns:
        Gradients of x, weight and bias for autograd; None for one that is not needed or is in the main_grad.
    """
    params = norm.weight, norm.bias
    return norm_backward_to(main_grad, params, grad, x, params, stats, norm.spec, need, passed)


def rows_of(x: Tensor) -> Tensor:
    """Reshape [..., c] to [tokens, c]."""
    return x.reshape(-1, x.shape[-1])


def column_sum(x: Tensor) -> Tensor:
    """Sum over tokens, [tokens, c] -> [c], accumulated in fp32 (or wider)."""
    return x.sum(0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None)
