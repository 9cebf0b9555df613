"""Collectives as plain functions of (tensor, group); asynchronous ones return a handle.

At group size 1 they do nothing and cost nothing, so callers have one path for every world.
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm.groups import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Handle:
    """A collective under way. ``wait()`` makes the result visible to the current stream (CPU: to this thread)."""

    def __init__(self, work: dist.Work | None, result: Tensor, name: str) -> None:
        self._work, self._result, self._name = work, result, name
        self._waited = False

    def wait(self) -> Tensor:
        """The result; may be called once.

        Raises:
            RuntimeError: it was waited for already, so somebody may have used the buffer since.
        """
        if self._waited:
            raise RuntimeError(f"wait() was called twice on {self._name} of {tuple(self._result.shape)}: keep its result instead")
        self._waited = True
        if self._work is not None:
            self._work.wait()
        return self._result


def all_reduce(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce ``x`` over the group, in place, and return it."""
    return all_reduce_async(x, group, op).wait()


def all_reduce_async(x: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Handle:
    """Start reducing ``x`` in place; it must not be touched before ``wait()``."""
    work = dist.all_reduce(x, _OPS[op], group=group, async_op=True) if group.size() > 1 and x.numel() > 0 else None
    return Handle(work, x, "all_reduce")


def broadcast(x: Tensor, group: Group, group_src: int = 0) -> Tensor:
    """Overwrite ``x`` with that of the group's rank ``group_src``."""
    if group.size() > 1:
        dist.broadcast(x, group=group, group_src=group_src)
    return x


def barrier(group: Group) -> None:
    """Wait for everybody in the group."""
    if group.size() > 1:
        dist.barrier(group=group)
