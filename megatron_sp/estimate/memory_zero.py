"""Memory of parameters and gradients with ZeRO, moment by moment (``optim/flat.py``, ``gradients.py``, ``weights.py``).

    stage 0      gradients are whole from the first one of a step to its end
    stage 1      the same until the last backward pass, which reduces them to shards, unit by unit
    stage 2, 3   shards between micro-batches; whole are only the unit that backward is in, and the one that is being reduced
    stage 3      parameters are sharded, too, with buffers in which units are gathered

A reduction takes additional memory: its result, the rounded gradients if they are sent in 16 bits, and with gloo, whose
reduce_scatter is our own, the data received from other ranks. In a group of one rank nothing is reduced or gathered.

A block with experts is two units: its own, and that of a rank's experts, which are replicated on fewer ranks. In backward the
experts are done first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from megatron_sp.config.schema import ParallelConfig
from megatron_sp.estimate.memory_plan import Line
from megatron_sp.optim.residency import Pool, pools_of
from megatron_sp.utils.numbers import round_up

ALIGN_BYTES = 64  # alignment of parameters in optim/flat.py; a test compares the two


@dataclass(frozen=True)
class Held:
    """Memory of gradients at one moment, in bytes.

    Attributes:
        whole: buffers of whole units.
        ranges: reduced shards.
        under_way: additional memory of reductions in progress.
    """

    whole: int = 0
    ranges: int = 0
    under_way: int = 0


def gradient_lines(held: Held) -> tuple[Line, ...]:
    """Return the memory of gradients as lines of a moment."""
    return (
        Line("gradients, whole", held.whole), Line("gradients, reduced", held.ranges),
        Line("gradients, beside them in reductions", held.under_way),
    )  # fmt: skip


class PassGradients(Protocol):
    """Memory of gradients in the course of a micro-batch's passes; places are numbered from the embedding, 0, to the head."""

    @property
    def table_is_apart(self) -> bool:
        """True if the head cannot write its table's gradient to the buffer, which has that of earlier micro-batches."""

    def forward(self) -> Held:
        """Return the gradients during the forward pass."""

    def at_head(self) -> Held:
        """Return the gradients during the head's loss and backward."""

    def at(self, place: int) -> Held:
        """Return the gradients while backward is in a place other than the head, whose own gradients exist."""

    def not_begun(self, place: int) -> int:
        """Return the bytes of those in ``at`` that the experts of a block do not write, if that is the first they are there for."""

    def reducing(self, place: int) -> list[Held]:
        """Return the gradients at each moment when backward leaves a place; for place 0 until all reductions after backward are done."""


