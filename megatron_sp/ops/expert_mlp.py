"""MLPs of several experts on the rows that have chosen them, forward and backward as plain functions.

    out[row] = sum over the row's experts e of p * fc2_e(activation(fc1_e(x[row]))),  p: the weight of e for the row

The weight is applied to what goes into fc2, so that no expert's output has to be kept. Where many small products would
leave a GPU waiting for launches, those of all experts are one (``torch._grouped_mm``); on a CPU one by one is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.allocator import empty, to_device
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, add_column_sum, put_product

_GROUPED_ALIGN = 16  # bytes of a row that torch's grouped product needs


class ExpertWeights(NamedTuple):
    """Parameters of a rank's experts, stacked."""

    w1: Tensor  # [E, f, h] ([E, 2f, h] if the activation is gated)
    b1: Tensor | None  # [E, f] or [E, 2f]
    w2: Tensor  # [E, h, f]
    b2: Tensor | None  # [E, h]


@dataclass(frozen=True)
class Choices:
    """Choices of experts of this rank, sorted by expert and then by row."""

    rows: Tensor  # int64 [n], the row that has chosen
    places: Tensor  # int64 [n], place of the choice in the rows' choices [rows, k], flattened
    counts: list[int]  # choices of each expert
    weights: Tensor  # [n], p
    per_row: int  # k


def _slices(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which experts' results are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def experts_forward(
    x: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, out: Tensor, *,
    grouped: bool | None = None,
) -> Tensor:  # fmt: skip
    """Add the experts' results for x [rows, h] to ``out``, in ``sum_dtype``; return the activations' inputs.

    ``grouped``: compute the products of all experts as one; None: where that runs and is faster.
    """
    if is_grouped(x, params) if grouped is None else grouped:
        return _grouped_forward(x, choices, params, activation, out)
    wide = empty((len(choices.rows), params.w1.shape[1]), dtype=x.dtype, device=x.device)
    of_x, of_y = _memory_of_rows(x, choices), _memory_of_rows(x, choices)
    for expert, own in _slices(choices.counts):
        rows, u = choices.rows[own], wide[own]
        a = torch.index_select(x, 0, rows, out=of_x[: len(rows)])
        if params.b1 is None:
            torch.mm(a, params.w1[expert].t(), out=u)
        else:
            torch.addmm(params.b1[expert], a, params.w1[expert].t(), out=u)
        weights = choices.weights[own, None]
        y = torch.mm(activation.forward(u).mul_(weights), params.w2[expert].t(), out=of_y[: len(rows)])
        if params.b2 is not None:
            y += weights.to(y.dtype) * params.b2[expert]
        # a row chooses an expert once at most, and experts come in order: the sums have the same bits in every run
        out.index_add_(0, rows, y.to(out.dtype))
    return wide


def experts_backward(
    grad: Tensor, x: Tensor, wide: Tensor, choices: Choices, params: ExpertWeights, activation: Activation,
    grads: ExpertGrads, grad_x: Tensor | None, *, grouped: bool | None = None,
) -> Tensor:  # fmt: skip
    """Add gradients to ``grads`` and ``grad_x`` [rows, h], given what forward returned; return the weights' [n]."""
    if is_grouped(x, params) if grouped is None else grouped:
        return _grouped_backward(grad, x, wide, choices, params, activation, grads, grad_x)
    grad_weights = torch.empty_like(choices.weights)
    of_x, of_g = _memory_of_rows(x, choices), _memory_of_rows(x, choices)
    later = grads.puts_off  # what is handed over is read later: it must stay as it is
    for expert, own in _slices(choices.counts):
        rows, u, weights = choices.rows[own], wide[own], choices.weights[own, None]
        g = torch.index_select(grad, 0, rows, out=None if later else of_g[: len(rows)])
        # the weights' gradient is the sum over the MLP's width: no expert's output is needed
        grad_u, inner, grad_weights[own] = activation.weighted_backward_(g @ params.w2[expert], u, weights)
        if params.b2 is not None:
            grad_weights[own] += (g * params.b2[expert]).sum(1, dtype=choices.weights.dtype)
        if grads.w2 is not None:
            grads.w2.add(_Part(expert, g, inner))
        if grads.b2 is not None:
            grads.b2.add(_Part(expert, g * weights))
        if grads.w1 is not None:
            if later:
                grads.w1.add(_Part(expert, grad_u, x, rows))
            else:
                grads.w1.add(_Part(expert, grad_u, torch.index_select(x, 0, rows, out=of_x[: len(rows)])))
        if grads.b1 is not None:
            grads.b1.add(_Part(expert, grad_u))
        del inner, g
        if grad_x is not None:
            of_rows = torch.mm(grad_u, params.w1[expert], out=of_x[: len(rows)])
            grad_x.index_add_(0, rows, of_rows.to(grad_x.dtype))
    return grad_weights


