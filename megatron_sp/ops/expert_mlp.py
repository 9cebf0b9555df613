"""MLPs of several experts on the rows that have chosen them, forward and backward as plain functions.

    out[row] = sum over the row's experts e of p * fc2_e(activation(fc1_e(x[row]))),  p: the weight of e for the row

The weight is applied to what goes into fc2, so that no expert's output has to be kept: dp is the sum over the width of the MLP of
the activation and its gradient. What is kept for backward is the input of the activation alone, one row for each choice.

One expert after another: its rows are taken together, and its results added to theirs. A row chooses an expert once at most, so each
addition has rows of its own; experts come in order, so the sums have the same bits in every run, on a GPU, too.

Where many small products would leave a GPU waiting for its launches, the products of all experts are one (``torch._grouped_mm``), forward
and for the gradient of the rows. So are gradients of weights, by Triton (``ops/kernels/grouped.py``), else a product for each expert; they
go into the main_grad, where they are accumulated in fp32. Results are then added choice by choice. On a CPU one product after another is
faster, and fp64 has no grouped product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, add_column_sum, put_product
from megatron_sp.ops.memory import empty, to_device

_GROUPED_ALIGN = 16  # bytes of a row that torch's grouped product needs


class ExpertWeights(NamedTuple):
    """Parameters of a rank's experts, stacked.

    Attributes:
        w1: [E, f, h] ([E, 2f, h] if the activation is gated).
        b1: [E, f] or [E, 2f], or None.
        w2: [E, h, f].
        b2: [E, h], or None.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


@dataclass(frozen=True)
class Choices:
    """Choices of experts of this rank, sorted by expert and then by row.

    Attributes:
        rows: int64 [n], the row that has chosen.
        places: int64 [n], place of the choice in the rows' choices [rows, k], flattened.
        counts: choices of each expert.
        weights: [n], p.
        per_row: k.
    """

    rows: Tensor
    places: Tensor
    counts: list[int]
    weights: Tensor
    per_row: int

    def by_expert(self) -> Iterator[tuple[int, slice]]:
        """Yield (expert, its choices) for each expert that has any."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of experts are added up: fp32 for 16 bits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def experts_forward(
    x: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, out: Tensor, *, grouped: bool | None = None
) -> Tensor:  # fmt: skip
    """Add the experts' results to ``out``.

    Args:
        x: [rows, h].
        choices: who has chosen whom.
        params: of this rank's experts.
        activation: between fc1 and fc2.
        out: [rows, h], in ``sum_dtype``.
        grouped: compute the products of all experts as one; None: where that runs and is faster.
    Returns:
        [n, f] ([n, 2f] if gated), the inputs of the activation, for backward.
    """
    if is_grouped(x, params) if grouped is None else grouped:
        return _grouped_forward(x, choices, params, activation, out)
    wide = empty((len(choices.rows), params.w1.shape[1]), dtype=x.dtype, device=x.device)
    of_x, of_y = _Rows(x, choices), _Rows(x, choices)
    for expert, mine in choices.by_expert():
        rows, u = choices.rows[mine], wide[mine]
        a = of_x.take(x, rows)
        if params.b1 is None:
            torch.mm(a, params.w1[expert].t(), out=u)
        else:
            torch.addmm(params.b1[expert], a, params.w1[expert].t(), out=u)
        weights = choices.weights[mine, None]
        y = torch.mm(activation.forward(u).mul_(weights), params.w2[expert].t(), out=of_y.empty(len(rows)))
        if params.b2 is not None:
            y += weights.to(y.dtype) * params.b2[expert]
        out.index_add_(0, rows, y.to(out.dtype))
    return wide


def experts_backward(
    grad: Tensor, x: Tensor, wide: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, grads: ExpertGrads,
    grad_x: Tensor | None, *, grouped: bool | None = None,
) -> Tensor:  # fmt: skip
    """Add the gradients of the parameters to ``grads`` and that of the rows to ``grad_x``.

    Args:
        grad: [rows, h], gradient of the results.
        x, choices, params, activation: of the forward pass.
        wide: what the forward pass returned.
        grads: receives the gradients of the parameters.
        grad_x: [rows, h], in ``sum_dtype``; None: not needed.
        grouped: as in the forward pass.
    Returns:
        [n], gradients of the choices' weights.
    """
    if is_grouped(x, params) if grouped is None else grouped:
        return _grouped_backward(grad, x, wide, choices, params, activation, grads, grad_x)
    grad_weights = torch.empty_like(choices.weights)
    of_x, of_g = _Rows(x, choices), _Rows(x, choices)
    for expert, mine in choices.by_expert():
        rows, u, weights = choices.rows[mine], wide[mine], choices.weights[mine, None]
        g = grad.index_select(0, rows) if grads.puts_off else of_g.take(grad, rows)
        grad_u, inner, grad_weights[mine] = activation.weighted_backward_(g @ params.w2[expert], u, weights)
        if params.b2 is not None:
            grad_weights[mine] += (g * params.b2[expert]).sum(1, dtype=choices.weights.dtype)
        grads.add_fc2(expert, g, inner, weights)
        grads.add_fc1(expert, grad_u, x, rows, of_x)
        del inner, g
        if grad_x is not None:
            of_rows = torch.mm(grad_u, params.w1[expert], out=of_x.empty(len(rows)))
            grad_x.index_add_(0, rows, of_rows.to(grad_x.dtype))
    return grad_weights


class _Rows:
    """Memory of one expert's rows [n, h], which the next expert's replace: fresh memory would cost as much as the copies."""

    def __init__(self, x: Tensor, choices: Choices) -> None:
        self._memory = empty((max(choices.counts, default=0), x.shape[1]), dtype=x.dtype, device=x.device)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of some rows of x."""
        return torch.index_select(x, 0, rows, out=self.empty(len(rows)))

    def empty(self, count: int) -> Tensor:
        """Return so many rows, uninitialized."""
        return self._memory[:count]


