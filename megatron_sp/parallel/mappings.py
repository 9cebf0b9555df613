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
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from megatron_sp.comm.collectives import all_gather_async, all_reduce, all_to_all_async, reduce_scatter_async
from megatron_sp.comm.groups import Group

GatherGrad = Literal["reduce_scatter", "slice"] | Callable[[Tensor, Group], str]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def overridable(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """Make a function of a tensor overridable by a ``TorchFunctionMode``, like torch's own functions."""

    @functools.wraps(function)
    def called(x: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if has_torch_function_unary(x):
            return handle_torch_function(called, (x,), x, *args, **kwargs)
        return function(x, *args, **kwargs)

    return called


class KeptResults:
    """Results of the all-gathers of one forward pass, kept for its recomputation, which then communicates less.

    Both passes must gather the same tensors in the same order. The recomputation may run in another thread.
    """

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
        """Return a context manager for the forward pass, which records results."""
        return self._as_current(True)

    def replaying(self) -> Any:
        """Return a context manager for the recomputation, which reuses them."""
        return self._as_current(False)

    @classmethod
    def gathered(cls, x: Tensor, group: Group, dim: int) -> Tensor:
        """Gather along a dim, or return the result kept from the forward pass."""
        kept: KeptResults | None = getattr(cls._current, "kept", None)
        if kept is not None and not kept._records and kept._results:
            return kept._results.popleft()
        result = _gathered(x, group, dim)
        if kept is not None and kept._records:
            kept._results.append(result)
        return result


@overridable
def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return ``x``; backward sums the gradients of all ranks."""
    return x if group.size() == 1 else _Copy.apply(x, group)


@overridable
def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' ``x``; backward passes the gradient through."""
    return x if group.size() == 1 else _Reduce.apply(x, group)


@overridable
def gather_from(x: Tensor, group: Group, dim: int, grad: GatherGrad) -> Tensor:
    """Concatenate all ranks' ``x`` along ``dim``.

    ``grad``: reduce_scatter if ranks use the result differently, slice if all compute the same from it; or a function of
    (gradient, group) that decides in backward.
    """
    return x if group.size() == 1 else _Gather.apply(x, group, dim % x.ndim, grad)


@overridable
def scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of a tensor that is the same on all ranks. Raises ValueError if the dim cannot be split evenly."""
    return x if group.size() == 1 else _Scatter.apply(x, group, dim % x.ndim)


@overridable
def reduce_scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of the sum of all ranks' ``x``. Raises ValueError if the dim cannot be split evenly."""
    return x if group.size() == 1 else _ReduceScatter.apply(x, group, dim % x.ndim)


@overridable
def all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """All-to-all: split ``x`` along ``split``, send one part to each rank, concatenate along ``join``; backward is the inverse."""
    return x if group.size() == 1 else _AllToAll.apply(x, group, split % x.ndim, join % x.ndim)


def _require_even(x: Tensor, size: int, dim: int) -> int:
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of {list(x.shape)} must be a multiple of the group's size ({size})")
    return x.shape[dim] // size


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    size = group.size()
    parts = all_gather_async(x.contiguous().unsqueeze(0), group).wait()  # [size, ...]
    return (
        parts.flatten(0, 1)
        if dim == 0
        else parts.movedim(0, dim).reshape(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    )


def _by_rank(x: Tensor, size: int, dim: int) -> Tensor:
    # move parts to the front: [..., n, ...] -> [size, ..., n/size, ...], contiguous
    each = _require_even(x, size, dim)
    return x.reshape(*x.shape[:dim], size, each, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()


def _sliced(x: Tensor, group: Group, dim: int) -> Tensor:
    each = _require_even(x, group.size(), dim)
    return x.narrow(dim, group.rank() * each, each).contiguous()


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


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, grad: GatherGrad) -> Tensor:
        ctx.group, ctx.dim, ctx.grad = group, dim, grad
        return KeptResults.gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        adjoint = ctx.grad(grad, ctx.group) if callable(ctx.grad) else ctx.grad
        back = _scattered_sum if adjoint == "reduce_scatter" else _sliced
        return back(grad, ctx.group, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _sliced(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered_sum(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered(grad, ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _traded(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _traded(grad, ctx.group, ctx.join, ctx.split), None, None, None
