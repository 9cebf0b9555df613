"""What torch's caching allocator reserves for a list of allocations and frees, by the rules of c10/cuda/CUDACachingAllocator.cpp.

Sizes are rounded up to 512 bytes. Blocks up to 1 MiB come from segments of 2 MiB; larger ones from segments of 20 MiB,
or, from 10 MiB on, from segments of their own size, rounded up to 2 MiB. The smallest free block that is large enough is
taken, and split unless the rest is too small; free neighbours are merged. Each stream has pools of its own. With
expandable segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``) a pool is one segment, which grows at its end.

Nothing is given back to the device, as if there were always enough, but before a graph is captured: then torch empties its cache, and the
graph's memory is a pool of its own (here: that of its stream).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_MIB = 2**20
ROUND, SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _ROUND_LARGE = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


EMPTIED = 0  # as the key of an entry: the cache is emptied, but for the pools of the entry's stream


class Entry(NamedTuple):
    """An allocation, or a free: then ``num_bytes`` is 0."""

    key: int
    num_bytes: int
    stream: int
    where: str


@dataclass(eq=False)
class _Block:
    size: int
    before: _Block | None = None
    behind: _Block | None = None
    is_free: bool = False


@dataclass
class _Pool:
    """Free blocks of one stream and one class of sizes."""

    is_small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)  # by size, then age
    end: _Block | None = None  # of an expandable segment

    def best(self, size: int) -> _Block | None:
        return next((block for have, _, block in self.free if have >= size), None)


class Allocator:
    """The caching allocator of one device.

    Attributes:
        allocated, reserved: bytes in blocks that are in use, and in segments; ``peak_allocated``, ``peak_reserved`` the
            most so far.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, tuple[_Pool, _Block]] = {}
        self._count = 0
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def run(self, entries: Iterable[Entry]) -> Allocator:
        """Allocate and free; returns this allocator."""
        for entry in entries:
            if entry.key == EMPTIED:
                self.empty(entry.stream)
            elif entry.num_bytes:
                self.allocate(entry.key, entry.num_bytes, entry.stream)
            else:
                self.free(entry.key)
        return self

    def allocate(self, key: int, num_bytes: int, stream: int) -> None:
        size = _up(num_bytes, ROUND)
        pool = self._pools.setdefault((stream, size <= SMALL), _Pool(size <= SMALL))
        block = pool.best(size) or self._more(pool, size)
        self._remove(pool, block)
        rest = block.size - size
        if rest >= ROUND if pool.is_small or self._expandable else rest > SMALL:
            self._split(pool, block, size)
        self._blocks[key] = pool, block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        pool, block = self._blocks.pop(key)
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                self._remove(pool, other)
                self._merge(pool, block, other)
        self._add(pool, block)

    def empty(self, but: int) -> None:
        """Give free segments back to the device, of expandable ones their free ends; those of stream ``but`` are a graph's."""
        for (stream, _), pool in self._pools.items():
            for _, _, block in list(pool.free) if stream != but else ():
                if block.behind is not None or (block.before is not None and not self._expandable):
                    continue
                self._remove(pool, block)
                kept = block.size % (_SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT) if self._expandable else 0  # of a page in use
                self.reserved -= block.size - kept
                if kept:
                    block.size = kept
                    self._add(pool, block)
                    continue
                if block.before is not None:
                    block.before.behind = None
                if pool.end is block:
                    pool.end = block.before

    def _more(self, pool: _Pool, size: int) -> _Block:
        """Return a new free block, of a new segment or at the end of an expandable one."""
        if not self._expandable:
            unit = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT if size < _OWN_SEGMENT else _up(size, _ROUND_LARGE)
            block = _Block(unit)
            self._reserve(unit)
        else:
            last = pool.end
            grows = last is not None and last.is_free
            new = _up(size - (last.size if grows and last is not None else 0), _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT)
            self._reserve(new)
            if grows and last is not None:
                self._remove(pool, last)
                last.size += new
                block = last
            else:
                block = pool.end = _Block(new, before=last)
                if last is not None:
                    last.behind = block
        self._add(pool, block)
        return block

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, before=block, behind=block.behind)
        if block.behind is not None:
            block.behind.before = rest
        block.size, block.behind = size, rest
        if pool.end is block:
            pool.end = rest
        self._add(pool, rest)

    def _merge(self, pool: _Pool, block: _Block, other: _Block) -> None:
        block.size += other.size
        if other is block.before:
            block.before = other.before
            if other.before is not None:
                other.before.behind = block
        else:
            block.behind = other.behind
            if other.behind is not None:
                other.behind.before = block
        if pool.end is other:
            pool.end = block

    def _add(self, pool: _Pool, block: _Block) -> None:
        self._count += 1
        block.is_free = True
        insort(pool.free, (block.size, self._count, block))

    def _remove(self, pool: _Pool, block: _Block) -> None:
        block.is_free = False
        pool.free = [entry for entry in pool.free if entry[2] is not block]


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def held_at_peak(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the bytes that are allocated when most are, by place, the largest first."""
    held: dict[int, Entry] = {}
    total = peak = at = 0
    entries = [entry for entry in entries if entry.key != EMPTIED]
    for index, entry in enumerate(entries):
        total += entry.num_bytes or -held.pop(entry.key).num_bytes
        if entry.num_bytes:
            held[entry.key] = entry
        if total > peak:
            peak, at = total, index
    held.clear()
    for entry in entries[: at + 1]:
        if entry.num_bytes:
            held[entry.key] = entry
        else:
            del held[entry.key]
    by_place: Counter[str] = Counter()
    for entry in held.values():
        by_place[entry.where] += entry.num_bytes
    return dict(by_place.most_common())