def is_grouped(x: Tensor, params: ExpertWeights) -> bool:
    """Return whether the products of all experts are computed as one: on a GPU in bf16, where its kernel takes these shapes."""
    aligned = all(size * x.element_size() % _GROUPED_ALIGN == 0 for size in (x.shape[1], params.w1.shape[1], params.w2.shape[2]))
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and runs_grouped(x.device)


@cache
def runs_grouped(device: torch.device) -> bool:
    """Return whether a small grouped product on a GPU, with an expert without rows, gives what single ones do.

    The host waits for it: call it once before the first step.
    """
    try:
        a, b = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((24, 32), (3, 32, 16)))
        found = torch._grouped_mm(a, b, offs=_ends([16, 0, 8], device))
        return bool((found == 32.0).all())
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _ends(counts: list[int], device: torch.device) -> Tensor:
    """Return where each expert's rows end, int32 [E], on the device."""
    return to_device(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)


def _products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the products of each expert's rows of ``a`` [n, in] with its matrix of ``b`` [E, in, out], one below the other: [n, out]."""
    return torch._grouped_mm(a, b, offs=ends)


def _grouped_forward(x: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, out: Tensor) -> Tensor:
    counts, weights, ends = choices.counts, choices.weights[:, None], _ends(choices.counts, x.device)
    wide = _products(x.index_select(0, choices.rows), params.w1.transpose(1, 2), ends)
    if params.b1 is not None:
        wide += _of_each(params.b1, counts)
    y = _products(activation.forward(wide).mul_(weights), params.w2.transpose(1, 2), ends)
    if params.b2 is not None:
        y.addcmul_(weights.to(y.dtype), _of_each(params.b2, counts))
    _add_by_choice(y, choices, out)
    return wide


def _grouped_backward(
    grad: Tensor, x: Tensor, wide: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, grads: ExpertGrads,
    grad_x: Tensor | None,
) -> Tensor:  # fmt: skip
    counts, weights, dtype = choices.counts, choices.weights[:, None], choices.weights.dtype
    ends = _ends(counts, grad.device)
    g, inner = grad.index_select(0, choices.rows), activation.forward(wide)
    grad_inner = _products(g, params.w2, ends)
    grad_weights = (grad_inner * inner).sum(1, dtype=dtype)
    if params.b2 is not None:
        grad_weights += (g * _of_each(params.b2, counts)).sum(1, dtype=dtype)
    inner.mul_(weights)
    grads.add_fc2_of_all(choices, ends, g, inner)
    del g, inner  # as wide as all choices: what is not needed any more would be the peak of a step
    grad_wide = activation.backward_(grad_inner.mul_(weights), wide)
    del grad_inner
    grads.add_fc1_of_all(choices, ends, grad_wide, x)
    if grad_x is not None:
        _add_by_choice(_products(grad_wide, params.w1, ends), choices, grad_x)
    return grad_weights


