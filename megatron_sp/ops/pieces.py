"""Attention in pieces: kernels that give the logarithm of the softmax's sum (lse) and take it, so that keys may come in parts.

Softmax over keys A and B is the mean of those over A and over B, weighted by their sums. With s = lse over A and B,

    forward     out = out_A exp(lse_A - s) + out_B exp(lse_B - s),    s = log(exp(lse_A) + exp(lse_B))
    backward    P = exp(q k^T / sqrt(d) - s),  dS = P (d_out v^T - rowsum(d_out out)) / sqrt(d),  dq = dS k,  dk = dS^T q,  dv = P^T d_out

where backward needs the *final* out and s, and no merge: each piece adds its share. Sums are kept in fp32 (fp64 for fp64).

A ``Stage`` is all pieces of some queries against the keys of one rank, and a kernel is handed it whole. The kernels here,
torch's on the CPU and the plain reference, compute it tile by tile: a band (a sliding window that cuts through a piece) is
cut into tiles of queries with the keys that they reach, so that no mask is as large as a long piece; tiles of one shape,
whose calls would cost more than their work, are copied side by side. No tile has a query without keys: torch's CPU kernel
gives such a row lse = 0, which would win over real rows.

Sources: the merge is FlashAttention's (arXiv:2205.14135) between blocks, and Ring Attention's (arXiv:2310.01889) between ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_sp.ops.dropout import keep_mask
from megatron_sp.ops.memory import blocks, empty, to_device
from megatron_sp.utils.numbers import window_tile

_BATCHED_BYTES = 1 << 15  # of a tile's queries: above this size a separate call costs less than the copies
_FILL = 0.75  # the shortest diagonal of a batch, of the longest
_SHORT = 8  # up to here all lengths share a batch: it is calls that cost

Kind = Literal["full", "diagonal", "band"]
Run = tuple[int, int]


class Piece(Protocol):
    """Some queries of a sequence with some keys, every one of which is seen by a query and sees a key (``parallel/context_plan.py``)."""

    @property
    def sequence(self) -> int:
        """Index of the sequence; -1: all of them, which are alike."""

    @property
    def q_start(self) -> int:
        """First row of the queries."""

    @property
    def q_stop(self) -> int:
        """End of the rows of the queries."""

    @property
    def k_start(self) -> int:
        """First row of the keys."""

    @property
    def k_stop(self) -> int:
        """End of the rows of the keys."""

    @property
    def kind(self) -> Kind:
        """full: all pairs; diagonal: query a sees keys up to a; band: query a sees key b if 0 <= a + offset - b < window."""

    @property
    def offset(self) -> int:
        """Position of the first query less that of the first key; for a band."""


class Part(NamedTuple):
    """A ``Piece`` of our own making: part of another."""

    sequence: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Kind
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Stage:
    """All pieces of some queries against the keys of one rank. Every layer uses the same stages, so they keep what is derived from them.

    Attributes:
        pieces: in the order in which they are computed.
        window: of the bands.
        key_runs: for each sequence (one entry if all are alike) the positions of its keys, as runs in the order of the rows. For
            dropout.
        documents: for each sequence the ends of its documents, from whose beginning dropout counts keys; None: one document.
    """

    pieces: tuple[Piece, ...]
    window: int | None = None
    key_runs: tuple[tuple[Run, ...], ...] = ()
    documents: tuple[tuple[int, ...], ...] | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when it was first asked for ``key``."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


@dataclass(frozen=True)
class Rows:
    """Rows of several sequences in one tensor: row i of a sequence is at ``starts[sequence] + i * stride``.

    If all sequences are alike there is one entry in ``starts``, and the sequences lie side by side in dim 1.

    Attributes:
        x: [rows of all sequences, m, ...].
    """

    x: Tensor
    starts: tuple[int, ...]
    stride: int

    @classmethod
    def interleaved(cls, x: Tensor, sequences: int) -> Rows:
        """Return the rows of x [s, sequences * m, ...], where the sequences are side by side in each position."""
        shape = (x.shape[0] * sequences, x.shape[1] // sequences, *x.shape[2:])
        return cls(x.reshape(shape), tuple(range(sequences)), sequences)

    def half(self, number: int) -> Rows:
        """Return the first (0) or the second (1) half of the columns m, of which the first has one more if m is odd."""
        middle = (self.x.shape[1] + 1) // 2
        return replace(self, x=self.x[:, middle:] if number else self.x[:, :middle])

    def slice(self, sequence: int, start: int, count: int) -> slice:
        """Return where ``count`` rows of a sequence are."""
        first = self.starts[sequence] + start * self.stride
        return slice(first, first + (count - 1) * self.stride + 1, self.stride)


@dataclass(frozen=True)
class Columns:
    """Correspondence between the columns m of the queries and those of the keys and values.

    Attributes:
        batch: b sequences.
        alike: their pieces are the same, so they are one sequence of b times as many heads.
        counts: number of queries of each key/value head of a sequence, if these differ: queries are [s, b * sum(counts), 1, d],
            keys and values [s, b * len(counts), 2, d]. None: queries are [s, m, r, d], keys and values [s, m, 2, d].
    """

    batch: int
    alike: bool
    counts: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences with pieces of their own."""
        return 1 if self.alike else self.batch

    def of_queries(self, x: Tensor) -> list[Rows]:
        """Split a tensor [s, m, r, ...] of the queries into parts whose heads are uniform; views, unless its strides forbid it."""
        rows = Rows.interleaved(x, self.sequences)
        return [rows] if self.counts is None else self._uniform(rows, self.counts, queries=True)

    def of_keys(self, rows: Rows) -> list[Rows]:
        """Split keys and values in the same way."""
        return [rows] if self.counts is None else self._uniform(rows, (1,) * len(self.counts), queries=False)

    def _uniform(self, rows: Rows, widths: tuple[int, ...], queries: bool) -> list[Rows]:
        assert self.counts is not None
        found = []
        of_sequence = rows.x.unflatten(1, (self.batch if self.alike else 1, sum(widths)))
        for sequence in range(of_sequence.shape[1]):
            for heads in runs_of_equal(self.counts):
                columns = slice(sum(widths[: heads.start]), sum(widths[: heads.stop]))
                x = of_sequence[:, sequence, columns]
                if queries:
                    x = x.squeeze(2).unflatten(1, (heads.stop - heads.start, self.counts[heads.start]))
                found.append(replace(rows, x=x))
        return found


