"""Memory of gradients on a pipeline rank while it computes a pass of one of its stages (``optim/gradients.py``).

A rank has units of several stages, whose micro-batches come at other times, and of each micro-batch its blocks may come later than
embedding and head, if they are put off. A table that the ends of a pipeline share is a unit of its own, at stage 1 at most,
and is reduced after all passes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from megatron_sp.estimate.memory_zero import Held, ZeroForm
from megatron_sp.estimate.pipeline_states import Part, PassState
from megatron_sp.estimate.stages import RankShare


class StageGradients:
    """Gradients in the course of a pass of a stage (implements ``PassGradients``).

    Args:
        zero: parameters and gradients of the rank.
        share: of the rank.
        state: what the rank has done before; None: all passes.
    """

    def __init__(self, zero: ZeroForm, share: RankShare, state: PassState | None) -> None:
        self._zero, self._share = zero, share
        self._state = state
        self._stage = 0 if state is None else state.stage
        self._first = list(accumulate(share.of_stages, initial=1))  # place of each stage's first block
        self._table = len(zero.units)  # its number as a unit

    @property
    def table_is_apart(self) -> bool:
        """See ``PassGradients``."""
        ends_here = self._share.has_embedding and self._share.has_head and self._share.stages > 1
        if ends_here:
            return True  # one micro-batch is embedded while another one is predicted
        assert self._state is not None
        is_first_slice = self._state.slice == self._share.num_slices - 1
        is_reduced = self._zero.stage >= 2 and not self._zero.table and is_first_slice
        return Part(self._stage, blocks=False) in self._state.begun and not is_reduced

    # units

    def _at(self, place: int) -> tuple[int, ...]:
        """Return the rank's numbers of the units of a place of the stage."""
        if place == 0:
            return self._zero.places[0]
        layers = self._share.of_stages[self._stage]
        return self._zero.places[-1 if place > layers else self._first[self._stage] + place - 1]

    def _units_of(self, part: Part) -> list[int]:
        """Return the rank's numbers of the units of a part, in the order of the backward pass, without a shared table."""
        if part.blocks:
            start = self._first[part.stage]
            return [
                unit for units in self._zero.places[start : start + self._share.of_stages[part.stage]] for unit in units
            ][::-1]
        head = [len(self._zero.units) - 1] if self._share.has_head and part.stage == self._share.stages - 1 else []
        return [*head, *([0] if self._share.has_embedding and part.stage == 0 else [])]

    def _size(self, unit: int) -> int:
        return self._zero.table_size if unit == self._table else self._zero.size(unit)

    def _parts(self, unit: int) -> int:
        return self._zero.table_parts if unit == self._table else self._zero.parts_of(unit)

    # moments

    def forward(self) -> Held:
        """See ``PassGradients``."""
        return self._held([], ())

    def at_head(self) -> Held:
        """See ``PassGradients``."""
        return self._held([], self._zero.places[-1])

    def at(self, place: int) -> Held:
        """See ``PassGradients``."""
        return self._held(self._above(place), self._at(place))

    def not_begun(self, place: int) -> int:
        """See ``PassGradients``; other micro-batches may have begun them."""
        return 0

    def reducing(self, place: int) -> list[Held]:
        """See ``PassGradients``."""
        above, current = self._above(place), self._at(place)[::-1]
        if self._zero.stage < 2 or self._zero.parallel.overlap_grad_reduce:
            return [
                self._held([*above, *current[:left]], (unit,), leaves=True, also=self._of_pass(current[left + 1 :]))
                for left, unit in enumerate(current)
            ]  # fmt: skip
        if place > (not self._has_embedding):
            return []
        mine = self._of_pass([*above, *current])  # one after another, when the pass is over
        return [
            self._held(mine[:first], mine[first : first + 1], leaves=True, also=mine[first:])
            for first in range(len(mine))
        ]

    @property
    def _has_embedding(self) -> bool:
        return self._share.has_embedding and self._stage == 0

    def _above(self, place: int) -> list[int]:
        """Return the units that the pass has left before it reaches a place of the stage, in that order."""
        layers = self._share.of_stages[self._stage]
        top = layers + (self._share.has_head and self._stage == self._share.stages - 1)
        return [unit for above in range(top, place, -1) for unit in reversed(self._at(above))]

    def _of_pass(self, units: Sequence[int]) -> list[int]:
        """Return those of the units whose gradients are written in an action of this kind."""
        if not self._share.puts_off:
            return list(units)
        ends = (0, len(self._zero.units) - 1)
        assert self._state is not None
        return [unit for unit in units if (unit in ends) == (self._state.kind == "B")]

    def _held(
        self, above: Sequence[int], current: Sequence[int], *, leaves: bool = False, also: Collection[int] = ()
    ) -> Held:
        """Return the gradients at one moment.

        Args:
            above: units that the pass has left, in that order.
            current: units that it is in; none: it has written nothing.
            leaves: it leaves this unit, the only one, whose reduction starts.
            also: further units that are whole, although later ones are being reduced.
        """
        zero, state, now, overlaps = (
            self._zero,
            self._state,
            self._of_pass(above),
            self._zero.parallel.overlap_grad_reduce,
        )
        assert state is not None
        here = self._of_pass(current)
        before = [unit for part in state.begun for unit in self._units_of(part)]
        written = {*before, *now, *here, *also, *self._tables(bool(current), 0 in current)}
        if zero.stage >= 2:
            order = [*self._under_way(), *(now if overlaps and state.slice == 0 else ())]
            order = [unit for unit in order if unit not in current]  # its own must have arrived
        elif state.is_last:
            order = [*self._ended(), *now]
        else:
            order = self._ended()
        starts = here if leaves and ((zero.stage >= 2 and state.slice == 0) or state.is_last) else []
        if zero.stage < 2 and not overlaps:
            order, starts = [], []
        order += starts
        going = order[-2:] if starts else order[-1:]
        arrived = going[0] if len(going) == 2 else None
        if zero.stage == 0:
            return Held(self._bytes(written), 0, self._beside(order, None))
        if zero.stage == 1:
            done = [unit for unit in order if unit not in going]
            return Held(self._bytes(written.difference(done)), self._shards(done), self._beside(going, arrived))
        open_table = self._tables(bool(current), 0 in current)
        waits = (
            [0]
            if self._share.has_head and self._share.has_embedding and 0 in written and not self._apart_from_head
            else []
        )
        apart = () if overlaps or leaves else now
        whole = {*going, *here, *open_table, *waits, *also, *apart, *self._open(now)}
        before = before if state.latest is not None else []
        new = self._under_way() if state.is_new else []  # what arrives becomes its shard
        shards = {*before, *now}.difference(new if set(new) & set(going) else ())
        return Held(self._bytes(whole), self._shards(shards), self._beside(going, arrived))

    def _open(self, now: Sequence[int]) -> list[int]:
        """Return the units that have gradients of some slices of a micro-batch, and are reduced after the last of them."""
        state, share = self._state, self._share
        assert state is not None
        units = [unit for part in sorted(state.begun) if state.partial[part.stage] for unit in self._units_of(part)]
        if state.kind == "F" or share.num_slices == 1:
            return units
        if state.slice:
            return [*units, *now]
        return [unit for unit in units if unit not in now or not self._zero.parallel.overlap_grad_reduce]

    @property
    def _apart_from_head(self) -> bool:
        """True if the embedding's unit has nothing to do with the head."""
        return not self._zero.tied

    def _under_way(self) -> list[int]:
        """Return the unit of the passes before whose reduction nobody has waited for yet (stages 2 and 3)."""
        assert self._state is not None
        latest = self._state.latest
        if latest is None or self._state.partial[latest.stage]:  # a slice of the next micro-batch has waited for it
            return []
        if not self._share.puts_off and not self._zero.parallel.overlap_grad_reduce:
            latest = latest._replace(blocks=True)  # one pass after another, the blocks' last
        return self._units_of(latest)[-1:]

    def _ended(self) -> list[int]:
        """Return the units that are complete, in the order of their reductions."""
        assert self._state is not None
        return [unit for part in self._state.ended for unit in self._units_of(part)]

    def _tables(self, is_in_backward: bool, is_embedding: bool) -> list[int]:
        """Return the units with the table of embedding and head if that has a gradient: its own, or the embedding's."""
        zero, state = self._zero, self._state
        assert state is not None
        at_head = is_in_backward and self._share.has_head and self._stage == self._share.stages - 1
        begun = at_head or is_embedding or any(not part.blocks for part in state.begun)
        if zero.table:
            return [self._table] if begun else []
        return [0] if zero.tied and begun else []

    # bytes

    def _bytes(self, units: Collection[int]) -> int:
        return sum(map(self._size, units)) * self._zero.wide

    def _shards(self, units: Collection[int]) -> int:
        return sum(self._size(unit) // self._parts(unit) for unit in units) * self._zero.wide

    def _beside(self, units: Collection[int], arrived: int | None) -> int:
        """Return the additional bytes of reductions in progress (``ZeroForm._beside``), and of the result that is taken."""
        zero, total = self._zero, 0
        for unit in units:
            ranks, size = 2 * zero.ranks if unit == self._table else zero.ranks_of(unit), self._size(unit)
            rounds = zero.parallel.grad_reduce_in_bf16 and ranks > 1
            travel = 2 if rounds else zero.wide
            total += size * 2 if rounds else 0
            if zero.stage > 0 and ranks > 1:
                total += size * travel if zero.receives else 0
                total += size // self._parts(unit) * travel if not zero.receives or unit == arrived else 0
            total += size // self._parts(unit) * 4 if rounds and unit == arrived else 0
        return total

    def finishing(self) -> list[Held]:
        """Return the gradients at each moment of the reductions after all passes."""
        zero, units = self._zero, [unit for unit, size in enumerate(self._zero.units) if size]
        table = [self._table] if zero.table else []
        late = [] if zero.stage >= 2 or zero.parallel.overlap_grad_reduce else list(units)
        left = [*late, *table]
        if zero.stage == 0:
            return [Held(self._bytes([*units, *table]), 0, self._beside([*units, *table], None))]
        before, found = [unit for unit in units if unit not in left], []
        for first in range(max(1, len(left) - 1) if left else 0):
            going = left[first : first + 2]
            arrived = going[0] if len(going) == 2 else None
            found.append(
                Held(self._bytes(left[first:]), self._shards([*before, *left[:first]]), self._beside(going, arrived))
            )
        return found

    def after(self) -> Held:
        """Return the gradients of the step after all reductions."""
        units = [*range(len(self._zero.units)), *([self._table] if self._zero.table else [])]
        return Held(self._bytes(units)) if self._zero.stage == 0 else Held(0, self._shards(units))
