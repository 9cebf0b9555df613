"""Plan of context parallelism, in plain numbers: who has which positions of a row, which keys travel to whom, and of
which calls attention consists.

A row of s positions is cut into equal chunks and these are dealt to the cp ranks (``cut_row``); rank i has the L_i
positions of its chunks, in order. From the mask (``RowMask``) follows for every pair of ranks which rows of j's keys
and values rank i's queries see (``ContextPlan.rows``), which is what j sends to i and nothing else, and the list of
rectangles, triangles and bands of pairs that i computes with them (``ContextPlan.pieces``).

Every rank derives the same plan from the same mask, so nothing has to be agreed on; a rank computes only the parts that
it asks for. Nothing has to divide anything: lengths, chunks and documents may be odd, and a rank's share may be empty.

The kinds of pieces. A mask is a list of spans, queries that all see keys of one range only: documents, or the real keys
of a padded sequence. Under a causal mask the queries of one span within one run of rank i see in their own run a
triangle ("diagonal"), and all of their span's keys that j has before that run ("full"): j's chunks lie one after
another in the message, so that one rectangle takes several of them. Where a window ends inside such a rectangle it is
a "band", one for each run of keys.

Dealing by area is the longest-processing-time rule (Graham, 1969) with room for an equal number of chunks on each rank;
for a causal row and two chunks it gives the zigzag of Llama 3 (arXiv:2407.21783) and ring-flash-attention, for packed
documents what MagiAttention (arXiv:2505.13211) calls dispatch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from megatron_sp.parallel.heads import deal

Run = tuple[int, int]  # start and stop
Runs = tuple[Run, ...]
PieceKind = Literal["full", "diagonal", "band"]

_CHUNKS_TRIED = (1, 2, 4, 8)
_BALANCE_MARGIN = 0.02  # more chunks are more messages and more pieces: taken only if they save more than this


@dataclass(frozen=True)
class RowMask:
    """Attention mask of a row of positions, for the b sequences of a micro-batch.

    Masks that mean the same are equal objects: a window that no query reaches the end of, lengths of full sequences and
    a single document are None, and sequences that are all alike are described once.

    Attributes:
        length: s, positions of the row.
        causal: a query sees keys up to its own position.
        window: a query sees itself and the ``window`` - 1 keys before it; requires ``causal``. None: all keys before it.
        documents: for each sequence the ends of its documents, the last of which is the end of the row; a query sees
            keys of its own document alone.
        lengths: for each sequence its number of real keys; those behind are padding, which no query sees. Queries at
            padding see what their position allows. Cannot be combined with ``documents``.
    Raises:
        ValueError: a value is out of range, or two do not go together.
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        s = self.length
        if s < 1:
            raise ValueError(f"a row has at least one position, not {s}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: a query sees at least itself, so it must be 1 or more")
        if self.window is not None and not self.causal:
            raise ValueError(f"a window ({self.window}) is for causal attention, and this mask is bidirectional")
        if self.documents is not None and self.lengths is not None:
            raise ValueError("documents and lengths cannot be combined: let the padding be the last document")
        if self.documents == () or self.lengths == ():
            raise ValueError("documents and lengths need an entry for each sequence of the micro-batch, at least one")
        for sequence, ends in enumerate(self.documents or ()):
            if not ends or ends[-1] != s or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
                raise ValueError(
                    f"ends of documents of sequence {sequence} must rise from at least 1 to the row's length {s}: {_few(ends)}"
                )
        for sequence, length in enumerate(self.lengths or ()):
            if length < 0:
                raise ValueError(f"sequence {sequence} has {length} real keys: 0 or more are possible")

        if self.window is not None and self.window >= s:
            object.__setattr__(self, "window", None)
        if self.lengths is not None:
            lengths = _once_if_alike(tuple(min(length, s) for length in self.lengths))
            object.__setattr__(self, "lengths", None if lengths == (s,) else lengths)
        if self.documents is not None:
            documents = _once_if_alike(self.documents)
            object.__setattr__(self, "documents", None if documents == ((s,),) else documents)

    @property
    def sequences(self) -> int:
        """Number of sequences that differ in their keys; 1 if all b are alike."""
        return len(self.documents or self.lengths or (None,))


def _few(ends: tuple[int, ...]) -> str:
    return str(list(ends)) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ... {ends[-1]}]"


def _once_if_alike(entries: tuple) -> tuple:  # type: ignore[type-arg]
    return entries[:1] if all(entry == entries[0] for entry in entries) else entries


