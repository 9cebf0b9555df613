"""Dealing of work by attention area: chunks of a row to cp ranks, and rows to dp ranks (--balance-rows)."""

# Each rank gets as many chunks as the others and about as much area, and as few documents as that allows. The largest
# chunk first, each to the rank with the least so far: the longest-processing-time rule (Graham, 1969), which for a
# causal row and two chunks a rank is the zigzag. By itself it scatters a document over all ranks, and each of them then
# needs the keys of nearly all of it. So a chunk goes first of all to the rank that has most of its documents already,
# as long as that rank stays within 1 % of the mean area with its remaining places filled by the smallest chunks. Where
# that was too hopeful, swaps of two chunks bring the fullest rank down at the end. On rows of packed documents this
# sends about 60 % of the keys that the rule alone sends, at the same balance (docs/benchmarks/context_plan.md).
#
# Rows of packed documents have as many tokens, so that GEMMs are even, but a row of one long document may need a
# hundred times the attention of a row of short ones, and all ranks wait for the slowest at the end of a step. Only who
# computes a row changes with their dealing: the loss is a sum over the rows of a step, dropout is keyed by their ids,
# and what is recorded of them is in the order of the global batch. Every rank finds the same order by itself, from the
# lengths of the documents, so nothing is exchanged. Dynamic context parallelism (Megatron-LM #2282) and WLB-LLM
# (arXiv:2503.17924) even out more, by other groups of ranks or other documents in a row; here groups stay, and so does
# the order of the data.

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

_EXCESS = 0.01  # of the mean area: balance given up for keys that stay; 0.02 would keep hardly more of them
# ranks with which the fullest one tries to swap: all of them take ten times as long for half a percent of balance
_LIGHTEST = 4


def deal_chunks(areas: Sequence[int], documents: Sequence[Mapping[int, int]], num_ranks: int) -> list[list[int]]:
    """Return each rank's chunks, in order, the same number to each."""
    hands = _Hands(areas, documents, num_ranks)
    hands.deal()
    hands.swap()
    return [sorted(held) for held in hands.held]


def spread_over(documents: Iterable[tuple[int, int]], chunks: Sequence[tuple[int, int]]) -> list[dict[int, int]]:
    """Return, of documents that lie in several chunks, the positions in each of these."""
    starts, spreads = [start for start, _ in chunks], []
    for start, stop in documents:
        first, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1) - 1
        if first < last:
            spreads.append({c: min(stop, chunks[c][1]) - max(start, chunks[c][0]) for c in range(first, last + 1)})
    return spreads


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
            known: dict[int, int] = {}  # by rank: how much it has of the chunk's documents
            for name, rows in self.documents_of[chunk]:
                for rank, held in self.rows_held[name].items():
                    known[rank] = known.get(rank, 0) + held * rows
            acquainted = []
            for rank, positions in known.items():
                room = self.room - len(self.held[rank])
                if room > 0 and self.loads[rank] + self.areas[chunk] + smallest[room - 1] <= self.most:
                    acquainted.append((-positions, self.loads[rank], rank))
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

    def _strangers(self, chunk: int, source: int, target: int) -> int:
        # by how much less a chunk's documents are known to ``target`` than to ``source``
        held = self.rows_held
        documents = self.documents_of[chunk]
        return sum(rows * (held[name].get(source, 0) - held[name].get(target, 0)) for name, rows in documents)

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


@dataclass(frozen=True)
class RowDealer:
    """Order in which rows are dealt, from the lengths of their documents."""

    # tokens of each document of a sample, given its id; the same on every rank
    document_lengths: Callable[[int], np.ndarray]
    micro_batch_size: int  # b, rows per micro-batch and rank
    dp_size: int
    causal: bool = True
    window: int | None = None

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the places of samples of a global batch as ``data/loader.py :: deal`` deals them."""
        return order_by_area(self.areas(ids), self.micro_batch_size, self.dp_size)

    def areas(self, ids: np.ndarray) -> list[int]:
        return [area_of_documents(self.document_lengths(i), self.causal, self.window) for i in ids.tolist()]


def area_of_documents(lengths: np.ndarray, causal: bool, window: int | None) -> int:
    """Return how many pairs of tokens see each other."""
    if not causal:
        return int((lengths * lengths).sum())
    # a token sees one key more than that before it, up to so many
    grown = lengths if window is None else np.minimum(lengths, window)
    return int((grown * (grown + 1) // 2 + (lengths - grown) * grown).sum())


def order_by_area(areas: Sequence[int], micro_batch_size: int, dp_size: int) -> np.ndarray:
    """Return the places of a global batch as they are dealt, b to each rank in turn; by index if as even."""
    by_index = np.arange(len(areas))
    held = deal_chunks(areas, (), dp_size)
    of_ranks = by_index.reshape(-1, dp_size, micro_batch_size).swapaxes(0, 1)
    largest_by_index = max(sum(areas[i] for i in rows.flat) for rows in of_ranks)
    if max(sum(areas[i] for i in rows) for rows in held) >= largest_by_index:
        return by_index
    # a rank's rows in order of area, so that large ones are computed at the same time everywhere: with --zero-stage 2
    # and 3 ranks wait for one another in every micro-batch
    order = np.empty((len(areas) // (dp_size * micro_batch_size), dp_size, micro_batch_size), np.int64)
    for rank, rows in enumerate(held):
        order[:, rank] = np.reshape(sorted(rows, key=lambda i: (-areas[i], i)), (-1, micro_batch_size))
    return np.sort(order, axis=2).reshape(-1)