def runs_of_equal(counts: Sequence[int]) -> list[slice]:
    """Return the runs of equal numbers."""
    ends = [i + 1 for i in range(len(counts)) if i + 1 == len(counts) or counts[i] != counts[i + 1]]
    return [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]


class Partial:
    """Attention of all queries of a rank over the keys so far: out and lse, as ``merge_`` continues them.

    Args:
        q: [s, m, r, d].
        columns: heads of the queries and keys.
    """

    def __init__(self, q: Tensor, columns: Columns) -> None:
        wide = wide_dtype(q.dtype)
        self.out = empty(q.shape, dtype=wide, device=q.device).zero_()
        self.lse = empty(q.shape[:3], dtype=wide, device=q.device).fill_(-torch.inf)
        self.parts = [
            PartialPart(out, lse, np.zeros((columns.sequences, q.shape[0]), dtype=bool))
            for out, lse in zip(columns.of_queries(self.out), columns.of_queries(self.lse[..., None]), strict=True)
        ]


class PartialPart:
    """Part of a ``Partial`` whose heads are uniform.

    Args:
        out: [n, m, r, d].
        lse: [n, m, r, 1].
        seen: bool [sequences, s], rows with a key already.
    """

    def __init__(self, out: Rows, lse: Rows, seen: np.ndarray) -> None:
        self.out, self.lse, self.seen = out, lse, seen

    def add(self, call: _Call, at: _At, out: Tensor, lse: Tensor) -> None:
        """Continue with the results of a call, out [n * m, r, rows, d] and lse [n * m, r, rows]."""
        spans = [(tile.sequence, tile.start, tile.start + tile.queries) for tile in call.tiles]
        first = self._is_first(spans)
        if at.alone is not None:
            self._continue(at.alone, out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), first)
        else:
            if not first:
                out, lse = _merged(at.take(self.out.x), at.take(self.lse.x)[..., 0], out, lse)
            at.put(self.out.x, out)
            at.put(self.lse.x, lse[..., None])
        if call.columns.stop == self.out.x.shape[1]:
            self._mark(spans)

    def add_rows(self, pieces: Sequence[Piece], rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Continue with the results of pieces that share no query, out [n, m, r, d] and lse [n, m, r]; ``rows``: where they belong."""
        spans = [(piece.sequence, piece.q_start, piece.q_stop) for piece in pieces]
        first = self._is_first(spans)
        if isinstance(rows, slice):
            self._continue(rows, out, lse, first)
        else:
            if not first:
                out, lse = _merged(self.out.x.index_select(0, rows), self.lse.x.index_select(0, rows)[..., 0], out, lse)
            self.out.x.index_copy_(0, rows, out.to(self.out.x.dtype))
            self.lse.x.index_copy_(0, rows, lse[..., None].to(self.lse.x.dtype))
        self._mark(spans)

    def _continue(self, place: slice | tuple[slice, slice], out: Tensor, lse: Tensor, first: bool) -> None:
        mine, sums = self.out.x[place], self.lse.x[place][..., 0]
        if first:  # as they are: what sees the keys of one piece has the bits of one call
            mine.copy_(out)
            sums.copy_(lse)
        else:
            merge_(mine, sums, out, lse)

    def _is_first(self, spans: list[tuple[int, int, int]]) -> bool:
        """Return whether none of these queries has seen a key."""
        return not any(self.seen[sequence, start:stop].any() for sequence, start, stop in spans)

    def _mark(self, spans: list[tuple[int, int, int]]) -> None:
        for sequence, start, stop in spans:
            self.seen[sequence, start:stop] = True


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    merge_(out, lse, more, more_lse)
    return out, lse


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Continue a softmax over further keys, in place; rows that have seen no key have lse -inf, and out 0.

    Args:
        out: [..., d], fp32 or fp64.
        lse: [...], of the same dtype.
        more: [..., d], over the further keys, in any dtype.
        more_lse: [...].
    """
    total = torch.logaddexp(lse, more_lse)
    # -inf less -inf would be NaN
    finite = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - finite).exp_()[..., None]).add_(more * (more_lse - finite).exp_()[..., None])
    lse.copy_(total)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BackwardInputs(NamedTuple):
    """Tensors of the queries that backward needs: [n, m, r, d], and lse [n, m, r, 1]; out and lse over the keys of *all* stages."""

    q: Rows
    out: Rows
    lse: Rows
    d_out: Rows