def _of_each(bias: Tensor, counts: list[int]) -> Tensor:
    """Return the bias [E, c] of each choice's expert, [n, c]."""
    number = to_device(torch.tensor(counts), bias.device)
    return torch.repeat_interleave(bias, number, dim=0, output_size=sum(counts))


def _add_by_choice(rows: Tensor, choices: Choices, total: Tensor) -> None:
    """Add [n, h] to the rows that have chosen, first choices first: no two additions meet, so the bits are the same in every run."""
    n, k = len(rows), choices.per_row
    if n == 0:
        return
    place = torch.full((len(total) * k,), -1, dtype=torch.int64, device=rows.device)
    place[choices.places] = torch.arange(n, device=rows.device)
    for of_choice in place.view(len(total), k).unbind(1):
        if n == len(place):
            total += rows.index_select(0, of_choice)
        else:  # some choices are of experts of other ranks
            total += rows.index_select(0, of_choice.clamp_min(0)).masked_fill_(of_choice[:, None] < 0, 0)


class ExpertGrads:
    """Gradients of the parameters of a rank's experts, added up over several calls of ``experts_backward``.

    They go into the main_grad, now or, where gradients are put off, when it asks for them; without one they are returned. An
    expert that no row has chosen has a gradient of zero.

    Args:
        params: as the main_grad knows them.
        needs: which of them need a gradient.
        main_grad: None: gradients are returned to autograd.
    """

    def __init__(self, params: ExpertWeights, needs: tuple[bool, bool, bool, bool], main_grad: MainGrad | None) -> None:
        self._w1, self._b1, self._w2, self._b2 = (
            _stacked_grad(main_grad, param) if need and param is not None else None for param, need in zip(params, needs, strict=True)
        )

    @property
    def puts_off(self) -> bool:
        """True if what is handed over is read later."""
        return any(isinstance(grad, _PutOffStackedGrad) for grad in (self._w1, self._b1, self._w2, self._b2))

    def add_fc1(self, expert: int, grad: Tensor, x: Tensor, rows: Tensor, memory: _Rows | None = None) -> None:
        """Add to the gradients of fc1: its output's gradient [n, f], the input's rows of ``x``; ``memory``: for a copy of them."""
        if self._w1 is not None:
            product = _Product(grad, x, rows) if memory is None or self.puts_off else _Product(grad, memory.take(x, rows))
            self._w1.add(expert, product)
        if self._b1 is not None:
            self._b1.add(expert, _Sum(grad))

    def add_fc2(self, expert: int, grad: Tensor, inner: Tensor, weights: Tensor) -> None:
        """Add to the gradients of fc2: rows of its output's gradient [n, h], its weighted input [n, f], the weights [n, 1]."""
        if self._w2 is not None:
            self._w2.add(expert, _Product(grad, inner))
        if self._b2 is not None:
            self._b2.add(expert, _Sum(grad * weights))

    def add_fc1_of_all(self, choices: Choices, ends: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add to the gradients of fc1 of all experts; ``ends``: where their rows of grad [n, f] end, on the device."""
        if self._w1 is not None:
            self._w1.add_all(_Products(choices.counts, ends, grad, x, choices.rows))
        if self._b1 is not None:
            for expert, mine in choices.by_expert():
                self._b1.add(expert, _Sum(grad[mine]))

    def add_fc2_of_all(self, choices: Choices, ends: Tensor, grad: Tensor, inner: Tensor) -> None:
        """Add to the gradients of fc2 of all experts: rows of its output's gradient [n, h], its weighted input [n, f]."""
        if self._w2 is not None:
            self._w2.add_all(_Products(choices.counts, ends, grad, inner))
        if self._b2 is not None:
            for expert, mine in choices.by_expert():
                self._b2.add(expert, _Sum(grad[mine] * choices.weights[mine, None]))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients for autograd, in the order of the parameters; None for one that is not needed or is in the main_grad."""
        w1, b1, w2, b2 = (None if grad is None else grad.result() for grad in (self._w1, self._b1, self._w2, self._b2))
        return w1, b1, w2, b2


class _Product(NamedTuple):
    """grad.T @ x, of all rows of x or of some."""

    grad: Tensor
    x: Tensor
    rows: Tensor | None = None

    def put(self, view: Tensor, *, fresh: bool) -> None:
        put_product(view, self.grad, self.x if self.rows is None else self.x.index_select(0, self.rows), fresh=fresh)


class _Products(NamedTuple):
    """grad.T @ x of each expert: its rows of grad, which end at ``ends``, and those of x, or of x[rows]."""

    counts: list[int]
    ends: Tensor
    grad: Tensor
    x: Tensor
    rows: Tensor | None = None

    def put_as_one(self, view: Tensor, *, fresh: bool) -> bool:
        """Put the gradients of all experts in the view [E, out, in] with one launch; return whether there is a kernel for it."""
        if not is_fused(self.grad):
            return False
        from megatron_sp.ops.kernels import grouped

        if not grouped.takes(view, self.grad, self.x):
            return False
        grouped.weight_grads(view, self.grad, self.x, self.ends, self.rows, fresh=fresh)
        return True

    def by_expert(self) -> Iterator[tuple[int, _Product]]:
        """Yield (expert, its product) for each expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            mine = slice(start, start + count)
            if count and self.rows is None:
                yield expert, _Product(self.grad[mine], self.x[mine])
            elif count and self.rows is not None:
                yield expert, _Product(self.grad[mine], self.x, self.rows[mine])
            start += count


class _Sum(NamedTuple):
    """Sum over the rows of a gradient."""

    grad: Tensor

    def put(self, view: Tensor, *, fresh: bool) -> None:
        add_column_sum(view, self.grad, fresh=fresh)


class _StackedGrad:
    """Gradient of a stacked parameter, [E, ...], one expert at a time."""

    def __init__(self, main_grad: MainGrad | None, param: Tensor) -> None:
        reserved = main_grad.reserve(param) if main_grad is not None else None
        self._param, self._held = param, reserved is not None
        self._view, fresh = reserved or (torch.empty(param.shape, dtype=sum_dtype(param.dtype), device=param.device), True)
        self._fresh = [fresh] * len(param)

    def add(self, expert: int, part: _Product | _Sum) -> None:
        """Add a part of an expert's gradient."""
        part.put(self._view[expert], fresh=self._fresh[expert])
        self._fresh[expert] = False

    def add_all(self, products: _Products) -> None:
        """Add a part of the gradient of each expert that has rows."""
        if len(set(self._fresh)) == 1 and products.put_as_one(self._view, fresh=self._fresh[0]):
            self._fresh = [False] * len(self._fresh)
            return
        for expert, product in products.by_expert():
            self.add(expert, product)

    def result(self) -> Tensor | None:
        """Complete the gradient; return it for autograd, or None if it is in the main_grad."""
        for expert, fresh in enumerate(self._fresh):
            if fresh:
                self._view[expert].zero_()
        return None if self._held else self._view.to(self._param.dtype)


@dataclass
class _PutOffStackedGrad:
    """Parts of a ``_StackedGrad``, until the main_grad asks for the gradient."""

    main_grad: MainGrad
    param: Tensor
    parts: list[tuple[int, _Product | _Sum] | _Products] = field(default_factory=list)

    def add(self, expert: int, part: _Product | _Sum) -> None:
        """As of ``_StackedGrad``."""
        self.parts.append((expert, part))

    def add_all(self, products: _Products) -> None:
        """As of ``_StackedGrad``."""
        self.parts.append(products)

    def result(self) -> None:
        """Return None: the main_grad has it, or will have it."""

    def write(self) -> None:
        """Compute the gradient and store it."""
        made = _StackedGrad(self.main_grad, self.param)
        for part in self.parts:
            made.add_all(part) if isinstance(part, _Products) else made.add(*part)
        made.result()


def _stacked_grad(main_grad: MainGrad | None, param: Tensor) -> _StackedGrad | _PutOffStackedGrad:
    """Return what adds up the gradient of a stacked parameter, now or when the main_grad asks for it."""
    if main_grad is not None:
        put_off = _PutOffStackedGrad(main_grad, param)
        if main_grad.later(param, put_off.write):
            return put_off
    return _StackedGrad(main_grad, param)
