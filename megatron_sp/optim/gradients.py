"""Main gradients of a model: they accumulate in flat buffers and are all-reduced or reduce-scattered over the ranks.

    stage 0   all_reduce in the last micro-batch, in place
    stage 1   reduce_scatter in the last micro-batch; micro-batches accumulate in the full buffers
    stage 2,3 reduce_scatter in every micro-batch; micro-batches accumulate in the shards

Gradients are summed, never averaged: the loss is already divided by the global token count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_reduce, all_reduce_async, reduce_scatter_async
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.comm.shard_spec import Sum
from megatron_sp.optim.flat import FlatUnit

if TYPE_CHECKING:
    from megatron_sp.optim.offload import HostCopies

_NONE: Mapping[int, Group] = MappingProxyType({})
_IN_FLIGHT = 2  # units whose whole gradients exist while they are reduced to ranges: one is on its way, one is complete


class FlatGradients:
    """Main gradients of one model (``ops.main_grad.MainGrad``): ops ``reserve`` views and write into them.

    Args:
        overlap: start a unit's collective as soon as its gradients are complete; else all after backward.
        host: receives reduced gradients at once (``--offload-optimizer``).
        own_groups: groups of units, by index, that are replicated on other ranks than those of ``group``.
        delayed: weights whose gradients wait for an exchange that they can cover (``--delay-wgrad``).
    """

    def __init__(
        self, units: list[FlatUnit], group: Group, *, tp: Group = SINGLE_RANK, overlap: bool = True,
        reduce_dtype: torch.dtype | None = None, host: HostCopies | None = None,
        own_groups: Mapping[int, Group] = _NONE, delayed: Iterable[Tensor] = (),
    ) -> None:  # fmt: skip
        self.host, self._own_groups = host, own_groups
        self.units, self.group, self.tp, self.overlap = units, group, tp, overlap
        self.reduce_dtype = reduce_dtype
        self._unit_of: dict[int, int] = {}  # by parameter
        for index, unit in enumerate(units):
            for slot in unit.slots:
                other = self._unit_of.setdefault(id(slot.param), index)
                if other != index:  # it can be a view of one buffer only; the other would go stale
                    raise ValueError(
                        f"the parameter {slot.name} is in two units, {units[other].name} and {unit.name}: put modules"
                        " that share a parameter into one unit, as a tied embedding and head are"
                    )
        self.held: Container[int] = self._unit_of
        self._written: set[int] = set()  # parameters with a gradient of this step (stages 2, 3: micro-batch)
        self._ahead: set[int] = set()  # parameters reserved in the forward pass
        self._handles: dict[int, Handle] = {}  # in the order in which they were started
        self._reduced: set[int] = set()  # in this micro-batch (stages 2, 3) or step
        self._completing: set[int] = set()  # units whose next reduction is the step's last
        self._last: set[int] = set()  # units whose reduction under way is the step's last
        self.more_follows = False  # the micro-batch has backward passes of other rows to come: no unit is complete
        self._put_off: tuple[Hashable, Collection[int]] = None, ()
        self._kept: dict[Hashable, list[tuple[int, Callable[[], object]]]] = {}
        self._delays = {id(param) for param in delayed}
        self.defers = bool(self._delays)
        self._delayed: deque[Callable[[], object]] = deque()
        self._sums: list[tuple[Tensor, tuple[Tensor, bool]]] = []  # over parts, which are finished together

    def start_step(self) -> None:
        assert not self._handles, "finish_step() was not called"
        for units_or_params in (self._written, self._ahead, self._reduced, self._completing, self._last):
            units_or_params.clear()
        for put_off in (self._kept, self._delayed, self._sums):
            put_off.clear()
        self.more_follows = False
        if self.host is not None:
            self.host.start_step()
        # so a step holds activations at the end of forward and gradients at the end of backward, which frees the former
        # while it produces the latter, instead of both at once
        for unit in self.units:
            unit.put_grads()
            for slot in unit.slots:
                slot.param.grad = None

    def last_micro_batch(self, units: Collection[int] | None = None) -> None:
        """Announce that the next gradients of units (None: all) are the step's last."""
        self._completing.update(range(len(self.units)) if units is None else units)

    def put_off(self, key: Hashable = None, units: Collection[int] = ()) -> None:
        """Keep, from now on, what writes the gradients of ``units`` for ``catch_up(key)``; without a key nothing."""
        self._put_off = key, units
        self.defers = key is not None or bool(self._delays)
        if key is not None:
            self._kept[key] = []

    def later(self, param: Tensor, write: Callable[[], object]) -> bool:
        key, units = self._put_off
        index = self._unit_of.get(id(param))
        if index is None:
            return False
        if key is not None and index in units:
            self._kept[key].append((index, write))
            return True
        if id(param) in self._delays:
            self._delayed.append(write)
            return True
        return False

    @torch.no_grad()
    def cover(self) -> None:
        while self._delayed:
            self._delayed.popleft()()  # and its operands go

    @torch.no_grad()
    def catch_up(self, key: Hashable) -> None:
        """Write what was put off under ``key``, in its order, and complete the units."""
        kept = self._kept.pop(key)
        to_come = Counter(index for index, _ in kept)  # a block and its experts come in turn
        kept.reverse()
        while kept:
            index, write = kept.pop()
            write()
            del write  # with its operands
            to_come[index] -= 1
            if not to_come[index]:
                self.unit_done(index)

    def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
        key = id(param)
        index = self._unit_of.get(key)
        if index is None:
            return None
        assert key not in self._ahead, "a gradient reserved ahead was not settled: its backward has not run"
        unit, is_first = self.units[index], key not in self._written
        if index in self._handles:  # its gradients of the micro-batch before are still on their way
            assert index not in self._reduced, f"{unit.name} got a gradient after it was complete"
            self._wait(index)
        if not is_first and self._sums:
            self._finish_sums()  # one may be of this parameter
        self._written.add(key)
        return unit.grad_views[key] if unit.grad_views else unit.grad_of(key), is_first

    def reserve_ahead(self, param: Tensor) -> Tensor | None:
        if id(param) not in self._unit_of or id(param) in self._written:
            return None
        reserved = self.reserve(param)
        assert reserved is not None
        self._ahead.add(id(param))
        return reserved[0]

    def finish(self, param: Tensor) -> None:
        self._ahead.remove(id(param))

    def put_sums(self, sums: Sequence[tuple[Tensor, tuple[Tensor, bool]]]) -> None:
        self._sums += sums

    def _finish_sums(self) -> None:
        from megatron_sp.ops.kernels import biases

        biases.finish(self._sums)
        self._sums.clear()

    def unit_done(self, index: int) -> None:
        """Report that a unit's gradients of this micro-batch are complete; may start their reduction."""
        if self._delayed:
            self.cover()
        if self._sums:
            self._finish_sums()
        key, put_off = self._put_off
        if key is not None and index in put_off:
            return  # ``catch_up`` completes it
        if self.more_follows:
            return
        if self.overlap and (index in self._completing or self.units[index].zero.stage >= 2):
            self._reduce(index)

    def finish_micro_batch(self, units: Collection[int] | None = None) -> None:
        """Start what is left to reduce of units (None: all) after their backward pass (stages 2 and 3)."""
        self.cover()
        if self._sums:
            self._finish_sums()
        for index in sorted(range(len(self.units)) if units is None else units, reverse=True):
            if self.units[index].zero.stage < 2:
                continue
            if index not in self._reduced:
                self._reduce(index)
            self._reduced.discard(index)
            self._written.difference_update(id(slot.param) for slot in self.units[index].slots)

    def settle(self) -> None:
        for index in list(self._handles):
            self._wait(index)

    def abandon(self) -> None:  # their capture has failed, and they will never run
        self._handles.clear()

    def finish_step(self) -> None:
        for index, unit in enumerate(self.units):
            if unit.zero.stage < 2 and index not in self._reduced:
                self._reduce(index)
        self.settle()

    def poison(self) -> None:  # for fault injection
        index = next(i for i, unit in enumerate(self.units) if unit.slots)
        if index in self._handles:
            self._wait(index)
        unit = self.units[index]
        if unit.zero.stage < 2 and index not in self._reduced:
            unit.grads[0] = float("nan")
        else:
            unit.grad_shard.fill_(float("nan"))  # its beginning may be rows that pad a vocabulary

    def _reduce(self, index: int) -> None:
        unit, stage = self.units[index], self.units[index].zero.stage
        assert index not in self._reduced, f"unit {unit.name} was completed twice in one backward pass"
        if index in self._handles:  # of the micro-batch before, in which this one left no gradient
            self._wait(index)
        for slot in unit.slots:
            key, from_autograd = id(slot.param), slot.param.grad
            if from_autograd is not None:  # of ops that are not ours
                view = unit.grad_of(key)
                view.copy_(from_autograd) if key not in self._written else view.add_(from_autograd)
                slot.param.grad = None
            elif key not in self._written:
                unit.grad_of(key).zero_()
            self._written.add(key)
        if self.tp.size() > 1:
            self._sum_over_tp(unit)
        self._reduced.add(index)
        if index in self._completing or stage < 2:
            self._last.add(index)
        group = self._own_groups.get(index, self.group)
        is_cast = self.reduce_dtype not in (None, unit.grad_dtype) and group.size() > 1
        sent = unit.grads.to(self.reduce_dtype) if is_cast else unit.grads
        self._handles[index] = all_reduce_async(sent, group) if stage == 0 else reduce_scatter_async(sent, group)
        # for the memory of whole gradients and of what arrives; with a host, so that it gets them under the rest of the
        # backward pass
        if stage >= 1 or self.host is not None:
            while len(self._handles) > _IN_FLIGHT - 1:
                self._wait(next(iter(self._handles)))

    def _wait(self, index: int) -> None:
        unit, result = self.units[index], self._handles.pop(index).wait()
        if unit.zero.stage > 0:
            unit.add_to_shard(result.to(unit.grad_dtype))
        elif result is not unit.grads:
            unit.grads.copy_(result)
        if self.host is not None and index in self._last:
            self.host.fetch(index)

    def _sum_over_tp(self, unit: FlatUnit) -> None:
        # rows that several tp ranks hold but use on other positions or heads, in one all_reduce: each set of rows has a
        # place of its own, where ranks with other rows contribute zeros
        parts: list[tuple[Sum, Tensor]] = []
        for slot in unit.slots:
            parts += [(s, slot.view(unit.grads).narrow(slot.spec.dim, s.start, s.length)) for s in slot.spec.sums]
        if not parts:
            return
        packed = unit.grads.new_zeros(sum(s.num_slots * view.numel() for s, view in parts))
        places, start = list[Tensor](), 0
        for s, view in parts:
            size = s.num_slots * view.numel()
            places.append(packed[start : start + size].view(s.num_slots, *view.shape)[s.slot].copy_(view))
            start += size
        all_reduce(packed, self.tp)
        for (_, view), place in zip(parts, places, strict=True):
            view.copy_(place)