class PieceKernel(Protocol):
    """Computes the pieces of a stage, for heads that are uniform."""

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        """Continue ``so_far`` with the attention of q [n, m, r, d] over kv [rows, m, 2, d].

        Args:
            row_keys: int32 [n, m, r, 1], keys of the queries for dropout by hash; None: no dropout.
        """

    def backward(self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None) -> None:
        """Add the gradients to d_q [n, m, r, d] and d_kv [rows, m, 2, d], which sums the r queries of a head."""


def attend(
    kernel: PieceKernel, stage: Stage, q: Tensor, kv: Rows, so_far: Partial, columns: Columns, row_keys: Tensor | None = None
) -> None:  # fmt: skip
    """Continue the attention of q over the keys and values of a stage.

    Args:
        kernel: computes it.
        stage: pieces, in rows of q and of kv.
        q: [s, m, r, d].
        kv: [rows, m of the keys, 2, d].
        so_far: is continued in place.
        columns: heads of the queries and keys.
        row_keys: int32 [s, m, r], for dropout.
    """
    if not stage.pieces:
        return
    keys = None if row_keys is None else columns.of_queries(row_keys[..., None])
    for i, parts in enumerate(zip(columns.of_queries(q), columns.of_keys(kv), so_far.parts, strict=True)):
        kernel.forward(stage, *parts, None if keys is None else keys[i])