class Piece(NamedTuple):
    """Queries of rank i and keys of rank j whose attention is one kernel call.

    Attributes:
        sequence: index in the micro-batch; -1 for all its sequences, which are alike.
        q_start, q_stop: rows of L_i.
        k_start, k_stop: rows of L_i if j is i; else rows of the message, that is of ``rows(i, j)`` of this sequence laid
            one run after another.
        kind: "full": every query sees every key. "diagonal": as many queries as keys, query a sees keys up to a. "band":
            a query sees keys at a distance of 0 to ``window`` - 1 positions.
        offset: for a band, the position of its first query less that of its first key; else 0. The positions of a
            diagonal's and a band's keys are consecutive, those of its queries always.
    """

    sequence: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: PieceKind
    offset: int


class _Span(NamedTuple):
    """Queries that see keys of one range alone: the range of the queries themselves, or, under a causal mask, one before all of them."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


@lru_cache(maxsize=16)
def _spans_of(mask: RowMask) -> tuple[tuple[_Span, ...], ...]:
    """Return the spans of each sequence, which cover its queries in order."""
    s, found = mask.length, []
    for sequence in range(mask.sequences):
        if mask.documents is not None:
            ends = mask.documents[sequence]
            found.append(tuple(_Span(a, b, a, b) for a, b in zip((0, *ends), ends, strict=False)))
            continue
        real = s if mask.lengths is None else mask.lengths[sequence]
        if mask.causal:  # queries at padding have all keys before them: a triangle ends where its keys do
            spans = [_Span(0, real, 0, real), _Span(real, s, 0, real)]
        else:
            spans = [_Span(0, s, 0, real)]
        found.append(tuple(span for span in spans if span.q_start < span.q_stop))
    return tuple(found)


def _triangle(n: int, most: int) -> int:
    """Return the sum of min(a, most) over a = 1 .. n; 0 for negative n."""
    n = max(n, 0)
    grown = min(n, most)
    return grown * (grown + 1) // 2 + (n - grown) * most


class _Areas:
    """Number of pairs that queries before a position see, in closed form: a bisection over the ends of the spans."""

    def __init__(self, mask: RowMask) -> None:
        self.causal, self.window = mask.causal, mask.window
        self.spans = _spans_of(mask)
        self.starts = [[span.q_start for span in spans] for spans in self.spans]
        self.sums = [[0, *accumulate(self._of(span, span.q_stop) for span in spans)] for spans in self.spans]

    def before(self, position: int) -> int:
        """Return the pairs of all queries before ``position``, in all sequences."""
        total = 0
        for spans, starts, sums in zip(self.spans, self.starts, self.sums, strict=True):
            last = bisect_right(starts, position) - 1
            total += sums[last] + self._of(spans[last], position)
        return total

    def of(self, runs: Iterable[Run]) -> int:
        """Return the pairs of the queries of ``runs``."""
        return sum(self.before(b) - self.before(a) for a, b in runs)

    def _of(self, span: _Span, stop: int) -> int:
        """Return the pairs of a span's queries before ``stop``."""
        keys = span.k_stop - span.k_start
        if not self.causal:
            return (stop - span.q_start) * keys
        first, last = span.q_start - span.k_start, stop - span.k_start  # query x (from the span's first key) sees min(x + 1, keys)
        area = _triangle(last, keys) - _triangle(first, keys)
        if self.window is not None:  # less the min(x + 1 - window, keys) that are too far
            area -= _triangle(last - self.window, keys) - _triangle(first - self.window, keys)
        return area


@lru_cache(maxsize=16)
def _areas_of(mask: RowMask) -> _Areas:
    return _Areas(mask)


@lru_cache(maxsize=64)
def cut_row(mask: RowMask, cp_size: int, num_chunks: int | None = None) -> tuple[Runs, ...]:
    """Deal the positions of a row to the cp ranks so that all compute about as many pairs, and as many positions.

    All sequences of the micro-batch are cut alike, by the sum of their areas.

    Args:
        num_chunks: chunks for each rank. None: the fewest of 1, 2, 4 and 8 whose balance (see ``ContextPlan.balance``) is within
            0.02 of the best of them.
    Returns:
        Runs of positions of each rank, in order, chunks that follow one another as one run. Numbers of positions differ by at most
        the number of chunks; a rank has none only if there are fewer positions than ranks.
    Raises:
        ValueError: a size is below 1.
    """
    if cp_size < 1 or (num_chunks is not None and num_chunks < 1):
        raise ValueError(f"cp_size ({cp_size}) and the number of chunks for each rank ({num_chunks}) must be 1 or more")
    areas = _areas_of(mask)
    if num_chunks is not None:
        return _dealt(areas, mask.length, cp_size, num_chunks)[1]
    mean = areas.before(mask.length) / cp_size
    tried = []
    for k in _CHUNKS_TRIED:
        largest, runs = _dealt(areas, mask.length, cp_size, k)
        tried.append((largest, runs))
        if largest <= (1 + _BALANCE_MARGIN) * mean:
            break
    enough = min(largest for largest, _ in tried) + _BALANCE_MARGIN * mean
    return next(runs for largest, runs in tried if largest <= enough)


