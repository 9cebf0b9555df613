"""Tensor-parallel linear layers whose weight gradients are written directly to the main-gradient buffer."""

#     column-parallel:  y = enter(norm(x)) @ W.T + b              W [out/tp, in]: each rank computes its columns of y
#     row-parallel:     y = leave(act(x) @ W.T) + b (+ residual)  W [out, in/tp]: each rank sums over its own inputs
#     mlp:              the one, then the other
#
# They are custom autograd functions, for overlap and memory. A preceding norm or activation is recomputed in backward
# and its output never saved; the gather of tp_seq is repeated too. Where the residual branches off, before a norm, the
# op returns its input as well, so that the stream's two gradients are added here in one pass.
#
# Backward of the column-parallel layer: gather x during the dx GEMM; reduce dx during the dW GEMM.
# Source: arXiv:1909.08053 (f and g), arXiv:2205.05198 (tp_seq, and gathering again in backward).

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.allocator import empty, is_small_result
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, holds_all, put_column_sum, put_weight_grad
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_forward, norm_gradients
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

Params = tuple[Tensor | None, ...]
Grads = tuple[Tensor | None, ...]
Linear = tuple[Tensor, Tensor | None]  # weight and bias of a linear layer
# weight, bias, norm or activation in front, tp group, receiver of the gradients
_ColumnOptions = tuple[Tensor, Tensor | None, NormInFront | None, TensorParallel, MainGrad | None]
_RowOptions = tuple[Tensor, Tensor | None, Activation | None, TensorParallel, MainGrad | None]
_MLPOptions = tuple[_ColumnOptions, _RowOptions, bool]  # those of the two layers; the input is added to the result


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: NormInFront | None = None,
    tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Column-parallel linear layer after an optional norm; return also x, whose residual's gradient is added here.

    Args:
        x: [s/parts, ..., in], the same on every rank unless tp_seq splits it; the result is [s, ..., out/tp].
        weight: [out/tp, in].
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
    """
    options = weight, bias, norm, tp, main_grad
    return _ColumnLinear.apply(options, x, *passed_to_autograd(main_grad, x, _params_of(options)))


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Activation | None = None,
    residual: Tensor | None = None, tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None,
) -> Tensor:  # fmt: skip
    """Row-parallel linear layer after an optional activation: [s, ..., in/tp] -> [s/parts, ..., out].

    Args:
        x: for a gated activation [..., 2*in/tp].
        bias: replicated; added once, after the sum, as ``residual`` is.
    """
    options = weight, bias, activation, tp, main_grad
    return _RowLinear.apply(options, x, residual, *passed_to_autograd(main_grad, x, (weight, bias)))


def mlp(
    x: Tensor, norm: NormInFront | None, fc1: Linear, fc2: Linear, activation: Activation, *, onto: Tensor | None =
    None, add_input: bool = True, tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Column-parallel linear layer, activation and row-parallel linear layer in one op: one node for autograd.

    Args:
        x: [s/parts, b, h]; returned, too, for a residual branch outside.
        fc1: weight [f/tp, h] ([2*f/tp, h] if gated), bias [f/tp].
        fc2: weight [h, f/tp], bias [h], replicated.
        onto: added to the result, else x is, with ``add_input``.
    """
    column, row = (*fc1, norm, tp, main_grad), (*fc2, activation, tp, main_grad)
    params = passed_to_autograd(main_grad, x, _params_of(column, row))
    return _MLP.apply((column, row, add_input and onto is None), x, onto, *params)


def _params_of(column: _ColumnOptions, row: tuple[Any, ...] = ()) -> Params:
    weight, bias, norm, *_ = column
    return weight, bias, *row[:2], *((None, None) if norm is None else (norm.weight, norm.bias))


def passed_to_autograd(main_grad: MainGrad | None, x: Tensor, params: Params) -> Params:
    """Return the parameters that an op has to hand to autograd: none if the main_grad holds all of them."""
    # Autograd runs a node for each parameter that it knows, in every backward pass, with nothing for it. It has to know
    # them if the op's input needs no gradient, since else it would not run the op's backward at all.
    return () if x.requires_grad and holds_all(main_grad, params) else params