def attend_backward(
    kernel: PieceKernel, stage: Stage, inputs: tuple[Tensor, Tensor, Tensor, Tensor], kv: Rows, d_q: Tensor, d_kv: Rows, columns: Columns,
    row_keys: Tensor | None = None, half: int | None = None,
) -> None:  # fmt: skip
    """Add the gradients of a stage.

    Args:
        kernel, stage, columns, row_keys: as for ``attend``.
        inputs: q, final out, final lse and gradient of out; [s, m, r, d], lse [s, m, r].
        kv: [rows, m of the keys, 2, d].
        d_q: [s, m, r, d], in the dtype of sums.
        d_kv: as kv, in the dtype of sums, or in any other if each key is in one piece at most.
        half: 0 or 1: for the first or the second half of the heads alone (``can_halve``). None: for all.
    """
    if not stage.pieces:
        return
    q, out, lse, d_out = inputs
    by_queries = [columns.of_queries(x) for x in (q, out, lse[..., None], d_out, d_q)]
    by_queries += [] if row_keys is None else [columns.of_queries(row_keys[..., None])]
    for of_part in zip(*by_queries, columns.of_keys(kv), columns.of_keys(d_kv), strict=True):
        rows = of_part if half is None else [x.half(half) for x in of_part]
        *of_queries, of_keys, into_kv = rows
        if of_keys.x.shape[1]:
            keys = of_queries[5] if row_keys is not None else None
            kernel.backward(stage, BackwardInputs._make(of_queries[:4]), of_keys, of_queries[4], into_kv, keys)


def can_halve(columns: Columns, kv: Rows) -> bool:
    """Return whether the halves of the heads are of about the same work: with one key/value head they are not."""
    widths = [rows.x.shape[1] for rows in columns.of_keys(kv)]
    return 3 * sum(width // 2 for width in widths) >= sum(widths)


def each_key_once(stage: Stage) -> bool:
    """Return whether each key is in one piece at most, so that its gradient is no sum."""
    runs = sorted((piece.sequence, piece.k_start, piece.k_stop) for piece in stage.pieces if piece.kind != "band")
    apart = all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(runs))
    return apart and len(runs) == len(stage.pieces)  # the tiles of a band share keys


# tiles


class Tile(NamedTuple):
    """A block of queries and keys for a kernel: rows from ``start`` on, keys from ``first_key`` on."""

    sequence: int
    start: int
    queries: int
    first_key: int
    keys: int
    kind: Kind
    offset: int


Tiles = tuple[Tile, ...]


def tiles_of(pieces: tuple[Piece, ...], window: int | None) -> Tiles:
    """Return the tiles of the pieces: a band is many, anything else is one."""
    found: list[Tile] = []
    for piece in pieces:
        if piece.kind == "band":
            assert window is not None, f"{piece} is a band, and the stage has no window"
            found += _tiles_of_band(piece, window)
        else:
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            found.append(Tile(piece.sequence, piece.q_start, queries, piece.k_start, keys, piece.kind, 0))
    return tuple(found)


def _tiles_of_band(piece: Piece, window: int) -> Iterator[Tile]:
    """Yield a few queries of a band at a time, with the keys that they reach."""
    size, queries, keys = window_tile(window), piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    for start in range(0, queries, size):
        n, at = min(size, queries - start), start + piece.offset
        first, stop = max(0, at - window + 1), min(keys, at + n)
        whole = at + n - window <= first and at >= stop - 1
        offset = 0 if whole else at - first
        yield Tile(piece.sequence, piece.q_start + start, n, piece.k_start + first, stop - first, "full" if whole else "band", offset)


def batches_of(tiles: Tiles) -> tuple[Tiles, ...]:
    """Group tiles to compute together, longest first: those of one shape and mask; diagonals of about the same length."""
    found: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda t: (t.kind, -t.queries, -t.keys, t.offset, t.sequence, t.start)):
        longest, last = (found[-1][0], found[-1][-1]) if found else (None, None)
        together = False
        if longest is not None and last is not None and longest.kind == tile.kind:
            together = (longest.queries, longest.keys, longest.offset) == (tile.queries, tile.keys, tile.offset)
            if tile.kind == "diagonal":
                together = longest.queries <= _SHORT or tile.queries >= _FILL * longest.queries
            elif last.sequence == tile.sequence and tile.start < last.start + last.queries:
                together = False  # the results of a call are for rows of their own
        if together:
            found[-1].append(tile)
        else:
            found.append([tile])
    return tuple(map(tuple, found))


class _Call(NamedTuple):
    """Tiles of one kernel call, longest first, and the columns of m: all, if there are several tiles."""

    tiles: Tiles
    columns: slice


