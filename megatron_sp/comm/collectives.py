"""Collectives as plain functions of (tensor, group), no-ops at group size 1; asynchronous ones return a handle."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm.groups import Group, announced

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import CollectiveRecord

# torch 2.13 has new names for two of them and warns about the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class WaitError(RuntimeError):
    """A message did not arrive: the other rank has died or is late."""


class Handle:
    """A collective in flight: until ``wait()``, on the current stream, neither operand nor result may be touched."""

    def __init__(
        self, work: dist.Work | None, result: Tensor, name: str, finish: Callable[[], Tensor] | None = None,
        operand: Tensor | None = None, expected: str = "",
    ) -> None:  # fmt: skip
        # kept alive until the wait, as torch may forget them
        self._work, self._result, self._name, self._operand = work, result, name, operand
        self._finish = finish  # makes the result, after the wait
        self.expected = expected  # what is waited for, for a message; empty: torch's own error says all that is known
        self.waited = False
        self._flight: CollectiveRecord | None = None
        self._reminder = None if work is None else _Reminder(name, result)

    def recorded(self, flight: CollectiveRecord | None) -> Handle:
        # by a record that measures the wait for it
        if flight is not None and self._work is not None:
            self._flight = flight
            flight.watch(self._work)
        return self

    def wait(self) -> Tensor:
        if self.waited:  # the buffer may already have been reused
            what = f"{self._name} of {tuple(self._result.shape)}"
            raise RuntimeError(f"wait() was called twice on {what}: keep its result instead")
        self.waited = True
        if self._work is not None:
            if self._reminder is not None:
                self._reminder.is_due = False
            began = time.monotonic()
            try:
                self._work.wait() if self._flight is None else self._flight.wait(self._work)
            except RuntimeError as error:
                if not self.expected:
                    raise
                waited = f"rank {dist.get_rank()} waited {time.monotonic() - began:.0f} s for {self.expected}"
                why = next((line for line in str(error).splitlines() if line.strip()), "")
                raise WaitError(f"{waited}: {why[:200]}") from error
        result = self._result if self._finish is None else self._finish()
        self._work = self._finish = self._operand = self._flight = None
        return result

    @property
    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class _Reminder:
    # an object of its own, so that a handle without work costs no call at its end
    def __init__(self, name: str, result: Tensor) -> None:
        self._name, self._result, self.is_due = name, result, True

    def __del__(self) -> None:
        # an exception that is being handled has cut short the code that would have waited; at the interpreter's end
        # modules are half gone
        if not self.is_due or sys.is_finalizing() or sys.exc_info()[0] is not None:
            return
        what = f"{self._name} of {tuple(self._result.shape)} {str(self._result.dtype).removeprefix('torch.')}"
        text = f"wait() was never called on {what}: its result may be read before it is complete"
        warnings.warn(text, RuntimeWarning, stacklevel=1)


class _Done(Handle):
    # a result that is there: on one rank every layer makes several, so it costs the host little
    _work, waited, expected = None, False, ""

    def __init__(self, result: Tensor, name: str = "nothing") -> None:
        self._result, self._name = result, name

    def recorded(self, flight: CollectiveRecord | None) -> Handle:
        return self

    def wait(self) -> Tensor:
        again, self.waited = self.waited, True
        return super().wait() if again else self._result  # which says what is wrong


done: Callable[[Tensor], Handle] = _Done
"""Make a handle of a result that is there."""


def all_reduce(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce ``x`` in place."""
    return all_reduce_async(x, group, op).wait()


def all_reduce_async(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Handle:
    """Start reducing ``x`` in place."""
    if group.size() == 1:
        return _Done(x, "all_reduce")
    group = announced(group, f"all_reduce {op}", x)
    work = dist.all_reduce(x, _OPS[op], group=group, async_op=True) if x.numel() > 0 else None
    return Handle(work, x, "all_reduce")


def all_gather_async(x: Tensor, group: Group, out: Tensor | None = None) -> Handle:
    """Start concatenating all ranks' ``x``: [n, ...] -> [size * n, ...]; at size 1 ``x`` itself."""
    size = group.size()
    if size == 1:
        return done(x)
    group = announced(group, "all_gather", x)
    if out is None:
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    work = _all_gather(out, x, group=group, async_op=True) if x.numel() else None
    return Handle(work, out, "all_gather", operand=x)


def reduce_scatter_async(x: Tensor, group: Group, out: Tensor | None = None) -> Handle:
    """Start summing ``x``: [size * n, ...] -> [n, ...], part r on rank r; at size 1 ``x`` itself."""
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
    # parts are exchanged and summed in rank order, in fp32 or wider: half the traffic of gloo's all_reduce
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=group, async_op=True)

    def add_up() -> Tensor:
        # allocated as late as possible: other gradients are computed meanwhile
        result = x.new_empty(shape) if out is None else out
        by_rank = parts.view(size, *shape)
        if x.dtype in (torch.bfloat16, torch.float16):
            return result.copy_(by_rank.sum(0, dtype=torch.float32))
        torch.add(by_rank[0], by_rank[1], out=result)
        for part in by_rank[2:]:
            result.add_(part)
        return result

    return Handle(work, x if out is None else out, "reduce_scatter", add_up, operand=x)


def all_to_all_async(
    send: Tensor, send_counts: Sequence[int], receive: Tensor, receive_counts: Sequence[int], group: Group
) -> Handle:
    """Start exchanging segments of flat tensors, with counts of elements; at size 1 ``send`` itself."""
    if group.size() == 1:
        return done(send)
    group = announced(group, "all_to_all", send, send=send_counts, receive=receive_counts)
    work = dist.all_to_all_single(receive, send, list(receive_counts), list(send_counts), group=group, async_op=True)
    return Handle(work, receive, "all_to_all", operand=send)


def send_async(x: Tensor, group: Group, target: int, what: str = "a message") -> Handle:
    """Start sending to a rank of the world."""
    return Handle(dist.isend(x, dst=target, group=group), x, "send", expected=f"rank {target} to take {what}")


def receive_async(into: Tensor, group: Group, source: int, what: str = "a message") -> Handle:
    """Start receiving from a rank of the world."""
    return Handle(dist.irecv(into, src=source, group=group), into, "receive", expected=f"{what} (rank {source})")


def broadcast(x: Tensor, group: Group, group_src: int = 0) -> Tensor:
    """Overwrite ``x`` with that of a rank of the group."""
    if group.size() > 1:
        group = announced(group, f"broadcast from {group_src}", x)
        dist.broadcast(x, group=group, group_src=group_src)
    return x


def barrier(group: Group) -> None:
    """Wait for all ranks of the group."""
    if group.size() > 1:
        dist.barrier(group=announced(group, "barrier"))
