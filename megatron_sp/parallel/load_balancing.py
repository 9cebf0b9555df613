"""Dealing of a row's chunks to cp ranks: each rank gets as many chunks as the others and about as much area, and as few documents as
that allows.

The largest chunk first, each to the rank with the least so far: the longest-processing-time rule (Graham, 1969), which
for a causal row and two chunks a rank is the zigzag. By itself it scatters a document over all ranks, and each of them
then needs the keys of nearly all of it. So a chunk goes first of all to the rank that has most of its documents already,
as long as that rank stays within 1 % of the mean area with its remaining places filled by the smallest chunks. Where
that was too hopeful, swaps of two chunks bring the fullest rank down at the end.

On rows of packed documents this sends about 60 % of the keys that the rule alone sends, in two thirds of the pieces, at
the same balance (docs/benchmarks/context_plan.md).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

_EXCESS = 0.01  # of the mean area: balance given up for keys that stay; 0.02 would keep hardly more of them
_LIGHTEST = 4  # ranks with which the fullest one tries to swap: all of them take ten times as long for half a percent of balance


def deal_chunks(areas: Sequence[int], documents: Sequence[Mapping[int, int]], num_ranks: int) -> list[list[int]]:
    """Deal chunks to ranks, the same number to each.

    Args:
        areas: area of each chunk; their number is a multiple of ``num_ranks``.
        documents: those that lie in several chunks, as ``spread_over`` gives them.
    Returns:
        For each rank its chunks, in order.
    """
    hand = _Hands(areas, documents, num_ranks)
    hand.deal()
    hand.swap()
    return [sorted(held) for held in hand.held]


def spread_over(documents: Iterable[tuple[int, int]], chunks: Sequence[tuple[int, int]]) -> list[dict[int, int]]:
    """Return, for each document that lies in several chunks, these chunks and how many of its positions each has.

    Args:
        chunks: start and stop of each, in order, one after another.
    """
    starts, found = [start for start, _ in chunks], []
    for start, stop in documents:
        first, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1) - 1
        if first < last:
            found.append({c: min(stop, chunks[c][1]) - max(start, chunks[c][0]) for c in range(first, last + 1)})
    return found


class _Hands:
    """Chunks, area and positions of each document that every rank has so far."""

    def __init__(self, areas: Sequence[int], documents: Sequence[Mapping[int, int]], num_ranks: int) -> None:
        self.areas, self.num_ranks, self.room = areas, num_ranks, len(areas) // num_ranks
        self.most = (1 + _EXCESS) * sum(areas) / num_ranks
        self.held: list[list[int]] = [[] for _ in range(num_ranks)]
        self.loads = [0] * num_ranks
        self.rows_held: list[dict[int, int]] = [{} for _ in documents]  # by document: positions by rank
        self.documents_of: list[list[tuple[int, int]]] = [[] for _ in areas]  # by chunk: documents and their positions
        for name, of_chunks in enumerate(documents):
            for chunk, rows in of_chunks.items():
                self.documents_of[chunk].append((name, rows))

    def deal(self) -> None:
        smallest = [0, *accumulate(sorted(self.areas))]  # area of the n smallest chunks
        lightest = [(0, 0, rank) for rank in range(self.num_ranks)]  # a heap, with entries that are no longer true
        for chunk in sorted(range(len(self.areas)), key=lambda chunk: (-self.areas[chunk], chunk)):
            acquainted = [
                (-known, self.loads[rank], rank)
                for rank, known in self._known(chunk).items()
                if len(self.held[rank]) < self.room
                and self.loads[rank] + self.areas[chunk] + smallest[self.room - len(self.held[rank]) - 1] <= self.most
            ]
            if acquainted:
                rank = min(acquainted)[2]
            else:
                while lightest[0][:2] != self._key(lightest[0][2])[:2] or len(self.held[lightest[0][2]]) == self.room:
                    heapq.heappop(lightest)
                rank = lightest[0][2]
            self._give(chunk, rank)
            heapq.heappush(lightest, self._key(rank))

    def swap(self) -> None:
        for _ in range(4 * self.num_ranks):
            *light, full = sorted(range(self.num_ranks), key=self._key)
            if self.loads[full] <= self.most:
                return
            best = None
            for rank in light[:_LIGHTEST]:
                for large in self.held[full]:
                    for small in self.held[rank]:
                        moved = self.areas[large] - self.areas[small]
                        after = max(self.loads[full] - moved, self.loads[rank] + moved, self.most)
                        if after < self.loads[full] and (best is None or after <= best[0]):
                            strangers = self._strangers(large, full, rank) + self._strangers(small, rank, full)
                            if best is None or (after, strangers) < best[:2]:
                                best = after, strangers, large, small, rank
            if best is None:
                return
            _, _, large, small, rank = best
            for chunk, source, target in ((large, full, rank), (small, rank, full)):
                self._take(chunk, source)
                self._give(chunk, target)

    def _key(self, rank: int) -> tuple[int, int, int]:
        return self.loads[rank], len(self.held[rank]), rank

    def _known(self, chunk: int) -> dict[int, int]:
        known: dict[int, int] = {}
        for name, rows in self.documents_of[chunk]:
            for rank, held in self.rows_held[name].items():
                known[rank] = known.get(rank, 0) + held * rows
        return known

    def _strangers(self, chunk: int, source: int, target: int) -> int:
        # by how much less a chunk's documents are known to ``target`` than to ``source``
        documents = self.documents_of[chunk]
        return sum(
            rows * (self.rows_held[name].get(source, 0) - self.rows_held[name].get(target, 0))
            for name, rows in documents
        )

    def _give(self, chunk: int, rank: int) -> None:
        self.held[rank].append(chunk)
        self.loads[rank] += self.areas[chunk]
        for name, rows in self.documents_of[chunk]:
            self.rows_held[name][rank] = self.rows_held[name].get(rank, 0) + rows

    def _take(self, chunk: int, rank: int) -> None:
        self.held[rank].remove(chunk)
        self.loads[rank] -= self.areas[chunk]
        for name, rows in self.documents_of[chunk]:
            self.rows_held[name][rank] -= rows
