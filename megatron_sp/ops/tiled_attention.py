"""Kernels that compute attention in pieces tile by tile: torch's on the CPU, and the plain reference on any device.

``CPUFlash`` and ``Reference`` continue a softmax over the keys of several ranks; ``TiledAttention`` is for all keys at
once. A band is cut into tiles of queries with the keys that they reach, so that no mask is as large as a long piece;
anything else is one tile. Small tiles of one shape are copied side by side, diagonals of about the same length padded
to the longest: causal attention never sees later positions, and their gradient is zero. No tile has a query without
keys: torch's CPU kernel gives such a row lse = 0, which would win over real rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_sp.ops.allocator import blocks, empty, to_device
from megatron_sp.ops.attention_kernels import Gradients, cpu_flash, cpu_flash_backward, empty_gradients
from megatron_sp.ops.attention_pieces import Run, Stage, Tile, Tiles, batches_of, tiles_of
from megatron_sp.ops.dropout import keep_mask
from megatron_sp.ops.partial_attention import BackwardInputs, PartialPart, Rows, wide_dtype, zero_outside
from megatron_sp.utils.numbers import round_up, window_tile

_BATCHED_BYTES = 1 << 15  # of a tile's queries: above this size a separate call costs less than the copies


@dataclass(frozen=True, eq=False)
class _Call:
    tiles: Tiles  # longest first
    columns: slice  # of m; all, if there are several tiles
    _known: dict[Hashable, _RowNumbers] = field(default_factory=dict, repr=False)

    def row_numbers(self, rows: Rows, keys: bool) -> _RowNumbers:
        name = keys, rows.starts, rows.stride
        if name not in self._known:
            places = [
                (t.sequence, t.first_key, t.keys) if keys else (t.sequence, t.start, t.queries) for t in self.tiles
            ]
            first, length = (
                np.array(x)[:, None]
                for x in zip(*((rows.starts[q] + i * rows.stride, n) for q, i, n in places), strict=True)
            )
            at = np.arange(length.max())
            index = first + np.minimum(at, length - 1) * rows.stride  # behind its end a tile's last row is repeated
            valid = at < length
            self._known[name] = _RowNumbers(index, None if valid.all() else valid)
        return self._known[name]


class _RowNumbers(NamedTuple):
    rows: np.ndarray
    valid: np.ndarray | None


def _calls(stage: Stage, q: Tensor, v_width: int, bands: bool) -> tuple[_Call, ...]:
    # kernel calls whose results take about 1 MiB each (``ops/allocator.py :: blocks``); a large tile has its own
    each, row = q.shape[1], q.shape[2] * max(q.shape[3], v_width) * q.element_size()

    def make() -> Iterator[_Call]:
        for batch in stage.once(("batches", bands), lambda: batches_of(tiles_of(stage.pieces, stage.window), bands)):
            of_one = batch[0].queries * each * row
            if of_one <= _BATCHED_BYTES:
                yield from (_Call(batch[some], slice(0, each)) for some in blocks(len(batch), of_one, q.device))
                continue
            rows = max(batch[0].queries, batch[0].keys)  # results of backward are as long as the keys
            yield from (_Call((tile,), columns) for tile in batch for columns in blocks(each, rows * row, q.device))

    found: tuple[_Call, ...] = stage.once(
        ("calls", bands, each, row, q.device, torch.get_num_threads()), lambda: tuple(make())
    )
    return found


class _At:
    def __init__(self, call: _Call, rows: Rows, keys: bool) -> None:
        self.alone: tuple[slice, slice] | None = None
        if len(call.tiles) == 1:
            tile = call.tiles[0]
            place = (tile.first_key, tile.keys) if keys else (tile.start, tile.queries)
            self.alone = rows.slice(tile.sequence, *place), call.columns
            return
        index, valid = call.row_numbers(rows, keys)
        device, self.shape = rows.x.device, index.shape
        self.index = to_device(torch.tensor(index.ravel()), device)
        self.valid = self.real = None
        if valid is not None:
            self.valid = to_device(torch.tensor(valid.ravel()), device)
            self.real = to_device(torch.tensor(np.flatnonzero(valid)), device)

    def take(self, x: Tensor, zero_behind: bool = False) -> Tensor:
        if self.alone is not None:
            return x[self.alone].permute(1, 2, 0, 3)
        taken = x.index_select(0, self.index)
        if zero_behind and self.valid is not None:
            taken.mul_(self.valid[:, None, None, None])
        return taken.unflatten(0, self.shape).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def put(self, into: Tensor, x: Tensor) -> None:
        if self.alone is not None:
            into[self.alone].copy_(x.permute(2, 0, 1, 3))
        else:
            into.index_copy_(0, *self._flat(x.to(into.dtype)))

    def add(self, into: Tensor, x: Tensor) -> None:
        if self.alone is not None:
            into[self.alone].add_(x.permute(2, 0, 1, 3))
        else:
            into.index_add_(0, *self._flat(x.to(into.dtype)))

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.unflatten(0, (self.shape[0], -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [n * longest, m, r, d]
        return (self.index, x) if self.real is None else (self.index[self.real], x.index_select(0, self.real))


# kernels


class _Block(NamedTuple):
    q: Tensor  # [n, r, rows, d]
    k: Tensor  # [n, 1, keys, d]
    v: Tensor  # [n, 1, keys, d_v]
    tile: Tile  # the mask's kind and shape
    window: int
    keep: Tensor | None  # what dropout keeps


class _TileKernel:
    dropout = 0.0

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Return out [n, r, rows, d_v] and lse [n, r, rows]."""
        raise NotImplementedError

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, and of k and v for each query or summed over r."""
        raise NotImplementedError

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        for call, queries, _, block in self.calls(stage, q, *kv.split(q.width), row_keys):
            spans = [(tile.sequence, tile.start, tile.start + tile.queries) for tile in call.tiles]
            so_far.add(spans, queries, *self.attend(block), is_last=call.columns.stop == q.x.shape[1])

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        q, out, lse, d_out = inputs
        into_k, into_v = d_kv.split(q.width)
        for _, queries, keys, block in self.calls(stage, q, *kv.split(q.width), row_keys):
            # the kernel wants its lse contiguous
            final = (
                queries.take(out.x),
                queries.take(lse.x)[..., 0].contiguous(),
                queries.take(d_out.x, zero_behind=True),
            )
            of_q, of_k, of_v = self.attend_backward(block, *final)
            queries.add(d_q.x, of_q)
            keys.add(into_k.x, summed_queries(of_k))
            keys.add(into_v.x, summed_queries(of_v))

    def calls(
        self, stage: Stage, q: Rows, k: Rows, v: Rows, row_keys: Rows | None, *, bands: bool = True
    ) -> Iterator[tuple[_Call, _At, _At, _Block]]:
        for call in _calls(stage, q.x, v.width, bands):
            queries, keys, keep = _At(call, q, keys=False), _At(call, k, keys=True), None
            if self.dropout > 0:
                if row_keys is None:
                    raise RuntimeError(
                        "attention dropout needs the tokens' dropout keys: pass DropoutKeys with the batch"
                    )
                keep = _keep(stage, call, queries.take(row_keys.x)[..., 0], self.dropout)
            operands = queries.take(q.x), keys.take(k.x), keys.take(v.x)
            yield call, queries, keys, _Block(*operands, call.tiles[0], stage.window or 0, keep)


def summed_queries(x: Tensor) -> Tensor:
    """Sum gradients [n, r, keys, d] over the r queries that one key and value served."""
    return x if x.shape[1] == 1 else x.sum(1, keepdim=True, dtype=wide_dtype(x.dtype))


class CPUFlash(_TileKernel):
    """torch's fused CPU kernel."""

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        return cpu_flash(*self._operands(block), *_causal_and_mask(block))

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cpu_flash_backward(d_out, *self._operands(block), out, lse, *_causal_and_mask(block))

    def _operands(self, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        r = block.q.shape[1]
        return block.q, block.k.expand(-1, r, -1, -1), block.v.expand(-1, r, -1, -1)


@dataclass(frozen=True)
class TiledAttention:
    """Attention over all keys of a mask by torch's CPU kernel, an ``LseKernel``; its lse are those of the calls.

    Every query is in one piece, so nothing is merged: results go straight to their places in the dtype of q, zero for
    queries outside all pieces.
    """

    stage: Stage
    sequences: int
    kernel = CPUFlash()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, sums = empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device), list[Tensor]()
        zero_outside(out, self.stage.pieces, q.shape[1] // self.sequences, keys=False)
        into = self._rows(out).x
        for _, queries, _, block in self._calls(q, k, v):
            of_rows, lse = self.kernel.attend(block)
            queries.put(into, of_rows)
            sums.append(lse)
        return out, *sums

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        grads = empty_gradients(q, k, v)
        overlap = self.stage.window is not None  # the tiles of a band share keys, whose gradients are added
        for x, of_keys in zip(grads, (False, True, True), strict=True):
            if of_keys and overlap:
                x.zero_()
            else:
                zero_outside(x, self.stage.pieces, q.shape[1] // self.sequences, of_keys)
        of_q, of_k, of_v = (self._rows(x).x for x in grads)
        d_out, final = self._rows(grad).x, self._rows(out).x
        for (_, queries, keys, block), sums in zip(self._calls(q, k, v), lse, strict=True):
            found = self.kernel.attend_backward(block, queries.take(final), sums, queries.take(d_out, zero_behind=True))
            queries.put(of_q, found[0])
            put = keys.add if overlap else keys.put
            put(of_k, summed_queries(found[1]))
            put(of_v, summed_queries(found[2]))
        return grads

    def _calls(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[_Call, _At, _At, _Block]]:
        return self.kernel.calls(self.stage, self._rows(q), self._rows(k), self._rows(v), None, bands=False)

    def _rows(self, x: Tensor) -> Rows:
        return Rows.interleaved(x, self.sequences)


def _causal_and_mask(block: _Block) -> tuple[bool, Tensor | None]:
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
        scores = torch.matmul(block.q, block.k.transpose(-1, -2)).to(wide_dtype(block.q.dtype)) / math.sqrt(
            block.q.shape[-1]
        )
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
    """Return the additive mask [queries, keys] of a tile of a band: 0 where a query sees a key, else -inf."""
    first = window - 1 - tile.offset
    return _whole_band(window, dtype, device)[: tile.queries, first : first + tile.keys]


@lru_cache(maxsize=4)
def _whole_band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # of a tile with all keys that it reaches, from ``window`` - 1 before its first query on; others are parts of it. On
    # a GPU its rows are a multiple of 16 elements apart: SDPA then takes it as it is, and saves no padded copy of each
    rows = window_tile(window)
    keys = window - 1 + rows
    distance = torch.arange(rows, device=device)[:, None] + window - 1 - torch.arange(keys, device=device)
    hidden = (distance < 0) | (distance >= window)
    apart = keys if device.type == "cpu" else round_up(keys, 16)
    return torch.zeros(rows, apart, dtype=dtype, device=device)[:, :keys].masked_fill_(hidden, -torch.inf)


def _keep(stage: Stage, call: _Call, row_keys: Tensor, rate: float) -> Tensor:
    # which probabilities of a call dropout keeps, bool [n * m, r, rows, keys], by the rows' keys, int32 [n * m, r,
    # rows]; a key's channel is its position in its document, as in one process
    longest, found = max(tile.keys for tile in call.tiles), []
    for tile, keys in zip(call.tiles, row_keys.unflatten(0, (len(call.tiles), -1)), strict=True):
        runs = _channels(stage, tile)
        count = runs[-1][1] - runs[-1][0]
        runs[-1] = (
            runs[-1][0],
            runs[-1][0] + count + longest - tile.keys,
        )  # what is behind a tile's end counts for nothing
        found.append(torch.cat([keep_mask(keys, stop - start, rate, start) for start, stop in runs], dim=-1))
    return torch.cat(found)


def _channels(stage: Stage, tile: Tile) -> list[Run]:
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
