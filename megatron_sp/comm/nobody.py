"""A job whose other ranks are not there: groups of any size and rank, and collectives that are counted only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm import collectives, groups, object_collectives


@dataclass(frozen=True)
class Call:
    """A collective or a message of this rank."""

    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send
    group: Any
    num_bytes: int  # that this rank sends to others, by the arithmetic of rings
    place: int  # in the package (``FakeDevice.places``)


class Work:
    # a collective is complete; of a message no one knows, so that what is sent stays until the wait

    def __init__(self, is_message: bool = False, on_wait: Callable[[], None] | None = None) -> None:
        self._is_message, self._on_wait = is_message, on_wait

    def wait(self, *_: Any) -> bool:
        if self._on_wait is not None:
            self._on_wait()
        return True

    def is_completed(self) -> bool:
        return not self._is_message


def put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, until ``undo`` is closed."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    undo.callback((lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name)))


def join_nobody(
    undo: ExitStack, world_size: int, rank: int, backend: str,
    tell: Callable[[str, Any, Tensor, int], Callable[[], None]],
) -> None:  # fmt: skip
    """Be a rank of such a job until ``undo`` is closed; there must be no process group yet.

    ``tell(op, group, operand, bytes sent)`` is called for each collective, and returns what to call at its wait.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    undo.callback(dist.destroy_process_group)
    count_collectives(undo, backend, tell)


def count_collectives(
    undo: ExitStack, backend: str, tell: Callable[[str, Any, Tensor, int], Callable[[], None]]
) -> None:
    """Let collectives do nothing but ``tell`` until ``undo`` is closed."""

    def sent(op: str, group: Any, x: Tensor, num_bytes: int) -> Work:
        return Work(op == "send", tell(op, group, x, num_bytes))

    def all_reduce(x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work:
        size = dist.get_world_size() if group is None else group.size()
        return sent("all_reduce", group, x, 2 * (x.nbytes * (size - 1) // size))

    def gather_list(parts: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Work:
        for part in parts:
            part.copy_(x)
        return Work()

    def all_gather(out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Work:
        return sent("all_gather", group, x, x.nbytes * (group.size() - 1))

    def reduce_scatter(out: Tensor, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work:
        return sent("reduce_scatter", group, x, x.nbytes * (group.size() - 1) // group.size())

    def all_to_all(
        out: Tensor, x: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None,
        group: Any = None, async_op: bool = False,
    ) -> Work:  # fmt: skip
        if not send:  # equal parts: a reduce_scatter of gloo
            return reduce_scatter(out, x, group=group)
        apart = x.nbytes // max(1, sum(send)) * (sum(send) - send[group.rank()])  # all but this rank's own
        return sent("all_to_all", group, x, apart)

    def broadcast(
        x: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Work:
        work = sent("broadcast", group, x, x.nbytes)
        if not async_op:
            work.wait()
        return work

    replaced: dict[str, Any] = {
        "all_reduce": all_reduce, "all_gather": gather_list, "all_to_all_single": all_to_all, "broadcast": broadcast,
        "barrier": lambda *_, **__: None, "irecv": lambda *_, **__: Work(is_message=True),
        "isend": lambda x, dst, group=None: sent("send", group, x, x.nbytes),
        "get_backend": lambda *_: backend,
    }  # fmt: skip
    for name, stand_in in replaced.items():
        put(undo, dist, name, stand_in)

    def gather_json(value: Any, group: Any) -> list[Any]:
        return [json.loads(json.dumps(value))] * (1 if group is None else dist.get_world_size(group))

    for module in [module for name, module in sys.modules.items() if name.startswith(__package__.partition(".")[0])]:
        if vars(module).get("gather_json") is object_collectives.gather_json:  # of many ranks it makes many tensors
            put(undo, module, "gather_json", gather_json)
    put(undo, collectives, "_all_gather", all_gather)
    put(undo, collectives, "_reduce_scatter", reduce_scatter)
    put(undo, groups, "_options", lambda *_, **__: None)
