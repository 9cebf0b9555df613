"""MLP computed over chunks of the positions, so that the wide activation exists for one chunk (--mlp-chunks)."""

#     x + dropout(leave(act(enter(norm(x)) @ W1.T + b1) @ W2.T) + b2)        x [s/parts, b, h], wide [s, b, f]
#
# One autograd function saves x, which is the residual stream and kept anyway, and recomputes fc1 in backward: a fourth
# product besides the three of fc1, in exchange for an activation four or more times as wide as the stream.
#
# Under tensor parallelism each chunk is gathered and reduced separately, which leaves something to overlap. Forward,
# with chunks 0, 1, 2 (g: gather, r: reduce):
#     g0 | fc1 fc2 0 | fc1 fc2 1 | fc1 fc2 2 | r2         g1 during chunk 0, r0 during chunk 1, ...
# Backward is the same. The weight gradients of the chunks accumulate in the main_grad, where the first one overwrites.

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.dropout import DropoutRows, dropped
from megatron_sp.ops.main_grad import MainGrad, add_column_sum, column_sum, put_grad, put_product
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward
from megatron_sp.parallel.linear import multiply, norm_in_front, normed_by, rows_of
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

_T = TypeVar("_T")


@dataclass(frozen=True)
class MLPPlan:
    """Options of a chunked MLP."""

    activation: Activation  # activation between fc1 and fc2
    chunks: int  # number of chunks, limited to one per position
    tp: TensorParallel = NO_TP
    rate: float = 0.0  # rate of the dropout after the MLP

    def pieces(self, positions: int) -> list[slice]:
        """Return contiguous chunks of positions whose lengths differ by at most one; the same on every rank."""
        count = max(1, min(self.chunks, positions))
        return [slice(i * positions // count, (i + 1) * positions // count) for i in range(count)]


def chunked_mlp(
    x: Tensor, norm: NormInFront | None, fc1: tuple[Tensor, Tensor | None], fc2: tuple[Tensor, Tensor | None], plan:
    MLPPlan, *, rows: DropoutRows | None = None, onto: Tensor | None = None, main_grad: MainGrad | None = None,
) -> Tensor:  # fmt: skip
    """Compute x + mlp(norm(x)), [s/parts, b, h], without the wide activation of all positions.

    Args:
        norm: norm before fc1, with weights replicated on all ranks; or None.
        fc1: weight [f/tp, h] ([2*f/tp, h] if it is gated), bias or None.
        fc2: weight [h, f/tp], bias [h] or None, added once, after the sum over ranks.
        rows: [s/parts, b], for dropout.
        onto: of the shape of x; the MLP's output is added to it instead of x.
    """
    norm_params: tuple[Tensor | None, Tensor | None] = (None, None) if norm is None else (norm.weight, norm.bias)
    params = _Params(*norm_params, *fc1, *fc2)
    keys, site = rows or (None, None)
    options = _Options(None if norm is None else norm.spec, plan, main_grad, site)
    return _ChunkedMLP.apply(options, x, onto, keys, *params)


class _Options(NamedTuple):
    # arguments of the op that are not tensors
    norm_spec: NormSpec | None
    plan: MLPPlan
    main_grad: MainGrad | None
    site: int | None


class _Params(NamedTuple):
    """The parameters, in the order of the op's arguments."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


# gradients for autograd, and flags of those that are needed, in the order of the op's tensors
_Grads = namedtuple("_Grads", "x onto row_keys norm_weight norm_bias w1 b1 w2 b2")


class _ChunkedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: _Options, x: Tensor, onto: Tensor | None, row_keys: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:  # fmt: skip
        params, plan = _Params._make(tensors), options.plan
        rows = None if row_keys is None else DropoutRows(row_keys, options.site)
        ctx.save_for_backward(x, row_keys, params.norm_weight, params.norm_bias, params.w1, params.b1, params.w2)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.params, ctx.options, ctx.has_onto = params, options, onto is not None
        stream = x if onto is None else onto
        plan.tp.mark("mlp")
        y = empty(x.shape, dtype=x.dtype, device=x.device)
        late_bias = None if plan.tp.size == 1 else params.b2
        under_way: tuple[slice, Handle] | None = None
        norm = norm_in_front(options.norm_spec, params.norm_weight, params.norm_bias)
        enter = lambda piece: plan.tp.enter_async(normed_by(x[piece], norm)[0])
        for piece, entered in _one_ahead(plan, x.shape[0], enter):
            a = entered.wait()
            inner = plan.activation.forward(_fc1(a, params.w1, params.b1))
            del a, entered
            if plan.tp.size == 1 and plan.rate == 0.0:  # nothing stands between the product and what is added to it
                multiply(rows_of(inner), params.w2, params.b2, rows_of(stream[piece]), out=rows_of(y[piece]))
                del inner
                continue
            part = empty((*inner.shape[:-1], params.w2.shape[0]), dtype=x.dtype, device=x.device)
            multiply(rows_of(inner), params.w2, params.b2 if plan.tp.size == 1 else None, out=rows_of(part))
            del inner
            left = plan.tp.leave_async(part)
            del part
            if under_way is not None:
                _join(under_way, stream, y, late_bias, rows, plan.rate)
            under_way = piece, left
            del left
        if under_way is not None:
            _join(under_way, stream, y, late_bias, rows, plan.rate)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *_Backward(ctx, grad.contiguous()).run()


def _one_ahead(plan: MLPPlan, positions: int, enter: Callable[[slice], _T]) -> Iterator[tuple[slice, _T]]:
    # each chunk with its gathers, which ``enter`` starts; with tp_seq one chunk ahead
    pieces, coming = plan.pieces(positions), list[_T]()
    for index, piece in enumerate(pieces):
        for other in pieces[index + len(coming) : index + 1 + (plan.tp.parts > 1)]:
            coming.append(enter(other))
        yield piece, coming.pop(0)


def _fc1(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # [..., h] -> [..., f], 2f if it is gated
    u = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    multiply(rows_of(a), weight, bias, out=rows_of(u))
    return u


def _join(
    left: tuple[slice, Handle], x: Tensor, y: Tensor, bias: Tensor | None, rows: DropoutRows | None, rate: float
) -> None:
    # finish a chunk once its reduction is complete: y = x + dropout(branch + bias)
    piece, branch = left[0], left[1].wait()
    if bias is not None:
        branch.add_(bias)
    if rows is None or rate == 0.0:
        torch.add(x[piece], branch, out=y[piece])
    else:
        dropped(branch, rate, rows.keys[piece], site=rows.site, residual=x[piece], out=y[piece])


class _Entered(NamedTuple):
    # a chunk whose normed input, and gradient of fc2's output, are being gathered for its products in backward
    normed: Handle
    grad: Handle
    stats: tuple[Tensor, ...]


class _Backward:
    """State of one backward pass: the sums over the chunks."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        self.x, self.row_keys, norm_weight, norm_bias, self.w1, self.b1, self.w2 = ctx.saved_tensors
        options: _Options = ctx.options
        self.plan, self.main_grad, self.site = options.plan, options.main_grad, options.site
        self.params, self.grad = ctx.params, grad
        self.norm = norm_in_front(options.norm_spec, norm_weight, norm_bias)
        self.need = _Grads._make(ctx.needs_input_grad[1:])
        self.need_normed = self.need.x or self.need.norm_weight or self.need.norm_bias
        self.passed = None if ctx.has_onto else grad  # to x, beside what comes through the branch
        self.sums: dict[str, Tensor] = {}  # over the chunks: gradients of biases and of the norm's parameters, by name
        self.w1_grad = _WeightGrad(self.main_grad, self.params.w1) if self.need.w1 else None
        self.w2_grad = _WeightGrad(self.main_grad, self.params.w2) if self.need.w2 else None
        self.grad_x = empty(self.x.shape, dtype=grad.dtype, device=grad.device) if self.need.x else None

    def run(self) -> _Grads:
        plan = self.plan
        plan.tp.mark("mlp")
        under_way: tuple[slice, Handle, tuple[Tensor, ...]] | None = None
        for piece, entered in _one_ahead(plan, self.x.shape[0], self._enter):
            reduced, stats = self._products(entered.normed.wait(), entered.grad.wait()), entered.stats
            del entered
            if under_way is not None:
                self._norm(*under_way)
            under_way = None if reduced is None else (piece, reduced, stats)
            del reduced
        if under_way is not None:
            self._norm(*under_way)
        norm_weight, norm_bias, b1, b2 = (self._put(name) for name in ("norm_weight", "norm_bias", "b1", "b2"))
        w1, w2 = (None if g is None else g.result() for g in (self.w1_grad, self.w2_grad))
        return _Grads(self.grad_x, self.grad if self.need.onto else None, None, norm_weight, norm_bias, w1, b1, w2, b2)

    def _enter(self, piece: slice) -> _Entered:
        grad, rate = self.grad[piece], self.plan.rate  # of the chunk's branch, before dropout
        if self.row_keys is not None and rate != 0.0:
            grad = dropped(grad, rate, self.row_keys[piece], site=self.site)
        if self.need.b2:
            self._add_column_sum("b2", rows_of(grad))
        normed, stats = normed_by(self.x[piece], self.norm)
        return _Entered(self.plan.tp.enter_async(normed), self.plan.tp.enter_async(grad), stats)

    def _products(self, a: Tensor, grad: Tensor) -> Handle | None:
        activation = self.plan.activation
        grad2, reduced = rows_of(grad), None
        u = _fc1(a, self.w1, self.b1)
        is_one_pass = activation.makes_output_in_backward(u)
        if self.w2_grad is not None and not is_one_pass:
            self.w2_grad.add_product(grad2, rows_of(activation.forward(u)))
        inner = empty((*u.shape[:-1], self.w2.shape[1]), dtype=u.dtype, device=u.device)
        torch.mm(grad2, self.w2, out=rows_of(inner))
        if self.w2_grad is not None and is_one_pass:
            wide, inner = activation.backward_with_output_(inner, u)
            self.w2_grad.add_product(grad2, rows_of(inner))
        else:
            wide = activation.backward_(inner, u)
        del inner, u
        if self.need_normed:
            grad_a = empty(a.shape, dtype=grad.dtype, device=grad.device)
            torch.mm(rows_of(wide), self.w1, out=rows_of(grad_a))
            reduced = self.plan.tp.leave_async(grad_a)
            del grad_a
        if self.need.b1:
            self._add_column_sum("b1", rows_of(wide))
        if self.w1_grad is not None:
            self.w1_grad.add_product(rows_of(wide), rows_of(a))
        return reduced

    def _norm(self, piece: slice, reduced: Handle, stats: tuple[Tensor, ...]) -> None:
        need, norm, x = (self.need.x, self.need.norm_weight, self.need.norm_bias), self.norm, self.x[piece]
        passed = None if self.passed is None else self.passed[piece]
        if norm is None:
            if self.grad_x is not None:
                back, out = reduced.wait(), self.grad_x[piece]
                out.copy_(back) if passed is None else torch.add(back, passed, out=out)
            return
        part, weight, bias = norm_backward(reduced.wait(), x, norm.weight, norm.bias, stats, norm.spec, need, passed)
        if self.grad_x is not None and part is not None:
            self.grad_x[piece] = part
        for name, total in (("norm_weight", weight), ("norm_bias", bias)):
            if total is not None:
                self.sums[name] = self.sums[name].add_(total) if name in self.sums else total

    def _add_column_sum(self, name: str, x: Tensor) -> None:
        if name in self.sums:
            add_column_sum(self.sums[name], x, fresh=False)
        else:
            self.sums[name] = column_sum(x)

    def _put(self, name: str) -> Tensor | None:
        # put a parameter's sum in the main_grad; return it if it goes through autograd
        return put_grad(self.main_grad, getattr(self.params, name), self.sums[name]) if name in self.sums else None


class _WeightGrad:
    """Weight gradient accumulated over chunks, or its operands, until the main_grad asks for it."""

    def __init__(self, main_grad: MainGrad | None, param: Tensor) -> None:
        self._main_grad, self._param = main_grad, param
        self._put_off: list[tuple[Tensor, Tensor]] | None = []
        if main_grad is None or not main_grad.later(param, self._write):
            self._put_off = None
            self._open()

    def _open(self) -> None:
        # the main_grad's view, or a buffer in fp32 or wider
        param, main_grad = self._param, self._main_grad
        reserved = main_grad.reserve(param) if main_grad is not None else None
        self._held = reserved is not None
        wide = torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
        self._view, self._fresh = reserved or (torch.empty(param.shape, dtype=wide, device=param.device), True)

    def add_product(self, grad_out: Tensor, x: Tensor) -> None:
        if self._put_off is not None:
            self._put_off.append((grad_out, x))
            return
        put_product(self._view, grad_out, x, fresh=self._fresh)
        self._fresh = False

    def result(self) -> Tensor | None:
        # the gradient for autograd; None if the main_grad has it, or will have it
        return None if self._put_off is not None or self._held else self._view.to(self._param.dtype)

    def _write(self) -> None:
        operands, self._put_off = self._put_off or [], None
        self._open()
        for grad_out, x in operands:
            self.add_product(grad_out, x)
