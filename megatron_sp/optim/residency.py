"""Assignment of units' full parameters to buffers (ZeRO stage 3), and what to fetch next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LOOK_AHEAD = 2  # micro-batches: each unit that comes again comes within this


@dataclass(frozen=True)
class Pool:
    """Units that share buffers, each as large as the largest unit."""

    units: tuple[int, ...]
    num_buffers: int
    lasting: bool = True  # the buffers live as long as the run; else while their unit is in use or next


def pools_of(alike: Sequence[str | bool], num_buffers: int, *, tied: bool, keep_all: bool = False) -> list[Pool]:
    """Return the pools of a model's units, given of each the kind that shares ``num_buffers``; "whole": in no pool."""
    # embedding and head are used far apart in a micro-batch, and share one buffer, unless a table is that of both
    kinds = dict.fromkeys(kind for kind in alike if kind and kind != "whole")
    shared = [tuple(unit for unit, kind in enumerate(alike) if kind == one) for one in kinds]
    others = tuple(unit for unit, is_block in enumerate(alike) if not is_block)
    apart = [Pool((unit,), 1) for unit in others] if tied or keep_all else [Pool(others, 1, lasting=False)]
    return [Pool(units, len(units) if keep_all else num_buffers) for units in shared] + apart


class Residency:
    """Units in their buffers; ``together``: units used at a time, such as a block and its experts."""

    def __init__(self, pools: Sequence[Pool], together: Sequence[tuple[int, ...]] = ()) -> None:
        self._beside = {unit: units for units in together for unit in units}
        self._buffers: dict[int, range] = {}  # of each unit's pool
        self._passing = {unit for pool in pools if not pool.lasting for unit in pool.units}
        self.num_buffers = 0
        for pool in pools:
            buffers = range(self.num_buffers, self.num_buffers + min(pool.num_buffers, len(pool.units)))
            self.num_buffers = buffers.stop
            self._buffers |= dict.fromkeys(pool.units, buffers)
        self.holds: list[int | None] = [None] * self.num_buffers
        self.place: dict[int, int] = {}  # unit -> buffer

    def take(self, unit: int, upcoming: Sequence[int]) -> int:
        # for a unit that is used now; ``upcoming``: the uses that follow, in order
        return self._give(unit, max(self._buffers[unit], key=lambda buffer: self._next_use(buffer, upcoming)))

    def admit(self, unit: int, upcoming: Sequence[int], busy: Collection[int] = ()) -> int | None:
        # ahead of the use; None if all buffers hold ``busy`` units or units needed earlier
        in_use = {other for one in busy for other in self._beside.get(one, (one,))}
        free = [b for b in self._buffers[unit] if self.holds[b] not in in_use or self.holds[b] is None]
        if not free:
            return None
        best = max(free, key=lambda buffer: self._next_use(buffer, upcoming))
        if unit in upcoming and self._next_use(best, upcoming) < upcoming.index(unit):
            return None
        return self._give(unit, best)

    # the order in which a step uses its units is known: evict the one whose next use is farthest away (Belady 1966)
    def _next_use(self, buffer: int, upcoming: Sequence[int]) -> int:
        held = self.holds[buffer]
        if held is None:
            return len(upcoming) + 1
        return upcoming.index(held) if held in upcoming else len(upcoming)

    def _give(self, unit: int, buffer: int) -> int:
        assert unit not in self.place
        held = self.holds[buffer]
        if held is not None:
            del self.place[held]
        self.holds[buffer], self.place[unit] = unit, buffer
        return buffer

    def passing(self, unit: int, upcoming: Sequence[int]) -> list[int]:
        # units in temporary buffers that are neither used now nor next
        return [other for other in self.place if other in self._passing and other != unit and other not in upcoming[:1]]

    def leave(self, unit: int) -> int:
        buffer = self.place.pop(unit)
        self.holds[buffer] = None
        return buffer
