"""MLP computed over chunks of the positions, so that the wide activation exists for one chunk at a time (--mlp-chunks).

    x + dropout(leave(act(enter(norm(x)) @ W1.T + b1) @ W2.T) + b2)        x [s/parts, b, h], wide [s, b, f], 2f if it is gated

Every step treats positions independently, so any split of them gives the same result. One autograd function saves x, which is the residual
stream and kept anyway, and recomputes fc1 in backward: a fourth product besides the three of fc1, in exchange for an activation typically
four or more times as wide as the stream that would otherwise be saved in every block.

Under tensor parallelism each chunk is gathered and reduced separately: gathering all positions at once would need a tensor tp times the
size of x, and would leave nothing to overlap. The number of collectives grows with the chunks, their total size does not.
Forward, with chunks 0, 1, 2 (g: gather, r: reduce):
    before:  g | fc1 fc2 | r
    now:     g0 | fc1 fc2 0 | fc1 fc2 1 | fc1 fc2 2 | r2         g1 during chunk 0, r0 during chunk 1, ...
Backward is the same: the gathers of the next chunk and the reduction of the previous one overlap with a chunk's products.

The weight gradients of the chunks accumulate in the main_grad, where the first one overwrites; without a main_grad in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.dropout import keep_mask
from megatron_sp.ops.main_grad import MainGrad, put_grad, put_product
from megatron_sp.ops.memory import empty
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward
from megatron_sp.parallel.linear import column_sum, multiply, normed_by, rows_of
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel


@dataclass(frozen=True)
class MLPPlan:
    """Options of a chunked MLP.

    Attributes:
        spec: the norm before the MLP; None if there is none.
        activation: activation between fc1 and fc2.
        chunks: number of chunks, limited to one per position.
        tp: the tp group.
        rate: rate of the dropout after the MLP.
    """

    spec: NormSpec | None
    activation: Activation
    chunks: int
    tp: TensorParallel = NO_TP
    rate: float = 0.0

    def pieces(self, positions: int) -> list[slice]:
        """Return contiguous chunks of positions whose lengths differ by at most one; the same on every rank."""
        count = max(1, min(self.chunks, positions))
        return [slice(i * positions // count, (i + 1) * positions // count) for i in range(count)]


def chunked_mlp(
    x: Tensor, norm: NormInFront | None, fc1: tuple[Tensor, Tensor | None], fc2: tuple[Tensor, Tensor | None], plan: MLPPlan,
    *, row_keys: Tensor | None = None, onto: Tensor | None = None, main_grad: MainGrad | None = None,
) -> Tensor:  # fmt: skip
    """Compute x + mlp(norm(x)) without the wide activation of all positions.

    Args:
        x: [s/parts, b, h].
        norm: norm before fc1, with weights replicated on all ranks; or None.
        fc1: weight [f/tp, h] ([2*f/tp, h] if it is gated), bias or None.
        fc2: weight [h, f/tp], bias [h] or None, added once, after the sum over ranks.
        plan: chunks, group, dropout.
        row_keys: int32 [s/parts, b], for dropout.
        onto: of the shape of x; the MLP's output is added to it instead of x.
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
    Returns:
        [s/parts, b, h].
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return _ChunkedMLP.apply(x, weight, bias, *fc1, *fc2, onto, row_keys, plan, main_grad)


class _ChunkedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
        b2: Tensor | None, onto: Tensor | None, row_keys: Tensor | None, plan: MLPPlan, main_grad: MainGrad | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2, row_keys)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.params = norm_weight, norm_bias, w1, b1, w2, b2
        ctx.plan, ctx.main_grad, ctx.apart = plan, main_grad, onto is not None
        stream = x if onto is None else onto
        plan.tp.mark("mlp")
        y = empty(x.shape, dtype=x.dtype, device=x.device)
        late_bias = None if plan.tp.size == 1 else b2
        under_way: tuple[slice, Handle] | None = None
        for piece, entered in _entering(x, norm_weight, norm_bias, plan):
            a = entered.wait()
            inner = plan.activation.forward(_wide(a, w1, b1))
            del a, entered
            if plan.tp.size == 1 and plan.rate == 0.0:  # nothing stands between the product and what is added to it
                multiply(rows_of(inner), w2, b2, rows_of(stream[piece]), out=rows_of(y[piece]))
                del inner
                continue
            part = empty((*inner.shape[:-1], w2.shape[0]), dtype=x.dtype, device=x.device)
            multiply(rows_of(inner), w2, b2 if plan.tp.size == 1 else None, out=rows_of(part))
            del inner
            left = plan.tp.leave_async(part)
            del part
            if under_way is not None:
                _join(under_way, stream, y, late_bias, row_keys, plan.rate)
            under_way = piece, left
            del left
        if under_way is not None:
            _join(under_way, stream, y, late_bias, row_keys, plan.rate)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Backward(ctx, grad.contiguous()).run()