def _calls(stage: Stage, q: Tensor) -> Iterator[_Call]:
    """Yield kernel calls whose results take about 1 MiB each (``ops/memory.py :: blocks``); a large tile has calls of its own."""
    each, row = q.shape[1], q.shape[2] * q.shape[3] * q.element_size()
    for batch in stage.once("batches", lambda: batches_of(tiles_of(stage.pieces, stage.window))):
        of_one = batch[0].queries * each * row
        if of_one <= _BATCHED_BYTES:
            yield from (_Call(batch[some], slice(0, each)) for some in blocks(len(batch), of_one, q.device))
            continue
        rows = max(batch[0].queries, batch[0].keys)  # results of backward are as long as the keys
        yield from (_Call((tile,), columns) for tile in batch for columns in blocks(each, rows * row, q.device))


class _At:
    """Gather and scatter of the rows of a kernel call.

    Args:
        call: the kernel call.
        rows: where the rows are.
        keys: True for the rows of the keys; else those of the queries.
    """

    def __init__(self, call: _Call, rows: Rows, keys: bool) -> None:
        lengths = [tile.keys if keys else tile.queries for tile in call.tiles]
        starts = [tile.first_key if keys else tile.start for tile in call.tiles]
        self.alone: tuple[slice, slice] | None = None
        if len(lengths) == 1:
            self.alone = rows.slice(call.tiles[0].sequence, starts[0], lengths[0]), call.columns
            return
        longest, device = max(lengths), rows.x.device
        first = torch.tensor([rows.starts[t.sequence] + start * rows.stride for t, start in zip(call.tiles, starts, strict=True)])
        length, at = torch.tensor(lengths)[:, None], torch.arange(longest)
        index = first[:, None] + torch.minimum(at, length - 1) * rows.stride  # behind its end a tile's last row is repeated
        self.valid = to_device(at < length, device) if min(lengths) < longest else None
        self.index = to_device(index, device)
        self.columns = torch.arange(call.columns.stop, device=device)

    def take(self, x: Tensor, zero_behind: bool = False) -> Tensor:
        """Gather rows: [rows, m, r, d] -> [n * m, r, longest, d]; a view for one tile."""
        if self.alone is not None:
            return x[self.alone].permute(1, 2, 0, 3)
        taken = x[self.index[:, None, :], self.columns[:, None]]  # [n, m, longest, r, d]
        if zero_behind and self.valid is not None:
            taken = taken * self.valid[:, None, :, None, None]
        return taken.flatten(0, 1).transpose(1, 2)

    def put(self, into: Tensor, x: Tensor) -> None:
        """Scatter rows [n * m, r, longest, d] of several tiles."""
        into.index_copy_(0, *self._flat(x.to(into.dtype)))

    def add(self, into: Tensor, x: Tensor) -> None:
        """Add rows [n * m, r, longest, d] to those of ``into``."""
        if self.alone is not None:
            into[self.alone].add_(x.permute(2, 0, 1, 3))
        else:
            into.index_add_(0, *self._flat(x.to(into.dtype)))

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.unflatten(0, (len(self.index), -1)).permute(0, 3, 1, 2, 4)  # [n, longest, m, r, d]
        return (self.index.flatten(), x.flatten(0, 1)) if self.valid is None else (self.index[self.valid], x[self.valid])


# kernels


class _Block(NamedTuple):
    """Operands of a kernel call: q [n, r, rows, d]; k and v [n, 1, keys, d]; the mask's kind and shape; what dropout keeps."""

    q: Tensor
    k: Tensor
    v: Tensor
    tile: Tile
    window: int
    keep: Tensor | None


