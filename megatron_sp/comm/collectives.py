"""Collectives as plain functions of (tensor, group); asynchronous ones return a handle.

At group size 1 they do nothing and cost nothing, so callers have one path for every world. Tensors are contiguous, cut and joined along
dim 0. Their adjoints, for whoever writes a backward pass: all_gather and reduce_scatter are each other's; all_to_all is its own with the
counts swapped; a sum over ranks whose result everybody uses once has the identity.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm.check import announced
from megatron_sp.comm.groups import Group
from megatron_sp.comm.recorder import CollectiveRecord

# torch 2.13 has new names for two of them and warns about the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Handle:
    """A collective under way. ``wait()`` makes the result visible to the current stream (CPU: to this thread).

    Neither the operand nor the result may be touched before; the handle keeps both alive. One that is dropped without ``wait()`` warns.
    """

    def __init__(
        self, work: dist.Work | None, result: Tensor, name: str, finish: Callable[[], Tensor] | None = None, operand: Tensor | None = None
    ) -> None:
        self._work, self._result, self._name, self._finish, self._operand = work, result, name, finish, operand
        self._waited = False
        self._flight: CollectiveRecord | None = None

    def recorded(self, flight: CollectiveRecord | None) -> Handle:
        """This handle, which tells a recorder when it is waited for; None: nobody asks."""
        if flight is not None and self._work is not None:
            self._flight = flight
            flight.watch(self._work)
        return self

    def wait(self) -> Tensor:
        """The result; may be called once.

        Raises:
            RuntimeError: it was waited for already, so somebody may have used the buffer since.
        """
        if self._waited:
            raise RuntimeError(f"wait() was called twice on {self._name} of {tuple(self._result.shape)}: keep its result instead")
        self._waited = True
        if self._work is not None:
            self._work.wait() if self._flight is None else self._flight.wait(self._work)
        result = self._result if self._finish is None else self._finish()
        self._work = self._finish = self._operand = self._flight = None
        return result

    def __del__(self) -> None:
        # an exception that is being handled has cut short the code that would have waited; at the interpreter's end modules are half gone
        if getattr(self, "_work", None) is None or sys.is_finalizing() or sys.exc_info()[0] is not None:
            return
        what = f"{self._name} of {tuple(self._result.shape)} {str(self._result.dtype).removeprefix('torch.')}"
        warnings.warn(f"nobody waited for {what}: whoever uses its result or its operand may read half of it", RuntimeWarning, stacklevel=1)

    @property
    def waited(self) -> bool:
        """Whether the result has been taken."""
        return self._waited


def done(x: Tensor) -> Handle:
    """A handle whose result is there already."""
    return Handle(None, x, "nothing")


def all_reduce(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce ``x`` over the group, in place, and return it."""
    return all_reduce_async(x, group, op).wait()


def all_reduce_async(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Handle:
    """Start reducing ``x`` in place; it must not be touched before ``wait()``."""
    if group.size() == 1:
        return Handle(None, x, "all_reduce")
    group = announced(group, f"all_reduce {op}", x)
    work = dist.all_reduce(x, _OPS[op], group=group, async_op=True) if x.numel() > 0 else None
    return Handle(work, x, "all_reduce")


def all_gather_async(x: Tensor, group: Group, out: Tensor | None = None) -> Handle:
    """Start joining everybody's ``x`` along dim 0, in the order of ranks.

    Args:
        x: [n, ...], contiguous; the same shape on every rank.
        out: [size * n, ...], where to; a new tensor without it.
    Returns:
        a handle on [size * n, ...]; at group size 1 on ``x`` itself.
    """
    size = group.size()
    if size == 1:
        return done(x)
    group = announced(group, "all_gather", x)
    if out is None:
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    work = _all_gather(out, x, group=group, async_op=True) if x.numel() else None
    return Handle(work, out, "all_gather", operand=x)


def reduce_scatter_async(x: Tensor, group: Group, out: Tensor | None = None) -> Handle:
    """Start summing ``x`` over the ranks; rank r gets the r-th of ``size`` equal parts along dim 0.

    gloo's own reduce_scatter is an all_reduce inside. Here the parts are exchanged and summed in the order of ranks, in fp32 or wider:
    half the bytes, and at two ranks the bits of an all_reduce.

    Args:
        x: [size * n, ...], contiguous.
        out: [n, ...], where to; a new tensor without it.
    Returns:
        a handle on [n, ...]; at group size 1 on ``x`` itself.
    """
    size = group.size()
    if size == 1:
        return done(x)
    assert x.shape[0] % size == 0, f"dim 0 of {tuple(x.shape)} must be a multiple of the group's size ({size})"
    group = announced(group, "reduce_scatter", x)
    shape = (x.shape[0] // size, *x.shape[1:])
    nccl = dist.get_backend(group) == "nccl"
    if nccl or x.numel() == 0:
        result = x.new_empty(shape) if out is None else out
        work = _reduce_scatter(result, x, group=group, async_op=True) if x.numel() else None
        return Handle(work, result, "reduce_scatter", operand=x)
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=group, async_op=True)

    def add_up() -> Tensor:
        result = x.new_empty(shape) if out is None else out  # not before it is needed: other gradients are made meanwhile
        by_rank = parts.view(size, *shape)
        if x.dtype in (torch.bfloat16, torch.float16):
            return result.copy_(by_rank.sum(0, dtype=torch.float32))
        torch.add(by_rank[0], by_rank[1], out=result)
        for part in by_rank[2:]:
            result.add_(part)
        return result

    return Handle(work, x if out is None else out, "reduce_scatter", add_up, operand=x)


def all_to_all_async(send: Tensor, send_counts: Sequence[int], receive: Tensor, receive_counts: Sequence[int], group: Group) -> Handle:
    """Start sending the r-th run of ``send`` to rank r, and putting what rank r sends into the r-th run of ``receive``.

    Args:
        send: [sum(send_counts)], contiguous.
        send_counts: elements for each rank.
        receive: [sum(receive_counts)], contiguous.
        receive_counts: elements from each rank.
    Returns:
        a handle on ``receive``; at group size 1 on ``send`` itself, and ``receive`` stays untouched.
    """
    if group.size() == 1:
        return done(send)
    group = announced(group, "all_to_all", send, send=send_counts, receive=receive_counts)
    work = dist.all_to_all_single(receive, send, list(receive_counts), list(send_counts), group=group, async_op=True)
    return Handle(work, receive, "all_to_all", operand=send)


def broadcast(x: Tensor, group: Group, group_src: int = 0) -> Tensor:
    """Overwrite ``x`` with that of the group's rank ``group_src``."""
    if group.size() > 1:
        group = announced(group, f"broadcast from {group_src}", x)
        dist.broadcast(x, group=group, group_src=group_src)
    return x


def barrier(group: Group) -> None:
    """Wait for everybody in the group."""
    if group.size() > 1:
        dist.barrier(group=announced(group, "barrier"))