@dataclass(frozen=True)
class ZeroForm:
    """Units of one rank and their sharding.

    Attributes:
        units: elements of each unit: embedding, blocks, head; without the padding of the shards. The experts of a block are a
            unit behind it.
        parallel: parallel section of the configuration.
        ranks: dp * cp * sp.
        element, wide: bytes of a parameter, and of a gradient.
        num_micro_batches: micro-batches of a step.
        tied: True if the embedding is tied to the head, so that its gradient exists from the head on.
        receives: True if a reduce_scatter needs a receive buffer (gloo).
        is_cut: True on a rank of a pipeline, where embedding and head of different micro-batches come in turn.
        table: elements of a table that the ends of a pipeline share, a unit of its own, if this is one of them.
        experts: which units are experts.
        expert_ranks: ranks that have the same experts.
    """

    units: Sequence[int]
    parallel: ParallelConfig
    ranks: int
    element: int
    wide: int
    num_micro_batches: int
    tied: bool
    receives: bool
    is_cut: bool = False
    table: int = 0
    experts: frozenset[int] = frozenset()
    expert_ranks: int = 1

    @property
    def accumulates(self) -> bool:
        """True if a step has more than one micro-batch."""
        return self.num_micro_batches > 1

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.parallel.zero_stage

    @property
    def parts(self) -> int:
        """Number of shards of a unit that is not of experts."""
        return self.ranks if self.stage > 0 else 1

    def ranks_of(self, unit: int) -> int:
        """Return the number of ranks that have the same parameters of a unit."""
        return self.expert_ranks if unit in self.experts else self.ranks

    def parts_of(self, unit: int) -> int:
        """Return the number of shards of a unit."""
        return self.ranks_of(unit) if self.stage > 0 else 1

    @cached_property
    def places(self) -> list[tuple[int, ...]]:
        """Units of each place: embedding, blocks, of which some have experts, and head."""
        return [
            (unit, unit + 1) if unit + 1 in self.experts else (unit,)
            for unit in range(len(self.units))
            if unit not in self.experts
        ]

    def size(self, unit: int) -> int:
        """Return the number of elements of a unit, with padding."""
        return self._sizes[unit]

    @cached_property
    def _sizes(self) -> list[int]:
        return [
            round_up(count, ALIGN_BYTES // self.element * self.parts_of(unit)) for unit, count in enumerate(self.units)
        ]

    def shard(self, unit: int) -> int:
        """Return the number of elements of a shard of a unit."""
        return self._shard_sizes[unit]

    @cached_property
    def _shard_sizes(self) -> list[int]:
        return [size // self.parts_of(unit) for unit, size in enumerate(self._sizes)]

    @cached_property
    def _shards(self) -> int:
        return sum(self._shard_sizes)

    @property
    def table_parts(self) -> int:
        """Number of shards of a shared table, which is at stage 1 at most."""
        return 2 * self.ranks if self.stage > 0 else 1

    @property
    def table_size(self) -> int:
        """Number of elements of a shared table, with padding."""
        return round_up(self.table, ALIGN_BYTES // self.element * self.table_parts)

    @property
    def num_params(self) -> int:
        """Number of elements of all units, with padding."""
        return sum(self._sizes) + self.table_size

    @property
    def kept_params(self) -> int:
        """Number of parameter elements held for the whole run, without the buffers of stage 3."""
        return (self._shards if self.stage == 3 else sum(self._sizes)) + self.table_size

    @property
    def updated_params(self) -> int:
        """Number of elements that this rank updates: its shards."""
        return self._shards + self.table_size // self.table_parts

    @cached_property
    def pools(self) -> list[Pool]:
        """Pools of units that share buffers, at stage 3."""
        alike = [
            "experts" if unit in self.experts else "block" if 0 < unit < self._last else ""
            for unit in range(len(self.units))
        ]
        return pools_of(
            alike,
            2 + self.parallel.zero3_keep_units,
            tied=self.tied or self.is_cut,
            keep_all=self.parallel.zero3_gather_once,
        )

    @property
    def buffers(self) -> int:
        """Number of elements of the buffers in which units are gathered and that are held for the whole run."""
        return sum(min(pool.num_buffers, len(pool.units)) * self._buffer(pool) for pool in self.pools if pool.lasting)

    @cached_property
    def head_buffer(self) -> int:
        """Number of elements of a temporary buffer for the head, which exists from the last block's forward pass on."""
        return sum(self._buffer(pool) for pool in self.pools if not pool.lasting)

    def _buffer(self, pool: Pool) -> int:
        return max(map(self.size, pool.units)) if self.stage == 3 and self.ranks_of(pool.units[0]) > 1 else 0

    @property
    def travel(self) -> int:
        """Bytes of a gradient element in communication."""
        return self.travel_of(0)

    def travel_of(self, unit: int) -> int:
        """Return the bytes of a gradient element of a unit in communication."""
        return 2 if self._rounds(unit) else self.wide

    def _rounds(self, unit: int) -> bool:
        return self.parallel.grad_reduce_in_bf16 and self.ranks_of(unit) > 1

    def _beside(self, units: Iterable[int], arrived: int | None) -> int:
        """Return the additional bytes of reductions in progress; with our own reduce_scatter, only unit ``arrived`` has a result yet."""
        total = 0
        for unit in units:
            size = self.size(unit)
            total += size * 2 if self._rounds(unit) else 0
            if self.stage > 0 and self.ranks_of(unit) > 1:
                total += size * self.travel_of(unit) if self.receives else 0
                total += self.shard(unit) * self.travel_of(unit) if not self.receives or unit == arrived else 0
        return total

    def _held(
        self, whole: Iterable[int], done: Iterable[int], going: Iterable[int] = (), arrived: int | None = None, before: Iterable[int] = (),
    ) -> Held:  # fmt: skip
        """Return the memory of gradients.

        Args:
            whole: units whose gradients are whole.
            done: those that are reduced.
            going: those that are being reduced.
            arrived: the one whose result is taken.
            before: those that are being reduced for the micro-batch before; the first one's result becomes the shard.
        """
        ranges = range(len(self.units)) if self.stage >= 2 and self.accumulates else done
        if self.num_micro_batches == 2:
            ranges = set(ranges) - set(before)
        going = [*going, *before]
        widened = 0 if arrived is None or not self._rounds(arrived) else self.shard(arrived) * 4
        return Held(
            sum(map(self.size, set(whole))) * self.wide, sum(map(self.shard, ranges)) * self.wide,
            self._beside(going, arrived) + widened,
        )  # fmt: skip

    @property
    def _last(self) -> int:
        return len(self.units) - 1

    @property
    def _begun_early(self) -> set[int]:
        """Units whose gradient exists from the head on, although backward reaches them last."""
        return {0} if self.tied else set()

    def _not_reached(self, place: int) -> set[int]:
        """Return the units below a place whose gradients are whole while the last backward pass is in it (stage 1)."""
        return set(range(self.places[place][0])) if self.accumulates else self._begun_early

    @property
    def table_is_apart(self) -> bool:
        """See ``PassGradients``; of any micro-batch."""
        return self.accumulates and self.stage < 2

    # moments; those of backward are of the last micro-batch

    def forward(self) -> Held:
        """Return the gradients during the forward pass of a micro-batch after the first; empty if a step has only one."""
        if not self.accumulates:
            return Held()
        if self.stage < 2:
            return self._held(range(len(self.units)), ())
        return self._held([0], (), before=[0])  # the previous micro-batch's gradient of the embedding is being reduced

    def at_head(self) -> Held:
        """Return the gradients during the head's loss and backward."""
        if self.stage < 2:
            return self.forward() if self.accumulates else self._held(self._begun_early or [self._last], ())
        if (
            self.tied
        ):  # the head starts the next gradient of the embedding's unit, and finishes the previous one only then
            return self._held([0], (), before=[0] if self.accumulates else [])
        left = [0] if self.accumulates else []
        return self._held([self._last, *left], (), before=left)

    def at(self, place: int) -> Held:
        """Return the gradients while backward is in a place other than the head, whose own gradients exist."""
        here = self.places[place]
        above = range(here[-1] + 1, len(self.units))
        overlap = self.parallel.overlap_grad_reduce
        if self.stage == 0 or (self.stage == 1 and not overlap):
            whole = range(len(self.units)) if self.accumulates else [*here, *above, *self._begun_early]
            return self._held(whole, (), above if overlap else ())
        if self.stage == 1:
            return self._held([*here, *above[:1], *self._not_reached(place)], above[1:], above[:1])
        if overlap:
            return self._held([*here, *above[:1], *self._begun_early], above[1:], above[:1])
        left = [0] if self.accumulates and not self.tied and place > 0 else []
        return self._held([*here, *above, *self._begun_early, *left], (), left)

    def not_begun(self, place: int) -> int:
        """See ``PassGradients``."""
        return 0 if self.accumulates and self.stage < 2 else self.size(self.places[place][0]) * self.wide

    def reducing(self, place: int) -> list[Held]:
        """Return the gradients at each moment when backward leaves a place; for place 0 until all reductions after backward are done."""
        everything = range(len(self.units))
        if self.stage == 0:
            return [self._held(everything, (), everything)] if place == 0 else [self.at(place)]
        if (
            self.stage == 1 and not self.parallel.overlap_grad_reduce and place == 0
        ):  # one after another, the first unit first
            pairs = [everything[first : first + 2] for first in everything]
            return [self._held(everything[pair[0] :], everything[: pair[0]], pair, arrived=pair[0]) for pair in pairs]
        if self.parallel.overlap_grad_reduce:
            return [self._leaving(place, unit) for unit in reversed(self.places[place])]
        if place > 0:
            return [self.at(place)]
        found = []
        for first in everything:  # one after another, the last unit first
            pair = everything[first : first + 2]
            found.append(self._held(everything[: first + 2], everything[first + 2 :], pair, arrived=max(pair)))
        return found

    def _leaving(self, place: int, unit: int) -> Held:
        """Return the gradients when the reduction of a unit of a place starts, and that of the unit before it is over."""
        above, beside = range(unit + 1, len(self.units)), set(range(self.places[place][0], unit))
        going = {unit, *above[:1]}
        if self.stage == 1:
            return self._held(going | beside | self._not_reached(place), above[1:], going, arrived=max(going))
        going |= {0} if unit == self._last and self.accumulates and not self.tied else set()
        return self._held(going | beside | self._begun_early, above[1:], going, arrived=max(going))

    def after(self) -> Held:
        """Return the gradients of the step after all reductions."""
        return self._held(range(len(self.units)), ()) if self.stage == 0 else self._held((), range(len(self.units)))