class _TileKernel:
    """A kernel that computes tiles, whatever computes one of them."""

    dropout = 0.0

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Return out [n, r, rows, d] and lse [n, r, rows]."""
        raise NotImplementedError

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, and of k and v for each query or summed over r, from those of out and the final out and lse."""
        raise NotImplementedError

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        """See ``PieceKernel``."""
        for call in _calls(stage, q.x):
            queries = _At(call, q, keys=False)
            block = self._block(stage, call, queries, q, kv, row_keys)
            so_far.add(call, queries, *self.attend(block))

    def backward(self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None) -> None:
        """See ``PieceKernel``."""
        q, out, lse, d_out = inputs
        for call in _calls(stage, q.x):
            queries, keys = _At(call, q, keys=False), _At(call, kv, keys=True)
            block = self._block(stage, call, queries, q, kv, row_keys)
            # the kernel wants its lse contiguous
            final = queries.take(out.x), queries.take(lse.x)[..., 0].contiguous(), queries.take(d_out.x, zero_behind=True)
            of_q, *of_kv = self.attend_backward(block, *final)
            queries.add(d_q.x, of_q)
            for place, of_queries in enumerate(of_kv):  # one key and value served r queries
                summed = of_queries if of_queries.shape[1] == 1 else of_queries.sum(1, keepdim=True, dtype=wide_dtype(q.x.dtype))
                keys.add(d_kv.x[:, :, place : place + 1], summed)

    def _block(self, stage: Stage, call: _Call, queries: _At, q: Rows, kv: Rows, row_keys: Rows | None) -> _Block:
        taken, keep = _At(call, kv, keys=True).take(kv.x), None
        if self.dropout > 0:
            if row_keys is None:
                raise RuntimeError("attention dropout needs the tokens' dropout keys: pass DropoutKeys with the batch")
            keep = _keep(stage, call, queries.take(row_keys.x)[..., 0], self.dropout)
        return _Block(queries.take(q.x), taken[:, :1], taken[:, 1:], call.tiles[0], stage.window or 0, keep)


