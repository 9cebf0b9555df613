"""Gathering of parameters before they are used (ZeRO, arXiv:1910.02054).

stage 0      parameters are always full
stages 1, 2  after the update the ranks' ranges are all-gathered into the parameters, under the next forward pass
stage 3      a unit is fetched into one of a few buffers while the unit before it computes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_gather_async, all_reduce_async
from megatron_sp.optim.flat import FlatLayout, FlatUnit
from megatron_sp.optim.gradients import FlatGradients

if TYPE_CHECKING:
    from megatron_sp.optim.residency import Pool

Fetch = Literal["all_gather", "all_reduce"]  # the latter moves twice the bytes; for comparison (DeepSpeed #5420)
_USES_AHEAD = 16  # of each unit; a micro-batch has at most three, and in a pipeline's step there are those of many


class WholeWeights:
    """Parameters of a model, gathered when needed.

    Args:
        pools, together: for ``Residency``.
        order: the uses of units in one micro-batch (stage 3).
        overlap: gather under computation; else wait for each gather, and prefetch nothing.
    """

    def __init__(
        self, units: list[FlatUnit], *, pools: Sequence[Pool] = (), order: Sequence[int] = (), overlap: bool = True,
        fetch: Fetch = "all_gather", together: Sequence[tuple[int, ...]] = (),
    ) -> None:  # fmt: skip
        self.units, self.overlap, self.fetch = units, overlap, fetch
        self.stage = max((unit.zero.stage for unit in units), default=0)
        self.num_fetches = 0
        self._order, self._uses, self._at, self._ahead = list(order), list(order), 0, 0
        self._handles: dict[int, list[Handle]] = {}
        if self.stage == 3:
            from megatron_sp.optim.residency import LOOK_AHEAD, Residency

            self._look_ahead, self._ahead = LOOK_AHEAD, LOOK_AHEAD * len(order)
            self._residency = Residency(pools, together)
            # the pool of each buffer
            self._pools = [pool for pool in pools for _ in range(min(pool.num_buffers, len(pool.units)))]
            self._buffers = [self._make_buffers(pool) if pool.lasting else None for pool in self._pools]

    def _make_buffers(self, pool: Pool) -> tuple[Tensor, Tensor | None]:
        # one for the trainable and one for the frozen parameters, as large as the largest unit's
        units = [self.units[index] for index in pool.units]
        like = units[0].local_params
        alone = units[0].zero.group.size() == 1  # then a unit's range is the unit
        size = 0 if alone else max(unit.numel for unit in units)
        frozen = 0 if alone else max(unit.frozen.numel if unit.frozen is not None else 0 for unit in units)
        return like.new_empty(size), like.new_empty(frozen) if frozen else None

    def start_step(self, num_micro_batches: int, order: Sequence[int] | None = None) -> None:
        """Announce the uses to come; ``order``: those of one micro-batch, if it is not a training step's."""
        if self.stage == 3:
            uses = [index for index in (self._order if order is None else order) if self.units[index].zero.stage == 3]
            self._uses, self._at = uses * num_micro_batches, 0
            # not all of a step's: they may be a hundred thousand
            self._ahead = min(self._look_ahead * len(uses), _USES_AHEAD * len(set(uses)))

    def need(self, index: int) -> None:
        """Gather the unit that is used next, and start prefetching the one after it."""
        if self.units[index].zero.stage == 3:
            # not what was said (a forward pass without its backward): go on from where that comes next
            if self._at < len(self._uses) and self._uses[self._at] != index:
                rest = self._uses[self._at :]
                self._at = self._at + rest.index(index) if index in rest else len(self._uses)
            self._at = min(self._at + 1, len(self._uses))
            upcoming = self._uses[self._at : self._at + self._ahead]
            for other in self._residency.passing(index, upcoming):
                self._release(other)
            held = list(self._residency.holds)
            if index not in self._residency.place:
                buffer = self._residency.take(index, upcoming)
                self._start(index, buffer, held[buffer])
            # the next unit's gather runs under the computation of this one
            if self.overlap and upcoming and upcoming[0] not in self._residency.place:
                free = self._residency.admit(upcoming[0], upcoming, (index,))
                if free is not None:
                    self._start(upcoming[0], free, held[free])
        for handle in self._handles.pop(index, ()):
            handle.wait()

    def refresh(self, index: int) -> None:
        # this rank's range of it has changed (stages 1 and 2)
        unit = self.units[index]
        if unit.zero.stage in (1, 2) and unit.params is not None:
            self._handles[index] = [all_gather_async(unit.local_params, unit.zero.group, out=unit.params)]
            if not self.overlap:
                self.need(index)

    def refresh_all(self) -> None:
        for index in range(len(self.units)):
            self.refresh(index)
        self.forget()

    def forget(self) -> None:
        if self.stage == 3:
            self.settle()
            for index in list(self._residency.place):
                self._release(index)

    def settle(self) -> None:
        for index in list(self._handles):
            for handle in self._handles.pop(index):
                handle.wait()

    def abandon(self) -> None:  # their capture has failed, and they will never run
        self._handles.clear()
        self.forget()

    def _start(self, index: int, buffer: int, evicted: int | None) -> None:
        # fetching a unit into its assigned buffer, which held ``evicted``
        if evicted is not None:
            self._unbind(evicted)
        memory = self._buffers[buffer] = self._buffers[buffer] or self._make_buffers(self._pools[buffer])
        unit, (flat, frozen), lasting = self.units[index], memory, self._pools[buffer].lasting
        self._handles[index] = [self._gather(unit, unit.layout, unit.local_params, flat, lasting)]
        if unit.frozen is not None and unit.local_frozen is not None:
            self._handles[index].append(self._gather(unit, unit.frozen, unit.local_frozen, frozen, lasting))
        self.num_fetches += 1

    def _gather(self, unit: FlatUnit, layout: FlatLayout, local: Tensor, flat: Tensor | None, lasting: bool) -> Handle:
        if unit.zero.group.size() == 1:
            layout.bind(local)
            return all_gather_async(local, unit.zero.group)
        assert flat is not None
        gathered = flat[: layout.numel]
        layout.bind(gathered, lasting=lasting)  # before it arrives: what uses the parameters waits first (``need``)
        if self.fetch == "all_gather":
            return all_gather_async(local, unit.zero.group, out=gathered)
        gathered.zero_()
        gathered[layout.shard.start : layout.shard.stop].copy_(local)
        return all_reduce_async(gathered, unit.zero.group)

    def _release(self, index: int) -> None:
        self._unbind(index)
        buffer = self._residency.leave(index)
        if not self._pools[buffer].lasting:
            self._buffers[buffer] = None

    def _unbind(self, index: int) -> None:
        for handle in self._handles.pop(index, ()):  # fetched, and never used: still writes into the buffer
            handle.wait()
        unit = self.units[index]
        unit.layout.unbind()
        if unit.frozen is not None:
            unit.frozen.unbind()


class UnitWork:
    """Gathers and reduces units as a pass reports them (``parallel.forward_context.UnitEvents``)."""

    def __init__(self, weights: WholeWeights, gradients: FlatGradients | None) -> None:
        self._weights, self._gradients = weights, gradients

    def before_use(self, unit: int) -> None:
        self._weights.need(unit)

    def backward_done(self, unit: int) -> None:
        if self._gradients is not None:
            self._gradients.unit_done(unit)
