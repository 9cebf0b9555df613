"""Plan of context parallelism, in plain numbers: who has which positions, which keys travel, which calls to make.

A row of s positions is cut into equal chunks and these are dealt to the cp ranks (``cut_row``); rank i has the L_i
positions of its chunks, in order. From the mask follows for every pair of ranks which rows of j's keys and values rank
i's queries see (``ContextPlan.rows``), which is what j sends to i, and the rectangles, triangles and bands of pairs
that i computes with them (``ContextPlan.pieces``). Every rank derives the same plan.

A mask is a list of spans, queries that all see keys of one range only: documents, or the real keys of a padded
sequence. Under a causal mask the queries of one span within one run of rank i see in their own run a triangle, and all
of their span's keys that j has before that run: j's chunks lie one after another in the message, so that one rectangle
takes several of them. Where a window ends inside such a rectangle it is a band, one for each run of keys.

A causal row in two chunks a rank is the zigzag of Llama 3 (arXiv:2407.21783).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from megatron_sp.ops.attention_pieces import AttentionPiece, Kind
from megatron_sp.parallel.heads import deal
from megatron_sp.parallel.load_balancing import deal_chunks, spread_over
from megatron_sp.parallel.row_mask import RowMask, Run, Runs, merge_runs

_CHUNKS_TRIED = (1, 2, 4, 8, 16)
_CHUNKS_IN_ALL = 512  # with more, dealing takes longer than it saves
_MARGIN = 0.02  # more chunks are more pieces, and more rows sent: taken only if they save more than this
# What receives a row of keys and values in the time of a pair, attention forward: e F / (2 r B) with e bytes an
# element, F FLOP/s, r query heads a group and a link of B bytes/s. 440 for bf16, 600 TFLOP/s, r = 4 over NVLink
# (340 GB/s), 3,600 over 400 Gbit/s: one for all between
_PAIRS_PER_ROW = 1024


class _Span(NamedTuple):
    # queries that see keys of one range alone: that of the queries themselves, or, if causal, one before them; or such
    # queries within one run of positions, and the range of the keys that at least one of them sees
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def _triangle(n: int, most: int) -> int:
    # the sum of min(a, most) over a = 1 .. n; 0 for negative n
    n = max(n, 0)
    grown = min(n, most)
    return grown * (grown + 1) // 2 + (n - grown) * most


class _Index:
    def __init__(self, mask: RowMask) -> None:
        self.causal, self.window, self.packed = mask.causal, mask.window, mask.documents is not None
        self.spans: list[list[_Span]] = []
        for sequence in range(mask.sequences):
            real = mask.length if mask.lengths is None else mask.lengths[sequence]
            if mask.documents is not None:
                ends = mask.documents[sequence]
                spans = [_Span(a, b, a, b) for a, b in zip((0, *ends), ends, strict=False)]
            elif mask.causal:  # queries at padding have all keys before them: a triangle ends where its keys do
                spans = [_Span(0, real, 0, real), _Span(real, mask.length, 0, real)]
            else:
                spans = [_Span(0, mask.length, 0, real)]
            self.spans.append(spans)
        self.starts = [[span.q_start for span in spans] for spans in self.spans]
        self.sums = [[0, *accumulate(self._area_of_span(span, span.q_stop) for span in spans)] for spans in self.spans]

    def area_before(self, position: int) -> int:
        # the pairs of all queries before ``position``, in all sequences
        total = 0
        for spans, starts, sums in zip(self.spans, self.starts, self.sums, strict=True):
            last = bisect_right(starts, position) - 1
            total += sums[last] + self._area_of_span(spans[last], position)
        return total

    def area(self, runs: Iterable[Run]) -> int:
        # the pairs of the queries of ``runs``
        return sum(self.area_before(b) - self.area_before(a) for a, b in runs)

    def _area_of_span(self, span: _Span, stop: int) -> int:
        # the pairs of a span's queries before ``stop``
        keys = span.k_stop - span.k_start
        if not self.causal:
            return (stop - span.q_start) * keys
        # query x (from the span's first key) sees min(x + 1, keys)
        first, last = span.q_start - span.k_start, stop - span.k_start
        area = _triangle(last, keys) - _triangle(first, keys)
        if self.window is not None:  # less the min(x + 1 - window, keys) that are too far
            area -= _triangle(last - self.window, keys) - _triangle(first - self.window, keys)
        return area

    def parts(self, sequence: int, run: Run, outside: bool = False) -> Iterator[_Span]:
        # the parts of a run of queries, in order; their range of keys may be empty. ``outside``: only those that see
        # keys outside the run: its first or its last part, since spans between them are documents within the run
        spans, starts = self.spans[sequence], self.starts[sequence]
        first, last = bisect_right(starts, run[0]) - 1, bisect_right(starts, run[1] - 1) - 1
        for index in sorted({first, last}) if outside else range(first, last + 1):
            span = spans[index]
            q_start, q_stop = max(run[0], span.q_start), min(run[1], span.q_stop)
            k_start, k_stop = span.k_start, span.k_stop
            if self.causal:
                k_stop = min(k_stop, q_stop)
            if self.window is not None:
                k_start = max(k_start, q_start - self.window + 1)
            if not (outside and run[0] <= k_start and k_stop <= run[1]):
                yield _Span(q_start, q_stop, k_start, k_stop)

    def num_received(self, runs: Runs, held: Runs) -> int:
        # how many rows a rank with queries ``runs`` and keys ``held`` receives from all others
        total, own = 0, _Numbering(held)
        for sequence in range(len(self.spans)):
            needed = merge_runs(
                (part.k_start, part.k_stop) for run in runs for part in self.parts(sequence, run, outside=True)
            )
            total += _num_rows(needed) - sum(_num_rows(own.within(start, stop)) for start, stop in needed)
        return total


@lru_cache(maxsize=16)
def _index_of(mask: RowMask) -> _Index:
    return _Index(mask)


def areas_before(mask: RowMask) -> Callable[[int], int]:
    """Return a function of a position: the pairs of all queries before it, in all sequences of the mask."""
    return _index_of(mask).area_before


@lru_cache(maxsize=256)
def cut_row(mask: RowMask, cp_size: int, num_chunks: int | None = None, part: Run | None = None) -> tuple[Runs, ...]:
    """Deal the positions of a row, or of a slice ``part`` of it, to the cp ranks: about as many pairs for each.

    Returns runs of positions of each rank, in order, from ``num_chunks`` equal chunks for each. Without it these are
    the fewest with which attention takes at most 2 % longer than if the mean rank's pairs were all, or the fewest at
    most 2 % above the best. Raises ValueError if a size is below 1.
    """
    if cp_size < 1 or (num_chunks is not None and num_chunks < 1):
        raise ValueError(f"cp_size ({cp_size}) and the number of chunks for each rank ({num_chunks}) must be 1 or more")
    index, part = _index_of(mask), part or (0, mask.length)
    if num_chunks is not None:
        return _dealt(index, cp_size, num_chunks, part)
    most_chunks = 16 if mask.documents is not None else 8
    if mask.documents is None and (not mask.causal or (mask.window is not None and 4 * mask.window <= mask.length)):
        most_chunks = 1
    mean = index.area([part]) / cp_size
    tried: list[tuple[float, int, tuple[Runs, ...]]] = []
    for k in _CHUNKS_TRIED:
        if k > 1 and (k > most_chunks or cp_size * k > min(part[1] - part[0], _CHUNKS_IN_ALL)):
            break
        runs = _dealt(index, cp_size, k, part)
        areas = [index.area(share) for share in runs]
        times = zip(areas, (_PAIRS_PER_ROW * index.num_received(share, share) for share in runs), strict=True)
        most = max(map(max, times))
        if most <= (1 + _MARGIN) * mean:
            return runs
        tried.append((most, max(areas), runs))
    least = min(most for most, _, _ in tried)
    fast = [(largest, runs) for most, largest, runs in tried if most <= (1 + _MARGIN) * least]
    enough = min(largest for largest, _ in fast) + _MARGIN * mean
    return next(runs for largest, runs in fast if largest <= enough)


def _dealt(index: _Index, cp_size: int, num_chunks: int, part: Run) -> tuple[Runs, ...]:
    length = part[1] - part[0]
    num_chunks = max(1, min(num_chunks, length // cp_size))  # no chunk is empty, if there are positions for all ranks
    chunks = [(part[0] + chunk.start, part[0] + chunk.stop) for chunk in deal(length, cp_size * num_chunks)]
    if num_chunks == 1:
        return tuple(merge_runs([chunk]) for chunk in chunks)
    before = [index.area_before(start) for start, _ in chunks] + [index.area_before(part[1])]
    spans = chain.from_iterable(index.spans) if index.packed else ()
    documents = [(max(a, part[0]), min(b, part[1])) for a, b, *_ in spans if max(a, part[0]) < min(b, part[1])]
    shares = deal_chunks([b - a for a, b in pairwise(before)], spread_over(documents, chunks), cp_size)
    return tuple(merge_runs(chunks[chunk] for chunk in share) for share in shares)


def _num_rows(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)


class _Numbering:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.starts = [start for start, _ in runs]
        self.rows = [0, *accumulate(stop - start for start, stop in runs)]

    def row(self, position: int) -> int:
        # the row of a position, which must be in one of the runs
        index = bisect_right(self.starts, position) - 1
        return self.rows[index] + position - self.starts[index]

    def within(self, start: int, stop: int) -> Iterator[Run]:
        for index in range(max(0, bisect_right(self.starts, start) - 1), bisect_left(self.starts, stop)):
            a, b = self.runs[index]
            if max(a, start) < min(b, stop):
                yield max(a, start), min(b, stop)


class ContextPlan:
    """Plan of the exchange and of the pieces; the same on all ranks, computed when asked for, and kept.

    ``runs`` are runs of positions of each rank's queries, ``keys`` those of its keys: the same, or with slices of the
    row (``sequence_slices.py``) those of all slices so far, of whose positions a key's row is the number.
    """

    def __init__(self, mask: RowMask, runs: tuple[Runs, ...], keys: tuple[Runs, ...] | None = None) -> None:
        self.mask, self.runs, self.keys, self.cp_size = mask, runs, keys or runs, len(runs)
        self.lengths = tuple(_num_rows(share) for share in runs)
        self.alike = mask.sequences == 1
        self._numberings = [_Numbering(share) for share in runs]
        self._numberings_of_keys = self._numberings if self.keys == runs else [_Numbering(share) for share in self.keys]
        self._index = _index_of(mask)
        self._parts_of: dict[tuple[int, int, bool], list[_Span]] = {}
        self._rows: dict[tuple[int, int], tuple[Runs, ...]] = {}
        self._pieces: dict[tuple[int, int], tuple[AttentionPiece, ...]] = {}
        self._checked: set[int] = set()

    def rows(self, i: int, j: int) -> tuple[Runs, ...]:
        """Return for each sequence the runs of positions whose keys and values rank j sends to rank i, which sees them.

        With j = i: those of its own that it uses. There is one entry if all sequences are alike.
        """
        if (i, j) not in self._rows:
            held = self._numberings_of_keys[j]
            self._rows[i, j] = tuple(
                merge_runs(
                    run for part in self._parts(i, sequence, i != j) for run in held.within(part.k_start, part.k_stop)
                )
                for sequence in range(self.mask.sequences)
            )
        return self._rows[i, j]

    def local_rows(self, i: int, j: int) -> tuple[Runs, ...]:
        # ``rows`` as rows of L_j; what lies one after another there is one run, however far positions are
        held = self._numberings_of_keys[j]
        return tuple(
            merge_runs((held.row(start), held.row(stop - 1) + 1) for start, stop in runs) for runs in self.rows(i, j)
        )

    def num_rows(self, i: int, j: int, batch: int) -> int:
        self._check_batch(batch)
        if i == j:
            return 0
        return sum(map(_num_rows, self.rows(i, j))) * (batch if self.alike else 1)

    def rows_received(self, i: int, batch: int) -> tuple[int, ...]:
        """Return for each shift t = 1 .. cp_size - 1 how many rows rank i receives, from rank i - t."""
        return tuple(self.num_rows(i, (i - t) % self.cp_size, batch) for t in range(1, self.cp_size))

    def rows_sent(self, i: int, batch: int) -> tuple[int, ...]:
        """Return for each shift how many rows rank i sends, to rank i + t."""
        return tuple(self.num_rows((i + t) % self.cp_size, i, batch) for t in range(1, self.cp_size))

    def num_received(self, i: int, batch: int) -> int:
        """Return the sum of ``rows_received``, without a look at every other rank."""
        self._check_batch(batch)
        return self._index.num_received(self.runs[i], self.keys[i]) * (batch if self.alike else 1)

    @property
    def ring_share(self) -> float:
        """Rows that travel, as a share of those of a ring, which brings every row to every rank."""
        return self._ring_share(lambda received: sum(received) / self.cp_size)

    @property
    def worst_ring_share(self) -> float:
        """Rows of the rank that receives the most, as a share of a ring's mean."""
        return self._ring_share(max)

    def _ring_share(self, of_ranks: Callable[[list[int]], float]) -> float:
        received = [self._index.num_received(runs, held) for runs, held in zip(self.runs, self.keys, strict=True)]
        of_ring = self.mask.sequences * self.mask.length * (self.cp_size - 1) / self.cp_size
        return of_ranks(received) / of_ring if of_ring else 0.0

    def pieces(self, i: int, j: int) -> tuple[AttentionPiece, ...]:
        """Return the pieces of rank i's queries with rank j's keys: by sequence, then by queries, then by keys.

        Every pair that the mask allows is in exactly one piece, and no other pair is; every query of a piece sees a key
        of it, and is in at most one full piece.
        """
        if (i, j) not in self._pieces:
            self._pieces[i, j] = tuple(
                piece for sequence in range(self.mask.sequences) for piece in self._pieces_of_sequence(i, j, sequence)
            )
        return self._pieces[i, j]

    def area(self, i: int) -> int:
        # the pairs that rank i's queries see, in all sequences that the mask describes
        return self._index.area(self.runs[i])

    def require_all_pairs(self, i: int) -> None:
        # or RuntimeError: the pieces of rank i are all pairs that the mask allows its queries
        if i in self._checked:
            return
        pairs, window = 0, self.mask.window or 0
        for piece in (piece for j in range(self.cp_size) for piece in self.pieces(i, j)):
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            if piece.kind == "full":
                pairs += queries * keys
            elif piece.kind == "diagonal":
                pairs += _triangle(queries, keys)
            else:  # those up to each query, less those too far from it
                first, last = piece.offset, piece.offset + queries
                pairs += _triangle(last, keys) - _triangle(first, keys)
                pairs -= _triangle(last - window, keys) - _triangle(first - window, keys)
        if pairs != self.area(i):
            raise RuntimeError(
                f"the plan of context parallelism has {pairs} pairs of queries and keys for cp rank {i} of"
                f" {self.cp_size}, and the mask allows {self.area(i)}: an error in the plan; use"
                " --sequence-parallel-size instead, and report it"
            )
        self._checked.add(i)

    @property
    def balance(self) -> float:
        """Largest area of a rank divided by the mean."""
        areas = [self.area(i) for i in range(self.cp_size)]
        return max(areas) * self.cp_size / sum(areas) if any(areas) else 1.0

    def _check_batch(self, batch: int) -> None:
        if not self.alike and batch != self.mask.sequences:
            raise ValueError(f"the mask describes {self.mask.sequences} sequences, and {batch} are asked for")

    def _parts(self, i: int, sequence: int, outside: bool) -> list[_Span]:
        # the parts of rank i's queries; with ``outside``, those that see keys outside their own run
        name = i, sequence, outside
        if name not in self._parts_of:
            self._parts_of[name] = [p for run in self.runs[i] for p in self._index.parts(sequence, run, outside)]
        return self._parts_of[name]

    def _pieces_of_sequence(self, i: int, j: int, sequence: int) -> Iterator[AttentionPiece]:
        own, name = i == j, -1 if self.alike else sequence
        queries, held = self._numberings[i], self._numberings_of_keys[j]
        row_of_key: Callable[[int], int] = (held if own else _Numbering(self.rows(i, j)[sequence])).row
        window = self.mask.window
        # of the queries of a document so far: those with the keys of earlier slices, then the triangle
        diagonal: tuple[AttentionPiece, ...] = ()
        for part in self._parts(i, sequence, not own):
            first = queries.row(part.q_start)
            last = first + part.q_stop - part.q_start
            if own and self.mask.causal and window is None and part.k_stop == part.q_stop:
                # whatever lies between a rank's own runs, it has the rows of a document in their order
                if diagonal and any(queries.within(part.k_start, part.q_start)):
                    *earlier, triangle = diagonal
                    longer = triangle._replace(q_stop=last, k_stop=triangle.k_start + last - triangle.q_start)
                    diagonal = (*(piece._replace(q_stop=last) for piece in earlier), longer)
                    continue
                yield from diagonal
                diagonal, at = (), row_of_key(part.q_start)
                if any(held.within(part.k_start, part.q_start)):
                    start = row_of_key(next(held.within(part.k_start, part.q_start))[0])
                    diagonal = (AttentionPiece(name, first, last, start, at, "full", 0),)
                diagonal = (*diagonal, AttentionPiece(name, first, last, at, at + last - first, "diagonal", 0))
                continue
            yield from diagonal
            diagonal = ()
            before_queries = min(part.k_stop, part.q_start) if self.mask.causal else part.k_stop
            keys = list(held.within(part.k_start, before_queries))
            # the last query is too far from the first key
            while window is not None and keys and part.q_stop - 1 - keys[0][0] >= window:
                start, stop = keys.pop(0)
                k = row_of_key(start)
                rows = min(part.q_stop, stop - 1 + window) - part.q_start  # those that see its last key
                yield AttentionPiece(name, first, first + rows, k, k + stop - start, "band", part.q_start - start)
            if keys:
                first_key, last_key = row_of_key(keys[0][0]), row_of_key(keys[-1][1] - 1)
                yield AttentionPiece(name, first, last, first_key, last_key + 1, "full", 0)
            if own and self.mask.causal and part.k_stop == part.q_stop:
                at = row_of_key(part.q_start)
                kind: Kind = "diagonal" if window is None or last - first <= window else "band"
                yield AttentionPiece(name, first, last, at, at + last - first, kind, 0)
        yield from diagonal