class CPUFlash(_TileKernel):
    """torch's fused CPU kernel."""

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        causal, mask = _causal_and_mask(block)
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._operands(block), 0.0, causal, attn_mask=mask
        )
        return found

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = _causal_and_mask(block)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, *self._operands(block), out, lse, 0.0, causal, attn_mask=mask
        )
        return found

    def _operands(self, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        r = block.q.shape[1]
        return block.q, block.k.expand(-1, r, -1, -1), block.v.expand(-1, r, -1, -1)


def _causal_and_mask(block: _Block) -> tuple[bool, Tensor | None]:
    """Return (whether to use the kernel's causal mask, additive mask of a band or None)."""
    tile = block.tile
    if tile.kind != "band":
        return tile.kind == "diagonal", None
    return False, band_mask(tile, block.window, block.q.dtype, block.q.device)


@dataclass(frozen=True)
class Reference(_TileKernel):
    """Plain matrix products in any dtype on any device, with attention dropout by hash.

    What is dropped is dropped after the softmax over all keys, so pieces are merged by the lse before dropout, and
    rowsum(d_out * out) is right with the final out after it.
    """

    dropout: float = 0.0

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        scores = self._scores(block)
        probs = self._dropped(torch.softmax(scores, dim=-1), block)
        return torch.matmul(probs.to(block.v.dtype), block.v), torch.logsumexp(scores, dim=-1)

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = lse.dtype
        q, k, v, out, d_out = (x.to(wide) for x in (block.q, block.k, block.v, out, d_out))
        probs = torch.exp(self._scores(block) - lse[..., None])
        d_v = torch.matmul(self._dropped(probs, block).transpose(-1, -2), d_out)
        d_probs = self._dropped(torch.matmul(d_out, v.transpose(-1, -2)), block)
        d_scores = probs * (d_probs - (d_out * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return torch.matmul(d_scores, k), torch.matmul(d_scores.transpose(-1, -2), q), d_v

    def _scores(self, block: _Block) -> Tensor:
        scores = torch.matmul(block.q, block.k.transpose(-1, -2)).to(wide_dtype(block.q.dtype)) / math.sqrt(block.q.shape[-1])
        tile = block.tile
        if tile.kind == "band":
            scores = scores + band_mask(tile, block.window, scores.dtype, scores.device)
        elif tile.kind == "diagonal":
            rows = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(rows > rows[:, None], -torch.inf)
        return scores

    def _dropped(self, probs: Tensor, block: _Block) -> Tensor:
        return probs if block.keep is None else probs * block.keep * (1.0 / (1.0 - self.dropout))


def band_mask(tile: Tile, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [queries, keys] of a tile of a band: 0 where query a sees key b, 0 <= a + offset - b < window, else -inf."""
    first = window - 1 - tile.offset
    return _whole_band(window, dtype, device)[: tile.queries, first : first + tile.keys]


@lru_cache(maxsize=4)
def _whole_band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of a tile with all keys that it reaches, ``window`` - 1 before its first query on; others are parts of it."""
    rows = window_tile(window)
    distance = torch.arange(rows, device=device)[:, None] + window - 1 - torch.arange(window - 1 + rows, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _keep(stage: Stage, call: _Call, row_keys: Tensor, rate: float) -> Tensor:
    """Return which probabilities of a call dropout keeps, bool [n * m, r, rows, keys], given the rows' keys, int32 [n * m, r, rows].

    A key's channel is its position in its document, as in one process.
    """
    longest, found = max(tile.keys for tile in call.tiles), []
    for tile, keys in zip(call.tiles, row_keys.unflatten(0, (len(call.tiles), -1)), strict=True):
        runs = _channels(stage, tile)
        count = runs[-1][1] - runs[-1][0]
        runs[-1] = (runs[-1][0], runs[-1][0] + count + longest - tile.keys)  # what is behind a tile's end counts for nothing
        found.append(torch.cat([keep_mask(keys, stop - start, rate, start) for start, stop in runs], dim=-1))
    return torch.cat(found)


def _channels(stage: Stage, tile: Tile) -> list[Run]:
    """Return the runs of positions of a tile's keys, counted from the beginning of their document."""
    found, at = [], 0
    for start, stop in stage.key_runs[tile.sequence]:
        first, last = max(tile.first_key, at), min(tile.first_key + tile.keys, at + stop - start)
        if first < last:
            found.append((start + first - at, start + last - at))
        at += stop - start
    if stage.documents is not None:
        ends = (0, *stage.documents[tile.sequence])
        begin = ends[bisect_right(ends, found[0][0]) - 1]
        found = [(start - begin, stop - begin) for start, stop in found]
    return found


# halves of a stage


def halves(pieces: tuple[Piece, ...], window: int | None) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Split the pieces into two parts of about the same work, the first ones and the rest; a large one is cut between two queries."""
    work = [_pairs_of_rows(piece, window) for piece in pieces]
    total, before = sum(int(pairs.sum()) for pairs in work), 0
    for index, (piece, pairs) in enumerate(zip(pieces, work, strict=True)):
        mine = int(pairs.sum())
        if before + mine >= total / 2:
            if mine <= total / 8 or len(pairs) == 1:  # small: not worth another call
                return pieces[: index + 1], pieces[index + 1 :]
            row = 1 + int(np.searchsorted(np.cumsum(pairs), total / 2 - before))
            upper, lower = cut(piece, min(row, len(pairs) - 1))
            return (*pieces[:index], *upper), (*lower, *pieces[index + 1 :])
        before += mine
    return pieces, ()


def _pairs_of_rows(piece: Piece, window: int | None) -> np.ndarray:
    """Return the number of keys that each query of a piece sees."""
    rows, keys = np.arange(piece.q_stop - piece.q_start), piece.k_stop - piece.k_start
    if piece.kind == "full":
        return np.full(len(rows), keys)
    if piece.kind == "diagonal":
        return rows + 1
    last = rows + piece.offset
    assert window is not None, f"{piece} is a band, and the stage has no window"
    return np.minimum(keys, last + 1) - np.maximum(0, last - window + 1)


def cut(piece: Piece, row: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Cut a piece before its query ``row``, counted from its first."""
    sequence, at, k = piece.sequence, piece.q_start + row, piece.k_start
    if piece.kind != "diagonal":
        stop = min(piece.k_stop, k + row + piece.offset) if piece.kind == "band" else piece.k_stop  # keys that a query before sees
        upper: Piece = Part(sequence, piece.q_start, at, k, stop, piece.kind, piece.offset)
        return (upper,), (Part(sequence, at, piece.q_stop, k, piece.k_stop, piece.kind, piece.offset + row),)
    upper = Part(sequence, piece.q_start, at, k, k + row, "diagonal")
    below = Part(sequence, at, piece.q_stop, k, k + row, "full")
    return (upper,), (below, Part(sequence, at, piece.q_stop, k + row, piece.k_stop, "diagonal"))
