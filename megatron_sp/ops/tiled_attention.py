"""Kernels that compute attention in pieces tile by tile: torch's on the CPU, and the plain reference on any device.

``CPUFlash`` and ``Reference`` continue a softmax over the keys of several ranks; ``TiledAttention`` is for all keys at
once. A band is cut into tiles of queries with the keys that they reach, so that no mask is as large as a long piece;
anything else is one tile. Small tiles of one shape are copied side by side.
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
from megatron_sp.ops.attention_kernels import Gradients, Tensors, cpu_flash, cpu_flash_backward, empty_gradients
from megatron_sp.ops.attention_pieces import Run, Stage, Tile, Tiles, batches_of, tiles_of
from megatron_sp.ops.dropout import keep_mask
from megatron_sp.ops.partial_attention import BackwardInputs, PartialPart, Rows, merge_, wide_dtype, zero_outside
from megatron_sp.utils.numbers import round_up, window_tile

_BATCHED_BYTES = 1 << 15  # of a tile's queries: above this size a separate call costs less than the copies


@dataclass(frozen=True, eq=False)
class _Call:
    tiles: Tiles  # of one kernel call, longest first
    columns: slice  # of m; all, if there are several tiles
    # row numbers [n, longest] of the tiles in a tensor, and which are not behind the end of their tile (None: all): on
    # the host and no tensors, for they outlive what they were made under (``torch.device``, fake tensors)
    known: dict[Hashable, tuple[np.ndarray, np.ndarray | None]] = field(default_factory=dict, repr=False)


def _calls(stage: Stage, q: Tensor, v_width: int, bands: bool) -> tuple[_Call, ...]:
    # kernel calls whose results take about 1 MiB each (``ops/allocator.py :: blocks``); a large tile has its own.
    # Diagonals of about the same length are padded to the longest: causal attention never sees later positions, and
    # their gradient is zero. No tile has a query without keys: torch's CPU kernel gives such a row lse = 0, which would
    # win over real rows
    each, row = q.shape[1], q.shape[2] * max(q.shape[3], v_width) * q.element_size()

    def make() -> Iterator[_Call]:
        for batch in stage.once(("batches", bands), lambda: batches_of(tiles_of(stage.pieces, stage.window), bands)):
            of_one = batch[0].queries * each * row
            if of_one <= _BATCHED_BYTES:
                yield from (_Call(batch[some], slice(0, each)) for some in blocks(len(batch), of_one, q.device))
                continue
            rows = max(batch[0].queries, batch[0].keys)  # results of backward are as long as the keys
            yield from (_Call((tile,), columns) for tile in batch for columns in blocks(each, rows * row, q.device))

    name = "calls", bands, each, row, q.device, torch.get_num_threads()
    calls: tuple[_Call, ...] = stage.once(name, lambda: tuple(make()))
    return calls


class _Places:
    # where the rows of a kernel call are, those of its queries or of its keys: ``alone`` if it has one tile, else
    # gathered and scattered
    def __init__(self, call: _Call, rows: Rows, keys: bool) -> None:
        self.alone: tuple[slice, slice] | None = None
        spans = [(t.sequence, t.first_key, t.keys) if keys else (t.sequence, t.start, t.queries) for t in call.tiles]
        if len(spans) == 1:
            self.alone = rows.slice(*spans[0]), call.columns
            return
        name = keys, rows.starts, rows.stride
        if name not in call.known:
            firsts = np.array([rows.starts[sequence] + start * rows.stride for sequence, start, _ in spans])[:, None]
            lengths = np.array([count for _, _, count in spans])[:, None]
            steps = np.arange(lengths.max())
            numbers = firsts + np.minimum(steps, lengths - 1) * rows.stride  # behind its end the last row is repeated
            valid = steps < lengths
            call.known[name] = numbers, None if valid.all() else valid
        index, real = call.known[name]
        device, self.shape = rows.x.device, index.shape
        self.index = to_device(torch.tensor(index.ravel()), device)
        self.valid = self.real = None
        if real is not None:
            self.valid = to_device(torch.tensor(real.ravel()), device)
            self.real = to_device(torch.tensor(np.flatnonzero(real)), device)

    def take(self, x: Tensor, zero_behind: bool = False) -> Tensor:
        # [rows, m, r, d] -> [n * m, r, longest, d]; a view for one tile
        if self.alone is not None:
            return x[self.alone].permute(1, 2, 0, 3)
        taken = x.index_select(0, self.index)
        if zero_behind and self.valid is not None:
            taken.mul_(self.valid[:, None, None, None])
        return taken.unflatten(0, self.shape).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def put(self, into: Tensor, x: Tensor, add: bool = False) -> None:
        # write or add rows [n * m, r, longest, d]; no row of a call is twice in ``into``, but for keys of bands
        if self.alone is not None:
            rows = x.permute(2, 0, 1, 3)
            into[self.alone].add_(rows) if add else into[self.alone].copy_(rows)
            return
        x = (
            x.to(into.dtype).unflatten(0, (self.shape[0], -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        )  # [n * longest, ...]
        index = self.index
        if self.real is not None:
            index, x = index[self.real], x.index_select(0, self.real)
        into.index_add_(0, index, x) if add else into.index_copy_(0, index, x)


class _Block(NamedTuple):
    q: Tensor  # operands of a kernel call, [n, r, rows, d]
    k: Tensor  # [n, 1, keys, d]
    v: Tensor  # [n, 1, keys, d_v]
    tile: Tile  # the mask's kind and shape
    window: int
    keep: Tensor | None  # what dropout keeps


_CallParts = tuple[_Call, _Places, _Places, _Block]


class _TileKernel:
    # a ``PieceKernel`` that computes tiles, whatever computes one of them

    dropout = 0.0

    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        # out [n, r, rows, d_v] and lse [n, r, rows]
        raise NotImplementedError

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> Tensors:
        # the gradients of q, and of k and v for each query or summed over r
        raise NotImplementedError

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        for call, queries, _, block in self.calls(stage, q, *kv.split(q.x.shape[-1]), row_keys):
            spans = [(tile.sequence, tile.start, tile.start + tile.queries) for tile in call.tiles]
            out, lse = self.attend(block)
            first = so_far.is_first(spans)
            if queries.alone is not None:
                so_far.add(queries.alone, out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), first)
            else:
                if not first:
                    merged = queries.take(so_far.out.x), queries.take(so_far.lse.x)[..., 0]
                    merge_(*merged, out, lse)
                    out, lse = merged
                queries.put(so_far.out.x, out)
                queries.put(so_far.lse.x, lse[..., None])
            if call.columns.stop == q.x.shape[1]:  # no other call has other heads of these queries
                so_far.mark(spans)

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        q, out, lse, d_out = inputs
        into_k, into_v = d_kv.split(q.x.shape[-1])
        for _, queries, keys, block in self.calls(stage, q, *kv.split(q.x.shape[-1]), row_keys):
            final = queries.take(out.x), queries.take(lse.x)[..., 0].contiguous()  # the kernel wants its lse so
            of_q, of_k, of_v = self.attend_backward(block, *final, queries.take(d_out.x, zero_behind=True))
            queries.put(d_q.x, of_q, add=True)
            keys.put(into_k.x, _summed_queries(of_k), add=True)
            keys.put(into_v.x, _summed_queries(of_v), add=True)

    def calls(
        self, stage: Stage, q: Rows, k: Rows, v: Rows, row_keys: Rows | None, *, bands: bool = True
    ) -> Iterator[_CallParts]:
        # each kernel call, the places of its queries and keys, its operands; ``bands``: of ``batches_of``
        for call in _calls(stage, q.x, v.x.shape[-1], bands):
            queries, keys, keep = _Places(call, q, keys=False), _Places(call, k, keys=True), None
            if self.dropout > 0:
                if row_keys is None:
                    message = "attention dropout needs the tokens' dropout keys: pass DropoutKeys with the batch"
                    raise RuntimeError(message)
                keep = _keep(stage, call, queries.take(row_keys.x)[..., 0], self.dropout)
            operands = queries.take(q.x), keys.take(k.x), keys.take(v.x)
            yield call, queries, keys, _Block(*operands, call.tiles[0], stage.window or 0, keep)


def _summed_queries(x: Tensor) -> Tensor:
    # gradients [n, r, keys, d] over the r queries that one key and value served
    return x if x.shape[1] == 1 else x.sum(1, keepdim=True, dtype=wide_dtype(x.dtype))


class CPUFlash(_TileKernel):
    def attend(self, block: _Block) -> tuple[Tensor, Tensor]:
        return cpu_flash(*self._arguments(block))

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> Tensors:
        q, k, v, causal, mask = self._arguments(block)
        return cpu_flash_backward(d_out, q, k, v, out, lse, causal, mask)

    def _arguments(self, block: _Block) -> tuple[Tensor, Tensor, Tensor, bool, Tensor | None]:
        tile, r = block.tile, block.q.shape[1]
        mask = band_mask(tile, block.window, block.q.dtype, block.q.device) if tile.kind == "band" else None
        operands = block.q, block.k.expand(-1, r, -1, -1), block.v.expand(-1, r, -1, -1)
        return *operands, tile.kind == "diagonal", mask


@dataclass(frozen=True)
class TiledAttention:
    """Attention over all keys of a mask by torch's CPU kernel, an ``LseKernel``; its lse are those of the calls.

    Every query is in one piece, so nothing is merged: results go straight to their places in the dtype of q, zero for
    queries outside all pieces.
    """

    stage: Stage  # pieces that share no query; only the tiles of a band share keys
    sequences: int  # with pieces of their own; 1 if all are alike
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
            d_block = queries.take(d_out, zero_behind=True)
            d_q, d_k, d_v = self.kernel.attend_backward(block, queries.take(final), sums, d_block)
            queries.put(of_q, d_q)
            keys.put(of_k, _summed_queries(d_k), add=overlap)
            keys.put(of_v, _summed_queries(d_v), add=overlap)
        return grads

    def _calls(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_CallParts]:
        return self.kernel.calls(self.stage, self._rows(q), self._rows(k), self._rows(v), None, bands=False)

    def _rows(self, x: Tensor) -> Rows:
        return Rows.interleaved(x, self.sequences)


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

    def attend_backward(self, block: _Block, out: Tensor, lse: Tensor, d_out: Tensor) -> Tensors:
        wide = lse.dtype
        q, k, v, out, d_out = (x.to(wide) for x in (block.q, block.k, block.v, out, d_out))
        probs = torch.exp(self._scores(block) - lse[..., None])
        d_v = torch.matmul(self._dropped(probs, block).transpose(-1, -2), d_out)
        d_probs = self._dropped(torch.matmul(d_out, v.transpose(-1, -2)), block)
        d_scores = probs * (d_probs - (d_out * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return torch.matmul(d_scores, k), torch.matmul(d_scores.transpose(-1, -2), q), d_v

    def _scores(self, block: _Block) -> Tensor:
        q, tile = block.q, block.tile
        scores = torch.matmul(q, block.k.transpose(-1, -2)).to(wide_dtype(q.dtype)) / math.sqrt(q.shape[-1])
        if tile.kind == "band":
            scores = scores + band_mask(tile, block.window, scores.dtype, scores.device)
        elif tile.kind == "diagonal":
            rows = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(rows > rows[:, None], -torch.inf)
        return scores

    def _dropped(self, probs: Tensor, block: _Block) -> Tensor:
        return probs if block.keep is None else probs * block.keep * (1.0 / (1.0 - self.dropout))


def band_mask(tile: Tile, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # additive, [queries, keys], of a tile of a band: 0 where a query sees a key, else -inf
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
    longest, kept = max(tile.keys for tile in call.tiles), []
    for tile, keys in zip(call.tiles, row_keys.unflatten(0, (len(call.tiles), -1)), strict=True):
        channels, row = list[Run](), 0
        for start, stop in stage.key_runs[tile.sequence]:
            first, last = max(tile.first_key, row), min(tile.first_key + tile.keys, row + stop - start)
            if first < last:
                channels.append((start + first - row, start + last - row))
            row += stop - start
        if stage.documents is not None:
            ends = (0, *stage.documents[tile.sequence])
            begin = ends[bisect_right(ends, channels[0][0]) - 1]
            channels = [(start - begin, stop - begin) for start, stop in channels]
        start, stop = channels[-1]
        channels[-1] = start, stop + longest - tile.keys  # what is behind a tile's end counts for nothing
        kept.append(torch.cat([keep_mask(keys, stop - start, rate, start) for start, stop in channels], dim=-1))
    return torch.cat(kept)