def _entering(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: MLPPlan) -> Iterator[tuple[slice, Handle]]:
    """Yield each chunk with the handle of its normed, gathered positions; the gather is started one chunk ahead if there is one."""
    pieces = plan.pieces(x.shape[0])
    ahead = plan.tp.parts > 1
    coming: list[Handle] = []
    for index, piece in enumerate(pieces):
        for other in pieces[index + len(coming) : index + 1 + ahead]:
            coming.append(plan.tp.enter_async(normed_by(x[other], weight, bias, plan.spec)[0]))
        yield piece, coming.pop(0)


def _wide(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute fc1."""
    u = empty((*a.shape[:-1], weight.shape[0]), dtype=a.dtype, device=a.device)
    multiply(rows_of(a), weight, bias, out=rows_of(u))
    return u


def _join(left: tuple[slice, Handle], x: Tensor, y: Tensor, bias: Tensor | None, row_keys: Tensor | None, rate: float) -> None:
    """Finish a chunk once its reduction is complete: y = x + dropout(branch + bias)."""
    piece, branch = left[0], left[1].wait()
    if bias is not None:
        branch.add_(bias)
    if row_keys is None or rate == 0.0:
        torch.add(x[piece], branch, out=y[piece])
    else:
        kept = keep_mask(row_keys[piece], x.shape[-1], rate).to(x.dtype)
        torch.addcmul(x[piece], branch, kept, value=1.0 / (1.0 - rate), out=y[piece])


class _Backward:
    """State of one backward pass: the sums over the chunks, and the chunk whose reduction is in flight."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        self.x, self.norm_weight, self.norm_bias, self.w1, self.b1, self.w2, self.row_keys = ctx.saved_tensors
        self.plan, self.main_grad, self.grad, self.params = ctx.plan, ctx.main_grad, grad, ctx.params
        self.passes = None if ctx.apart else grad  # to x, beside what comes through the branch
        self.grad_onto = grad if ctx.needs_input_grad[7] else None
        self.need_x, self.need = ctx.needs_input_grad[0], ctx.needs_input_grad[1:7]
        self.need_back = self.need_x or self.need[0] or self.need[1]
        self.sums: list[Tensor | None] = [None] * 6  # by parameter; of the two weights only without a main_grad
        self.weights = {i: _WeightGrad(self.main_grad, self.params[i]) for i in (2, 4) if self.need[i]}
        self.grad_x = empty(self.x.shape, dtype=grad.dtype, device=grad.device) if self.need_x else None

    def run(self) -> tuple[Tensor | None, ...]:
        plan = self.plan
        plan.tp.mark("mlp")
        pieces, coming = plan.pieces(self.x.shape[0]), list[tuple[Handle, Handle, tuple[Tensor, ...]]]()
        under_way: tuple[slice, Handle, tuple[Tensor, ...]] | None = None
        ahead = plan.tp.parts > 1
        for index, piece in enumerate(pieces):
            for other in pieces[index + len(coming) : index + 1 + ahead]:
                coming.append(self._enter(other))
            entered, entered_grad, stats = coming.pop(0)
            reduced = self._products(entered.wait(), entered_grad.wait())
            del entered, entered_grad
            if under_way is not None:
                self._norm(*under_way)
            under_way = None if reduced is None else (piece, reduced, stats)
            del reduced
        if under_way is not None:
            self._norm(*under_way)
        found = [None if s is None else put_grad(self.main_grad, p, s) for p, s in zip(self.params, self.sums, strict=True)]
        for i, weight in self.weights.items():
            found[i] = weight.result()
        return self.grad_x, *found, self.grad_onto, None, None, None

    def _enter(self, piece: slice) -> tuple[Handle, Handle, tuple[Tensor, ...]]:
        """Start the gathers of a chunk; return (handle of its normed input, handle of fc2's output gradient, the norm's statistics)."""
        grad = self._behind_dropout(piece)
        if self.need[5]:
            self._add(5, column_sum(rows_of(grad)))
        normed, stats = normed_by(self.x[piece], self.norm_weight, self.norm_bias, self.plan.spec)
        return self.plan.tp.enter_async(normed), self.plan.tp.enter_async(grad), stats

    def _behind_dropout(self, piece: slice) -> Tensor:
        """Return the gradient of a chunk's branch, before dropout."""
        grad, rate = self.grad[piece], self.plan.rate
        if self.row_keys is None or rate == 0.0:
            return grad
        return (grad * keep_mask(self.row_keys[piece], grad.shape[-1], rate)).mul_(1.0 / (1.0 - rate))

    def _products(self, a: Tensor, grad: Tensor) -> Handle | None:
        """Compute a chunk's products: fc1 again, both weight gradients, and the normed input's gradient, whose reduction is started."""
        activation: Activation = self.plan.activation
        grad2, reduced = rows_of(grad), None
        u = _wide(a, self.w1, self.b1)
        if 4 in self.weights:
            self.weights[4].add_product(grad2, rows_of(activation.forward(u)))
        inner = empty((*u.shape[:-1], self.w2.shape[1]), dtype=u.dtype, device=u.device)
        torch.mm(grad2, self.w2, out=rows_of(inner))
        wide = activation.backward_(inner, u)
        del inner, u
        if self.need_back:
            grad_a = empty(a.shape, dtype=grad.dtype, device=grad.device)
            torch.mm(rows_of(wide), self.w1, out=rows_of(grad_a))
            reduced = self.plan.tp.leave_async(grad_a)
            del grad_a
        if self.need[3]:
            self._add(3, column_sum(rows_of(wide)))
        if 2 in self.weights:
            self.weights[2].add_product(rows_of(wide), rows_of(a))
        return reduced

    def _norm(self, piece: slice, reduced: Handle, stats: tuple[Tensor, ...]) -> None:
        """Compute the gradient of a chunk's input, including that of the residual branch."""
        need = self.need_x, self.need[0], self.need[1]
        passed = None if self.passes is None else self.passes[piece]
        if self.plan.spec is None:
            if self.grad_x is not None:
                found = reduced.wait()
                self.grad_x[piece].copy_(found) if passed is None else torch.add(found, passed, out=self.grad_x[piece])
            return
        part, *sums = norm_backward(reduced.wait(), self.x[piece], self.norm_weight, self.norm_bias, stats, self.plan.spec, need, passed)
        if self.grad_x is not None and part is not None:
            self.grad_x[piece] = part
        for i, total in enumerate(sums):
            if total is not None:
                self._add(i, total)

    def _add(self, i: int, total: Tensor) -> None:
        known = self.sums[i]
        self.sums[i] = total if known is None else known.add_(total)


class _WeightGrad:
    """Weight gradient accumulated over chunks, in the main_grad's view or in a buffer of its own in fp32 or wider."""

    def __init__(self, main_grad: MainGrad | None, param: Tensor) -> None:
        reserved = main_grad.reserve(param) if main_grad is not None else None
        self._param, self._held = param, reserved is not None
        wide = torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
        self._view, self._fresh = reserved or (torch.empty(param.shape, dtype=wide, device=param.device), True)

    def add_product(self, grad_out: Tensor, x: Tensor) -> None:
        """Add grad_out.T @ x."""
        put_product(self._view, grad_out, x, fresh=self._fresh)
        self._fresh = False

    def result(self) -> Tensor | None:
        """Return the gradient for autograd; None if it is in the main_grad."""
        return None if self._held else self._view.to(self._param.dtype)