def _dealt(areas: _Areas, length: int, cp_size: int, num_chunks: int) -> tuple[int, tuple[Runs, ...]]:
    """Deal ``num_chunks`` chunks to each rank; return the largest area of a rank and the runs of each."""
    chunks = [(chunk.start, chunk.stop) for chunk in deal(length, cp_size * num_chunks)]
    before = [areas.before(start) for start, _ in chunks] + [areas.before(length)]
    area = [b - a for a, b in pairwise(before)]
    if num_chunks == 1:
        return max(area), tuple(_merged([chunk]) for chunk in chunks)
    ranks = [(0, 0, rank) for rank in range(cp_size)]  # area, number of chunks, rank: a heap
    shares: list[list[Run]] = [[] for _ in range(cp_size)]
    largest = 0
    for index in sorted(range(len(chunks)), key=lambda index: (-area[index], index)):
        of_rank, count, rank = heapq.heappop(ranks)
        shares[rank].append(chunks[index])
        largest = max(largest, of_rank + area[index])
        if count + 1 < num_chunks:
            heapq.heappush(ranks, (of_rank + area[index], count + 1, rank))
    return largest, tuple(_merged(share) for share in shares)


def _merged(runs: Iterable[Run]) -> Runs:
    """Return the union of runs, in order; empty ones vanish, and those that touch become one."""
    found: list[Run] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def _num_rows(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)


class _Numbering:
    """Runs of positions laid one after another: which row a position is."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.starts = [start for start, _ in runs]
        self.rows = [0, *accumulate(stop - start for start, stop in runs)]

    def row(self, position: int) -> int:
        """Return the row of a position, which must be in one of the runs."""
        index = bisect_right(self.starts, position) - 1
        return self.rows[index] + position - self.starts[index]

    def within(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the parts of the runs between two positions."""
        for index in range(max(0, bisect_right(self.starts, start) - 1), bisect_left(self.starts, stop)):
            a, b = self.runs[index]
            if max(a, start) < min(b, stop):
                yield max(a, start), min(b, stop)