def plan_context(mask: RowMask, runs: tuple[Runs, ...], keys: tuple[Runs, ...] | None = None) -> ContextPlan:
    """Return the plan for a mask and the runs of positions of each rank, the same object for the same ones.

    ``keys`` are those of a slice of the row and of all before it; None: a row is not sliced. Raises ValueError if the
    runs do not cover the row (or slice) once, or those of a rank are not in order or touch.
    """
    return _plan(mask, runs, keys)  # lru_cache tells a default from the same value given


@lru_cache(maxsize=128)
def _plan(mask: RowMask, runs: tuple[Runs, ...], keys: tuple[Runs, ...] | None) -> ContextPlan:
    for share in (*runs, *(keys or ())):
        if share != merge_runs(share):
            raise ValueError(f"runs of a rank must be in order, not empty, and apart: {share}")
    of_queries, of_keys = (sorted(run for share in shares for run in share) for shares in (runs, keys or runs))
    begin, end = (of_queries[0][0], of_queries[-1][1]) if keys is not None and of_queries else (0, mask.length)
    for first, found in ((begin, of_queries), (0, of_keys)):
        if [first, *(stop for _, stop in found)] != [*(start for start, _ in found), end]:
            row = (first, end) == (0, mask.length)
            whole = f"{mask.length} positions of the row" if row else f"positions {first} to {end} of the row"
            raise ValueError(f"runs of all ranks must cover the {whole}, each once: {found}")
    return ContextPlan(mask, runs, keys)
