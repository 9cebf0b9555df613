"""A network that is as late and a memory that is as dirty as they may be, so that ordering mistakes show on any machine.

gloo on one machine is so fast that a missing ``wait()`` often goes unnoticed. Here a result reaches its buffer inside
``wait()`` and not a moment before; until then the buffer is NaN, and so is every tensor fresh from ``empty``. Caught
this way: reading before ``wait()`` or without one (NaN in the result), writing to an operand or a receive buffer under
way, a collective that nobody waits for, an element that no exchange fills.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm import collectives
from megatron_sp.ops import allocator


def poison(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(torch.iinfo(x.dtype).min)


def is_poisoned(x: Tensor) -> bool:
    return bool(x.isnan().all() if x.is_floating_point() else (x == torch.iinfo(x.dtype).min).all())


class _LateWork:
    """A collective between private copies; ``wait()`` delivers."""

    def __init__(self, name: str, work: Any, operand: Tensor | None, sent: Tensor, into: Tensor, arrived: Tensor) -> None:
        self.name, self.work, self.operand, self.sent, self.into, self.arrived = name, work, operand, sent, into, arrived
        self.waited = False
        poison(into)
        # an all_gather in place: this rank's part is where it belongs already
        begin, end = into.data_ptr(), into.data_ptr() + into.nbytes
        self.in_place = operand is not None and operand.numel() > 0 and begin <= operand.data_ptr() < end
        if self.in_place and operand is not None:
            operand.copy_(sent)

    def wait(self) -> None:
        self.work.wait()
        self.waited = True
        if self.operand is not None:
            same = (self.operand == self.sent) | ((self.operand != self.operand) & (self.sent != self.sent))
            assert same.all(), f"the operand of {self.name} was written to while it was under way"
        if self.in_place and self.operand is not None:
            poison(self.operand)
        assert is_poisoned(self.into), f"the result of {self.name} was written to while it was under way"
        self.into.copy_(self.arrived)
        self.operand = None


class _LateDist:
    """torch.distributed, but for the collectives that ``comm/collectives.py`` starts asynchronously."""

    def __init__(self) -> None:
        self.started: list[_LateWork] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: Tensor, op: Any, group: Any, async_op: bool) -> _LateWork:
        mine = x.detach().clone()
        return self._late("all_reduce", dist.all_reduce(mine, op, group=group, async_op=True), None, mine, x.detach(), mine)

    def all_to_all_single(
        self, receive: Tensor, send: Tensor, receive_counts: Any = None, send_counts: Any = None, group: Any = None, async_op: bool = False
    ) -> _LateWork:
        sent, arrived = send.detach().clone(), torch.empty_like(receive)
        work = dist.all_to_all_single(arrived, sent, receive_counts, send_counts, group=group, async_op=True)
        return self._late("all_to_all", work, send.detach(), sent, receive.detach(), arrived)

    def of_two(self, collective: Callable[..., Any], name: str) -> Callable[..., _LateWork]:
        def call(out: Tensor, x: Tensor, group: Any, async_op: bool) -> _LateWork:
            sent, arrived = x.detach().clone(), torch.empty_like(out)
            return self._late(name, collective(arrived, sent, group=group, async_op=True), x.detach(), sent, out.detach(), arrived)

        return call

    def _late(self, *what: Any) -> _LateWork:
        self.started.append(_LateWork(*what))
        return self.started[-1]


@contextmanager
def late_network() -> Iterator[_LateDist]:
    """Inside, results arrive in ``wait()`` only and fresh memory is NaN; on leaving, everything must have been waited for."""
    late = _LateDist()
    fresh = allocator.empty

    def dirty(*args: Any, **kwargs: Any) -> Tensor:
        return poison(fresh(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "dist", late)
        patch.setattr(collectives, "_all_gather", late.of_two(collectives._all_gather, "all_gather"))
        patch.setattr(collectives, "_reduce_scatter", late.of_two(collectives._reduce_scatter, "reduce_scatter"))
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron_sp.") and getattr(module, "empty", None) is fresh:
                patch.setattr(module, "empty", dirty)
        # torch.empty and its kin are filled with NaN too; use_deterministic_algorithms() would import the compiler, for
        # seconds
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("error")
        try:
            yield late
        finally:
            torch.set_deterministic_debug_mode(before)
    left = [work.name for work in late.started if not work.waited]
    assert not left, f"wait() was never called on {left}"