def _memory_of_rows(x: Tensor, choices: Choices) -> Tensor:
    # for one expert's rows [n, h], which the next expert's replace: fresh memory would cost as much as the copies
    return empty((max(choices.counts, default=0), x.shape[1]), dtype=x.dtype, device=x.device)


def is_grouped(x: Tensor, params: ExpertWeights) -> bool:
    """Return whether products of all experts are computed as one: on a GPU in bf16, for aligned shapes."""
    widths = x.shape[1], params.w1.shape[1], params.w2.shape[2]
    aligned = all(width * x.element_size() % _GROUPED_ALIGN == 0 for width in widths)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and runs_grouped(x.device)


@cache
def runs_grouped(device: torch.device) -> bool:
    """Return whether a small grouped product on a GPU is right. It waits: call it before the first step."""
    try:
        a, b = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((24, 32), (3, 32, 16)))
        return bool((torch._grouped_mm(a, b, offs=_ends([16, 0, 8], device)) == 32.0).all())  # one is without rows
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _ends(counts: list[int], device: torch.device) -> Tensor:
    # where each expert's rows end, int32 [E], on the device
    return to_device(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)


def _grouped_forward(x: Tensor, choices: Choices, params: ExpertWeights, activation: Activation, out: Tensor) -> Tensor:
    counts, weights, ends = choices.counts, choices.weights[:, None], _ends(choices.counts, x.device)
    wide = torch._grouped_mm(x.index_select(0, choices.rows), params.w1.transpose(1, 2), offs=ends)
    if params.b1 is not None:
        wide += _of_each(params.b1, counts)
    y = torch._grouped_mm(activation.forward(wide).mul_(weights), params.w2.transpose(1, 2), offs=ends)
    if params.b2 is not None:
        y.addcmul_(weights.to(y.dtype), _of_each(params.b2, counts))
    _add_by_choice(y, choices, out)
    return wide


def _grouped_backward(
    grad: Tensor, x: Tensor, wide: Tensor, choices: Choices, params: ExpertWeights, activation: Activation,
    grads: ExpertGrads, grad_x: Tensor | None,
) -> Tensor:  # fmt: skip
    counts, weights, dtype = choices.counts, choices.weights[:, None], choices.weights.dtype
    ends = _ends(counts, grad.device)
    g, inner = grad.index_select(0, choices.rows), activation.forward(wide)
    grad_inner = torch._grouped_mm(g, params.w2, offs=ends)
    grad_weights = (grad_inner * inner).sum(1, dtype=dtype)
    if params.b2 is not None:
        grad_weights += (g * _of_each(params.b2, counts)).sum(1, dtype=dtype)
    inner.mul_(weights)
    if grads.w2 is not None:
        grads.w2.add(_PartOfAll(counts, ends, g, inner))
    if grads.b2 is not None:
        for expert, own in _slices(counts):
            grads.b2.add(_Part(expert, g[own] * weights[own]))
    del g, inner  # as wide as all choices: what is not needed any more would be the peak of a step
    grad_wide = activation.backward_(grad_inner.mul_(weights), wide)
    del grad_inner
    if grads.w1 is not None:
        grads.w1.add(_PartOfAll(counts, ends, grad_wide, x, choices.rows))
    if grads.b1 is not None:
        for expert, own in _slices(counts):
            grads.b1.add(_Part(expert, grad_wide[own]))
    if grad_x is not None:
        _add_by_choice(torch._grouped_mm(grad_wide, params.w1, offs=ends), choices, grad_x)
    return grad_weights


def _of_each(bias: Tensor, counts: list[int]) -> Tensor:
    # the bias [E, c] of each choice's expert, [n, c]
    number = to_device(torch.tensor(counts), bias.device)
    return torch.repeat_interleave(bias, number, dim=0, output_size=sum(counts))