def needed(flags: Sequence[bool], params: Params) -> Sequence[bool]:
    """Return which parameters need a gradient."""
    # flags: autograd's of those that were handed to it, all or none
    return flags or [p is not None and p.requires_grad for p in params]


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _ColumnOptions, x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _column(options, x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> Grads:  # type: ignore[override]
        _, need_x, *flags = ctx.needs_input_grad
        if grad is None:  # only the residual branch was used
            return None, passed, *(None for _ in flags)
        needs = need_x, *needed(flags, _params_of(ctx.options))
        (x,) = ctx.saved_tensors
        grad_x, *of_params = _column_backward(ctx.options, x, rows_of(grad), needs, passed)
        return None, grad_x, *(of_params if flags else ())


def _column(options: _ColumnOptions, x: Tensor) -> Tensor:
    weight, bias, norm, tp, _ = options
    tp.mark("mlp")
    return projected(tp.enter_async(normed_by(x, norm)[0]).wait(), weight, bias)


def _column_backward(
    options: _ColumnOptions, x: Tensor, grad: Tensor, needs: Sequence[bool], passed: Tensor | None
) -> Grads:  # fmt: skip
    # gradients of x [s/parts, ..., in], weight, bias and the norm's weight and bias, from that of the result [tokens,
    # out/tp]
    weight, bias, norm, tp, main_grad = options
    need_x, need_weight, need_bias, need_norm_weight, need_norm_bias = needs
    tp.mark("mlp")
    need_back = need_x or need_norm_weight or need_norm_bias
    grad_x = grad_weight = grad_bias = grad_norm_weight = grad_norm_bias = None
    normed, stats = normed_by(x, norm) if need_weight or need_back else (x, ())
    gathered = tp.enter_async(rows_of(normed)) if need_weight else None
    reduced: Handle | None = None
    if need_back:
        reduced = tp.leave_async(projected_by(grad, weight))
    if need_bias and bias is not None:
        grad_bias = put_column_sum(main_grad, bias, grad)
    if gathered is not None:
        grad_weight = put_weight_grad(main_grad, weight, grad, gathered.wait())
    del normed, gathered
    if reduced is not None:
        back = reduced.wait().view(x.shape)
        if norm is None:
            grad_x = back if passed is None else back.add_(passed)
        else:
            need = need_x, need_norm_weight, need_norm_bias
            of_norm = norm_gradients(norm, back, x, stats, need, passed, main_grad=main_grad)
            grad_x, grad_norm_weight, grad_norm_bias = of_norm
    return grad_x, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _RowOptions, x: Tensor, residual: Tensor | None, *_: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = options
        return _row(options, x, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _, need_x, need_residual, *flags = ctx.needs_input_grad
        (x,) = ctx.saved_tensors
        needs = need_x, *needed(flags, ctx.options[:2])
        grad_x, *of_params = _row_backward(ctx.options, rows_of(x), rows_of(grad), needs)
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return None, grad_x, grad if need_residual else None, *(of_params if flags else ())


def _row(options: _RowOptions, x: Tensor, residual: Tensor | None) -> Tensor:
    weight, bias, activation, tp, _ = options
    tp.mark("mlp")
    return project_back(x if activation is None else activation.forward(x), weight, bias, residual, tp)


def _row_backward(options: _RowOptions, x: Tensor, grad: Tensor, needs: Sequence[bool]) -> Grads:
    # gradients of x [tokens, in/tp], weight and bias, from that of the result [tokens/parts, out]
    (weight, bias, activation, tp, main_grad), (need_x, need_weight, need_bias) = options, needs
    tp.mark("mlp")
    gathered = tp.enter_async(grad)
    grad_x = grad_weight = grad_bias = None
    if need_bias and bias is not None:
        grad_bias = put_column_sum(main_grad, bias, grad)
    grad = gathered.wait()
    one_pass = None  # the activation, if its output for the weight comes with its backward
    if need_x and need_weight and activation is not None and activation.makes_output_in_backward(x):
        one_pass = activation
    if need_weight and one_pass is None:
        grad_weight = put_weight_grad(main_grad, weight, grad, x if activation is None else activation.forward(x))
    if need_x:
        grad_x = projected_by(grad, weight)
        if one_pass is not None:
            grad_x, a = one_pass.backward_with_output_(grad_x, x)
            grad_weight = put_weight_grad(main_grad, weight, grad, a)
        elif activation is not None:
            grad_x = activation.backward_(grad_x, x)
    return grad_x, grad_weight, grad_bias


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: _MLPOptions, x: Tensor, onto: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        column, row, add_input = options
        wide = _column(column, x)
        ctx.save_for_backward(x, wide)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _row(row, wide, x if add_input else onto), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> Grads:  # type: ignore[override]
        _, need_x, need_onto, *flags = ctx.needs_input_grad
        if grad is None:  # only the residual branch was used
            return None, passed, None, *(None for _ in flags)
        column, row, add_input = ctx.options
        need1, need_b1, need2, need_b2, *need_norm = needed(flags, _params_of(column, row))
        x, wide = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # the wide activation goes before the products of the first layer
        need_wide = need_x or need1 or need_b1 or any(need_norm)
        grad_wide, *of_row = _row_backward(row, rows_of(wide), rows_of(grad), (need_wide, need2, need_b2))
        del wide
        if add_input:
            passed = grad if passed is None else passed + grad
        of_column: tuple[Tensor | None, ...] = passed, None, None, None, None
        if grad_wide is not None:
            of_column = _column_backward(column, x, grad_wide, (need_x, need1, need_b1, *need_norm), passed)
        grad_x, grad1, grad_b1, *of_norm = of_column
        of_params = (grad1, grad_b1, *of_row, *of_norm) if flags else ()
        return None, grad_x, grad if need_onto else None, *of_params


def project_back(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tp: TensorParallel) -> Tensor:
    """Compute leave(a @ weight.T) + bias + residual."""
    if tp.size == 1 and residual is None:
        return projected(a, weight, bias)
    if tp.size == 1 and residual is not None and not a.is_cuda and is_small_result(a, weight.shape[0]):
        y = F.linear(a, weight, bias).add_(residual)
        return torch.ops.aten._unsafe_view.default(
            y, y.shape
        )  # a view to no one: FSDP2 warns of results that are views
    if tp.size == 1 and residual is not None:  # nothing stands between the GEMM and what is added to it
        y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
        multiply(rows_of(a), weight, bias, rows_of(residual), out=rows_of(y))
        return y
    y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    torch.mm(rows_of(a), weight.t(), out=rows_of(y))
    y = tp.leave_async(y).wait()
    if residual is not None:
        y.add_(residual)
    return y if bias is None else y.add_(bias)


def projected(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a @ weight.T + bias."""
    # the result is no view of something made in an autograd function: autograd would forbid changing it in place
    if is_small_result(a, weight.shape[0]):
        return F.linear(a, weight, bias)
    y = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    multiply(rows_of(a), weight, bias, out=rows_of(y))
    return y


def projected_by(grad: Tensor, weight: Tensor) -> Tensor:
    """Compute grad @ weight, the gradient of the input of ``projected``."""
    if is_small_result(grad, weight.shape[1]):
        return torch.mm(grad, weight)
    grad_a = empty((grad.shape[0], weight.shape[1]), dtype=grad.dtype, device=grad.device)
    return torch.mm(grad, weight, out=grad_a)


def multiply(a: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, out: Tensor) -> None:
    """Compute out = a @ weight.T + bias + residual."""
    if residual is not None and bias is not None and is_fused(out):
        from megatron_sp.ops.kernels import biases

        # instead of a copy of the residual before the product, and a pass for the bias behind it
        biases.add_bias(residual, bias, out)
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
    """Return the norm of these tensors, if there is one."""
    if spec is None:
        return None
    assert weight is not None
    return NormInFront(spec, weight, bias)


def normed_by(x: Tensor, norm: NormInFront | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return normed x and the statistics."""
    return (x, ()) if norm is None else norm_forward(x, norm.weight, norm.bias, norm.spec)


def rows_of(x: Tensor) -> Tensor:
    """Reshape [..., c] to [tokens, c]."""
    return x.reshape(-1, x.shape[-1])


def embedding(ids: Tensor, weight: Tensor, *, tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None) -> Tensor:
    """Look up rows of a table split over tp ranks: ids int64 [s, ...], weight [rows/tp, h] -> [s/parts, ..., h]."""
    # each rank looks up the rows that it holds, from r * rows/tp on, with zeros for the others; the sum is the result
    return _Embedding.apply(ids, weight, tp, main_grad)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, tp: TensorParallel, main_grad: MainGrad | None) -> Tensor:
        ctx.save_for_backward(ids)
        tp.mark("embedding")
        # by identity, as the main_grad knows it; its values are not needed
        ctx.param, ctx.tp, ctx.main_grad = weight, tp, main_grad
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
        rows, elsewhere = _local_rows(ids, view.shape[0], ctx.tp)  # with ZeRO 3 the weight itself may be away again
        whole = gathered.wait()
        grad2 = whole.reshape(-1, whole.shape[-1]).to(view.dtype)
        if elsewhere is not None:
            fill = grad2.masked_fill if grad2.dtype == whole.dtype else grad2.masked_fill_  # the widened copy is ours
            grad2 = fill(elsewhere[:, None], 0.0)  # not an index by mask: its size would have to come from the GPU
        view.index_add_(0, rows, grad2)
        return None, view if reserved is None else None, None, None


def _local_rows(ids: Tensor, rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor | None]:
    # local row of each id, flat; mask of ids on other ranks, whose local rows are arbitrary but spread out
    flat = ids.reshape(-1)
    if tp.size == 1:
        return flat, None
    local = flat - tp.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.remainder_(rows), elsewhere
