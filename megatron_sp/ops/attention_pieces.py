"""Pieces of the square of queries and keys, within which attention is computed, in plain numbers.

A mask is pieces in which all pairs are seen, triangles, and bands. Those of one process follow from its documents,
lengths and window here; those of several ranks come from ``parallel/context_plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_sp.utils.numbers import window_tile

Kind = Literal["full", "diagonal", "band"]
Run = tuple[int, int]

_FILL = 0.75  # the shortest diagonal of a batch, of the longest
_SHORT = 8  # up to here all lengths share a batch: it is calls that cost


class AttentionPiece(NamedTuple):
    """Some queries of a sequence with some keys, for one call of a kernel; each sees a key or is seen by a query."""

    sequence: int  # index in the micro-batch; -1: all its sequences, which are alike
    q_start: int
    q_stop: int
    k_start: int  # rows of what the keys are in: of a rank's own keys, or of a message
    k_stop: int
    # "full": every query sees every key. "diagonal": query a sees keys up to a. "band": query a sees key b if
    # 0 <= a + offset - b < window
    kind: Kind
    offset: int = 0  # of a band, the position of its first query less that of its first key


@dataclass(frozen=True, eq=False)
class Stage:
    """All pieces of some queries against the keys of one rank; it keeps what is derived from it, for all layers."""

    pieces: tuple[AttentionPiece, ...]  # in the order in which they are computed
    window: int | None = None  # of the bands
    # for dropout: for each sequence (one entry if all are alike) the positions of its keys, as runs in the order of the
    # rows, and the ends of its documents, from whose beginning keys are counted; None: one document
    key_runs: tuple[tuple[Run, ...], ...] = ()
    documents: tuple[tuple[int, ...], ...] | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


# the pieces of a mask in one process: no two share a query


@lru_cache(maxsize=16)
def pieces_of_documents(documents: tuple[tuple[int, ...], ...], causal: bool) -> tuple[AttentionPiece, ...]:
    kind: Kind = "diagonal" if causal else "full"
    return tuple(
        AttentionPiece(sequence, start, end, start, end, kind)
        for sequence, ends in enumerate(documents) for start, end in zip((0, *ends), ends, strict=False)
    )  # fmt: skip


def pieces_of_lengths(lengths: Sequence[int], s: int, causal: bool) -> tuple[AttentionPiece, ...]:
    kind: Kind = "diagonal" if causal else "full"
    return tuple(
        AttentionPiece(sequence, 0, s, 0, min(length, s), kind) for sequence, length in enumerate(lengths) if length > 0
    )


@lru_cache(maxsize=16)
def stage_of(pieces: tuple[AttentionPiece, ...], window: int | None) -> Stage:
    """Return the stage of these pieces, the same object for the same ones.

    With a window a longer diagonal is one of its first ``window`` queries, which see all before them, and a band.
    """
    cut_pieces = list[AttentionPiece]()
    for piece in pieces:
        if window is None or piece.q_stop <= piece.q_start + window:
            cut_pieces.append(piece)
            continue
        first = piece.q_start + window
        cut_pieces.append(piece._replace(q_stop=first, k_stop=piece.k_start + window))
        cut_pieces.append(piece._replace(q_start=first, k_start=piece.k_start + 1, kind="band", offset=window - 1))
    return Stage(tuple(cut_pieces), window)


def runs_of_equal(counts: Sequence[int]) -> list[slice]:
    ends = [i + 1 for i in range(len(counts)) if i + 1 == len(counts) or counts[i] != counts[i + 1]]
    return [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def each_key_once(stage: Stage) -> bool:
    """Return whether each key is in one piece at most, so that its gradient is no sum."""
    runs = sorted((piece.sequence, piece.k_start, piece.k_stop) for piece in stage.pieces if piece.kind != "band")
    apart = all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(runs))
    return apart and len(runs) == len(stage.pieces)  # the tiles of a band share keys


def halves(
    pieces: tuple[AttentionPiece, ...], window: int | None
) -> tuple[tuple[AttentionPiece, ...], tuple[AttentionPiece, ...]]:
    """Split the pieces into two parts of about the same work; a large piece is cut between two queries."""
    work = [_pairs_of_rows(piece, window) for piece in pieces]  # the keys that each query sees
    total, before = sum(int(pairs.sum()) for pairs in work), 0
    for index, (piece, pairs) in enumerate(zip(pieces, work, strict=True)):
        of_piece = int(pairs.sum())
        if before + of_piece >= total / 2:
            if of_piece <= total / 8 or len(pairs) == 1:  # small: not worth another call
                return pieces[: index + 1], pieces[index + 1 :]
            row = 1 + int(np.searchsorted(np.cumsum(pairs), total / 2 - before))
            upper, lower = cut(piece, min(row, len(pairs) - 1))
            return (*pieces[:index], *upper), (*lower, *pieces[index + 1 :])
        before += of_piece
    return pieces, ()


def _pairs_of_rows(piece: AttentionPiece, window: int | None) -> np.ndarray:
    rows, keys = np.arange(piece.q_stop - piece.q_start), piece.k_stop - piece.k_start
    if piece.kind == "full":
        return np.full(len(rows), keys)
    if piece.kind == "diagonal":
        return rows + 1
    last = rows + piece.offset
    assert window is not None, f"{piece} is a band, and the stage has no window"
    return np.minimum(keys, last + 1) - np.maximum(0, last - window + 1)


def cut(piece: AttentionPiece, row: int) -> tuple[tuple[AttentionPiece, ...], tuple[AttentionPiece, ...]]:
    # before query ``row``, counted from the first
    middle, key = piece.q_start + row, piece.k_start
    if piece.kind == "diagonal":
        below = piece._replace(q_start=middle, k_stop=key + row, kind="full")
        lower = piece._replace(q_start=middle, k_start=key + row)
        return (piece._replace(q_stop=middle, k_stop=key + row),), (below, lower)
    # keys that a query before sees
    stop = min(piece.k_stop, key + row + piece.offset) if piece.kind == "band" else piece.k_stop
    lower = piece._replace(q_start=middle, offset=piece.offset + row)
    return (piece._replace(q_stop=middle, k_stop=stop),), (lower,)


# tiles


class Tile(NamedTuple):
    sequence: int
    start: int
    queries: int
    first_key: int
    keys: int
    kind: Kind
    offset: int


Tiles = tuple[Tile, ...]


def tiles_of(pieces: tuple[AttentionPiece, ...], window: int | None) -> Tiles:
    # of a band a few queries at a time with the keys that they reach, else one
    tiles: list[Tile] = []
    for piece in pieces:
        queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
        if piece.kind != "band":
            tiles.append(Tile(piece.sequence, piece.q_start, queries, piece.k_start, keys, piece.kind, 0))
            continue
        assert window is not None, f"{piece} is a band, and the stage has no window"
        size = window_tile(window)
        for start in range(0, queries, size):
            n, position = min(size, queries - start), start + piece.offset
            first, stop = max(0, position - window + 1), min(keys, position + n)
            is_full = position + n - window <= first and position >= stop - 1
            tile = Tile(piece.sequence, piece.q_start + start, n, piece.k_start + first, stop - first, "full", 0)
            tiles.append(tile if is_full else tile._replace(kind="band", offset=position - first))
    return tuple(tiles)


def batches_of(tiles: Tiles, bands: bool = True) -> tuple[Tiles, ...]:
    # tiles to compute together, longest first: those of one shape and mask; diagonals of about the same length. Without
    # ``bands`` those of bands stay alone: they share keys, so that copies side by side are larger than the keys
    batches: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda t: (t.kind, -t.queries, -t.keys, t.offset, t.sequence, t.start)):
        longest, last = (batches[-1][0], batches[-1][-1]) if batches else (None, None)
        together = False
        if longest is not None and last is not None and longest.kind == tile.kind:
            together = (longest.queries, longest.keys, longest.offset) == (tile.queries, tile.keys, tile.offset)
            if tile.kind == "diagonal":
                are_square = longest.queries == longest.keys and tile.queries == tile.keys
                are_alike = longest.queries <= _SHORT or tile.queries >= _FILL * longest.queries
                together = together or (are_square and are_alike)
            elif last.sequence == tile.sequence and tile.start < last.start + last.queries:
                together = False  # the results of a call are for rows of their own
            together = together and (bands or tile.kind != "band")
        if together:
            batches[-1].append(tile)
        else:
            batches.append([tile])
    return tuple(map(tuple, batches))
