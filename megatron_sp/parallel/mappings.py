"""Differentiable collectives along any dim, for use between the layers of an external model (Megatron's mappings.py).

    name             forward           backward
    copy_to          identity          all_reduce        Megatron's f: a replicated tensor enters a split region
    reduce_from      all_reduce        identity          Megatron's g: partial sums leave it
    gather_from      all_gather        reduce_scatter    later layers are split, each rank has a partial gradient
                                       slice             later layers are the same on every rank, and so is the gradient
    scatter_to       slice             all_gather
    reduce_scatter_to  reduce_scatter  all_gather

Like torch's functions, each can be intercepted by a ``TorchFunctionMode``. All are out of place, and need dims that
divide evenly (ValueError). Source: arXiv:1909.08053, arXiv:2205.05198; Megatron's tensor_parallel_output_grad.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from megatron_sp.comm.collectives import Handle, all_gather_async, all_reduce, all_to_all_async, reduce_scatter_async
from megatron_sp.comm.groups import Group

GatherGrad = Literal["reduce_scatter", "slice"] | Callable[[Tensor, Group], str]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def overridable(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """Let a ``TorchFunctionMode`` intercept a function of a tensor, like torch's own."""

    @functools.wraps(function)
    def called(x: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if has_torch_function_unary(x):
            return handle_torch_function(called, (x,), x, *args, **kwargs)
        return function(x, *args, **kwargs)

    return called


class KeptResults:
    """Results of all-gathers, kept for a recomputation that gathers the same tensors in the same order."""

    _current = threading.local()

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self._records = False

    @contextmanager
    def _as_current(self, records: bool) -> Iterator[None]:
        before, self._records = getattr(self._current, "kept", None), records
        self._current.kept = self
        try:
            yield
        finally:
            self._current.kept = before

    def recording(self) -> Any:
        return self._as_current(True)

    def replaying(self) -> Any:
        return self._as_current(False)


class _Mapped(torch.autograd.Function):
    # a function without a graph, and the function of the output's gradient that is its backward
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_grad = backward
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.of_grad(grad), None, None


@overridable
def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return ``x``; backward sums."""
    return x if group.size() == 1 else _Mapped.apply(x, lambda x: x.view_as(x), partial(_summed, group=group))


@overridable
def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' ``x``."""
    return x if group.size() == 1 else _Mapped.apply(x, partial(_summed, group=group), lambda grad: grad)


@overridable
def gather_from(x: Tensor, group: Group, dim: int, grad: GatherGrad) -> Tensor:
    """Concatenate all ranks' ``x`` along ``dim``.

    ``grad``: reduce_scatter if ranks use the result differently, slice if all compute the same from it; or a function
    of (gradient, group) that decides in backward.
    """
    if group.size() == 1:
        return x
    dim = dim % x.ndim

    def gather(x: Tensor) -> Tensor:
        kept: KeptResults | None = getattr(KeptResults._current, "kept", None)
        if kept is not None and not kept._records and kept._results:
            return kept._results.popleft()
        result = _gathered(x, group, dim)
        if kept is not None and kept._records:
            kept._results.append(result)
        return result

    def backward(grad_out: Tensor) -> Tensor:
        adjoint = grad(grad_out, group) if callable(grad) else grad
        return (_scattered_sum if adjoint == "reduce_scatter" else _sliced)(grad_out, group, dim)

    return _Mapped.apply(x, gather, backward)


@overridable
def scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of a tensor that is the same on all ranks."""
    if group.size() == 1:
        return x
    dim = dim % x.ndim
    there, back = partial(_sliced, group=group, dim=dim), partial(_gathered, group=group, dim=dim)
    return _Mapped.apply(x, there, back)


@overridable
def reduce_scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of the sum of all ranks' ``x``."""
    if group.size() == 1:
        return x
    dim = dim % x.ndim
    there, back = partial(_scattered_sum, group=group, dim=dim), partial(_gathered, group=group, dim=dim)
    return _Mapped.apply(x, there, back)


@overridable
def all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """Split ``x`` along ``split``, send one part to each rank, concatenate along ``join``; backward is the inverse."""
    if group.size() == 1:
        return x
    split, join = split % x.ndim, join % x.ndim
    there, back = (partial(_traded, group=group, split=a, join=b) for a, b in ((split, join), (join, split)))
    return _Mapped.apply(x, there, back)


def _summed(x: Tensor, group: Group) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def _part_size(x: Tensor, size: int, dim: int) -> int:
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of {list(x.shape)} must be a multiple of the group's size ({size})")
    return x.shape[dim] // size


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    parts = all_gather_async(x.contiguous().unsqueeze(0), group).wait()  # [size, ...]
    if dim == 0:
        return parts.flatten(0, 1)
    # the parts are joined along another dim by a copy
    return parts.movedim(0, dim).reshape(*x.shape[:dim], group.size() * x.shape[dim], *x.shape[dim + 1 :])


def _by_rank(x: Tensor, size: int, dim: int) -> Tensor:
    # move parts to the front: [..., n, ...] -> [size, ..., n/size, ...], contiguous
    parts = x.reshape(*x.shape[:dim], size, _part_size(x, size, dim), *x.shape[dim + 1 :])
    return parts.movedim(dim, 0).contiguous()


def _sliced(x: Tensor, group: Group, dim: int) -> Tensor:
    length = _part_size(x, group.size(), dim)
    return x.narrow(dim, group.rank() * length, length).contiguous()


def _scattered_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    return reduce_scatter_async(_by_rank(x, group.size(), dim), group).wait()[0]


def _traded(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    size = group.size()
    send = _by_rank(x, size, split)
    receive = torch.empty_like(send)
    counts = [send[0].numel()] * size
    all_to_all_async(send.view(-1), counts, receive.view(-1), counts, group).wait()
    shape = list(send.shape[1:])
    shape[join] *= size
    return receive.movedim(0, join).reshape(shape)


class AsyncAllToAll:
    """All-to-all of equal parts that starts at one point of a model and is waited for at another, like its gradients'.

    forward    launch(x) starts sending     ...other layers compute...            y = land(token) waits
    backward   waits for its gradient       ...their gradients are computed...    starts sending the gradient back
    """

    def __init__(self, group: Group) -> None:
        self._group, self._flights, self._shape = group, dict[str, Handle](), torch.Size()

    # an empty tensor connects the two points in the autograd graph; autograd runs later nodes first, so that of several
    # exchanges that land together all gradients are sent before the first of them is waited for

    def launch(self, x: Tensor) -> Tensor:
        """Start sending ``x`` [ranks, ...], the r-th part to rank r; return a token for ``land``."""
        token: Tensor = _Mapped.apply(x, partial(self._start, "there"), partial(self._end, "back"))
        return token

    def land(self, token: Tensor) -> Tensor:
        """Wait for the exchange; return [ranks, ...], the r-th part from rank r."""
        landed: Tensor = _Mapped.apply(token, partial(self._end, "there"), partial(self._start, "back"))
        return landed

    def _start(self, way: str, x: Tensor) -> Tensor:
        self._shape, send = x.shape, x.contiguous().view(-1)
        counts = [send.numel() // self._group.size()] * self._group.size()
        self._flights[way] = all_to_all_async(send, counts, torch.empty_like(send), counts, self._group)
        return x.new_empty(0)

    def _end(self, way: str, _: Tensor) -> Tensor:
        assert way in self._flights, "an exchange was landed twice, or was never launched"
        return self._flights.pop(way).wait().view(self._shape)