def _add_by_choice(rows: Tensor, choices: Choices, total: Tensor) -> None:
    # first choices first: no two additions meet, so the bits are the same in every run, on a GPU, too
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
    """Gradients of a rank's experts over several calls of ``experts_backward``.

    They go into the main_grad, now or when it asks for them; without one they are returned.
    """

    def __init__(self, params: ExpertWeights, needs: tuple[bool, bool, bool, bool], main_grad: MainGrad | None) -> None:
        self.w1, self.b1, self.w2, self.b2 = (
            _StackedGrad(main_grad, param) if need and param is not None else None
            for param, need in zip(params, needs, strict=True)
        )

    @property
    def puts_off(self) -> bool:
        return any(grad is not None and grad.kept is not None for grad in (self.w1, self.b1, self.w2, self.b2))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        # for autograd; None for one that is not needed or is in the main_grad
        w1, b1, w2, b2 = (None if grad is None else grad.result() for grad in (self.w1, self.b1, self.w2, self.b2))
        return w1, b1, w2, b2


class _Part(NamedTuple):
    # of one expert's gradient: grad.T @ x, or @ x[rows]; without x the sum over the rows of grad
    expert: int
    grad: Tensor
    x: Tensor | None = None
    rows: Tensor | None = None


class _PartOfAll(NamedTuple):
    # grad.T @ x of each expert: its rows of grad, which end at ``ends``, and those of x, or of x[rows]
    counts: list[int]
    ends: Tensor
    grad: Tensor
    x: Tensor
    rows: Tensor | None = None


class _StackedGrad:
    # of a parameter [E, ...]: each expert's first part overwrites what is there
    def __init__(self, main_grad: MainGrad | None, param: Tensor) -> None:
        self._main_grad, self._param = main_grad, param
        self._shape = param.shape  # with ZeRO 3 the parameter may be away when a gradient that was put off is written
        # until the main_grad asks for the gradient; None: parts are added at once
        self.kept: list[_Part | _PartOfAll] | None = []
        if main_grad is None or not main_grad.later(param, self._write):
            self.kept = None
            self._reserve()

    def _reserve(self) -> None:
        param, reserved = self._param, None if self._main_grad is None else self._main_grad.reserve(self._param)
        self._held = reserved is not None
        if reserved is None:
            reserved = torch.empty(self._shape, dtype=sum_dtype(param.dtype), device=param.device), True
        self._view, fresh = reserved
        self._fresh = [fresh] * self._shape[0]

    def _write(self) -> None:
        kept, self.kept = self.kept or [], None
        self._reserve()
        for part in kept:
            self.add(part)
        self.result()

    def add(self, part: _Part | _PartOfAll) -> None:
        if self.kept is not None:
            self.kept.append(part)
        elif isinstance(part, _Part):
            view, fresh = self._view[part.expert], self._fresh[part.expert]
            if part.x is None:
                add_column_sum(view, part.grad, fresh=fresh)
            else:
                x = part.x if part.rows is None else part.x.index_select(0, part.rows)
                put_product(view, part.grad, x, fresh=fresh)
            self._fresh[part.expert] = False
        elif not self._add_in_one_launch(part):
            for expert, own in _slices(part.counts):
                if part.rows is None:
                    self.add(_Part(expert, part.grad[own], part.x[own]))
                else:
                    self.add(_Part(expert, part.grad[own], part.x, part.rows[own]))

    def _add_in_one_launch(self, part: _PartOfAll) -> bool:
        # where Triton has a kernel for it, which adds in fp32
        if len(set(self._fresh)) != 1 or not is_fused(part.grad):
            return False
        from megatron_sp.ops.kernels import grouped

        if not grouped.takes(self._view, part.grad, part.x):
            return False
        grouped.weight_grads(self._view, part.grad, part.x, part.ends, part.rows, fresh=self._fresh[0])
        self._fresh = [False] * len(self._fresh)
        return True

    def result(self) -> Tensor | None:
        if self.kept is not None:
            return None
        for expert, fresh in enumerate(self._fresh):  # no row has chosen these
            if fresh:
                self._view[expert].zero_()
        return None if self._held else self._view.to(self._param.dtype)
