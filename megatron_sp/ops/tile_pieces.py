"""Kernels that compute attention in pieces tile by tile: torch's on the CPU, and the plain reference in any dtype on any device.

A band (a sliding window that cuts through a piece) is cut into tiles of queries with the keys that they reach, so that no
mask is as large as a long piece; anything else is one tile. Tiles of one shape, whose calls would cost more than their
work, are copied side by side. No tile has a query without keys: torch's CPU kernel gives such a row lse = 0, which would
win over real rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.dropout import keep_mask
from megatron_sp.ops.memory import blocks, to_device
from megatron_sp.ops.pieces import BackwardInputs, Kind, PartialPart, Piece, Rows, Run, Stage, wide_dtype
from megatron_sp.utils.numbers import window_tile

_BATCHED_BYTES = 1 << 15  # of a tile's queries: above this size a separate call costs less than the copies
_FILL = 0.75  # the shortest diagonal of a batch, of the longest
_SHORT = 8  # up to here all lengths share a batch: it is calls that cost


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
            spans = [(tile.sequence, tile.start, tile.start + tile.queries) for tile in call.tiles]
            so_far.add(spans, queries, *self.attend(block), is_last=call.columns.stop == q.x.shape[1])

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