class _Part(NamedTuple):
    """Queries of one span within one run of a rank, and the range of the keys that at least one of them sees."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class ContextPlan:
    """Plan of the exchange and of the pieces; the same on all ranks.

    Results are computed when they are first asked for, and kept.

    Attributes:
        mask: the mask.
        runs: runs of positions of each rank, in order.
        cp_size: number of ranks.
        lengths: L_i, number of positions of each rank.
        alike: all sequences have the same pieces and rows, which are described once.
    """

    def __init__(self, mask: RowMask, runs: tuple[Runs, ...]) -> None:
        self.mask, self.runs, self.cp_size = mask, runs, len(runs)
        self.lengths = tuple(_num_rows(share) for share in runs)
        self.alike = mask.sequences == 1
        self._numberings = [_Numbering(share) for share in runs]
        self._spans = _spans_of(mask)
        self._parts_of: dict[int, tuple[tuple[list[_Part], list[_Part]], ...]] = {}
        self._rows: dict[tuple[int, int], tuple[Runs, ...]] = {}
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}

    def rows(self, i: int, j: int) -> tuple[Runs, ...]:
        """Return the positions whose keys and values rank j sends to rank i: those that at least one query of i sees.

        With j = i: those of its own that it uses.

        Returns:
            For each sequence (one entry if all are alike) the runs of positions, in order.
        """
        if (i, j) not in self._rows:
            held = self._numberings[j]
            self._rows[i, j] = tuple(
                _merged(run for part in self._parts(i, sequence, i == j) for run in held.within(part.k_start, part.k_stop))
                for sequence in range(self.mask.sequences)
            )
        return self._rows[i, j]

    def local_rows(self, i: int, j: int) -> tuple[Runs, ...]:
        """Return ``rows`` as rows of L_j; what lies one after another there is one run, whatever the distance of the positions."""
        held = self._numberings[j]
        return tuple(_merged((held.row(start), held.row(stop - 1) + 1) for start, stop in runs) for runs in self.rows(i, j))

    def num_rows(self, i: int, j: int, batch: int) -> int:
        """Return how many rows travel from rank j to rank i for ``batch`` sequences; 0 if i is j.

        Raises:
            ValueError: the mask describes another number of sequences.
        """
        self._check_batch(batch)
        if i == j:
            return 0
        return sum(map(_num_rows, self.rows(i, j))) * (batch if self.alike else 1)

    def pieces(self, i: int, j: int) -> tuple[Piece, ...]:
        """Return the pieces of rank i's queries with rank j's keys: by sequence, then by queries, then by keys.

        Every pair that the mask allows is in exactly one piece, and no other pair is; every query of a piece sees a key
        of it. A query is in at most one full piece.
        """
        if (i, j) not in self._pieces:
            self._pieces[i, j] = tuple(
                piece for sequence in range(self.mask.sequences) for piece in self._pieces_of_sequence(i, j, sequence)
            )
        return self._pieces[i, j]

    def area(self, i: int) -> int:
        """Return the number of pairs that rank i's queries see, in all sequences that the mask describes."""
        return _areas_of(self.mask).of(self.runs[i])

    @property
    def balance(self) -> float:
        """Largest area of a rank divided by the mean; 1 if nobody sees anything."""
        areas = [self.area(i) for i in range(self.cp_size)]
        return max(areas) * self.cp_size / sum(areas) if any(areas) else 1.0

    def _check_batch(self, batch: int) -> None:
        if not self.alike and batch != self.mask.sequences:
            raise ValueError(f"the mask describes {self.mask.sequences} sequences, and {batch} are asked for")

    def _parts(self, i: int, sequence: int, own: bool) -> list[_Part]:
        """Return the parts of rank i's queries that see any key; with ``own`` false, those that see keys outside their own run."""
        if i not in self._parts_of:
            self._parts_of[i] = tuple(self._cut_parts(i, spans) for spans in self._spans)
        return self._parts_of[i][sequence][0 if own else 1]

    def _cut_parts(self, i: int, spans: tuple[_Span, ...]) -> tuple[list[_Part], list[_Part]]:
        parts, reaching = [], []
        stops = [span.q_stop for span in spans]
        for start, stop in self.runs[i]:
            for index in range(bisect_right(stops, start), len(spans)):
                span = spans[index]
                if span.q_start >= stop:
                    break
                q_start, q_stop = max(start, span.q_start), min(stop, span.q_stop)
                k_start, k_stop = span.k_start, span.k_stop
                if self.mask.causal:
                    k_stop = min(k_stop, q_stop)
                if self.mask.window is not None:
                    k_start = max(k_start, q_start - self.mask.window + 1)
                if k_start < k_stop:
                    part = _Part(q_start, q_stop, k_start, k_stop)
                    parts.append(part)
                    if k_start < start or k_stop > stop:
                        reaching.append(part)
        return parts, reaching

    def _pieces_of_sequence(self, i: int, j: int, sequence: int) -> Iterator[Piece]:
        own, name = i == j, -1 if self.alike else sequence
        queries, held = self._numberings[i], self._numberings[j]
        row_of_key: Callable[[int], int] = (held if own else _Numbering(self.rows(i, j)[sequence])).row
        window = self.mask.window
        for part in self._parts(i, sequence, own):
            first = queries.row(part.q_start)
            last = first + part.q_stop - part.q_start
            before_queries = min(part.k_stop, part.q_start) if self.mask.causal else part.k_stop
            keys = list(held.within(part.k_start, before_queries))
            while window is not None and keys and part.q_stop - 1 - keys[0][0] >= window:  # the last query is too far from its first key
                start, stop = keys.pop(0)
                k = row_of_key(start)
                rows = min(part.q_stop, stop - 1 + window) - part.q_start  # those that see its last key
                yield Piece(name, first, first + rows, k, k + stop - start, "band", part.q_start - start)
            if keys:
                yield Piece(name, first, last, row_of_key(keys[0][0]), row_of_key(keys[-1][1] - 1) + 1, "full", 0)
            if own and self.mask.causal and part.k_stop == part.q_stop:
                yield Piece(name, first, last, first, last, "diagonal" if window is None or last - first <= window else "band", 0)


@lru_cache(maxsize=32)
def plan_context(mask: RowMask, runs: tuple[Runs, ...]) -> ContextPlan:
    """Return the plan for a mask and the runs of positions of each rank, as ``cut_row`` gives them.

    Raises:
        ValueError: the runs do not cover the row once, or those of a rank are not in order or touch.
    """
    if not runs or any(share != _merged(share) for share in runs):
        raise ValueError(f"runs of a rank must be in order, not empty, and apart: {runs}")
    everything = sorted(run for share in runs for run in share)
    if [0, *(stop for _, stop in everything)] != [*(start for start, _ in everything), mask.length]:
        raise ValueError(f"runs of all ranks must cover the {mask.length} positions of the row, each once: {runs}")
    return ContextPlan(mask, runs)
