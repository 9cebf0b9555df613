"""Attention in pieces on a GPU: torch's flash kernel with the lengths of queries and keys apart, one call for each kind of piece.

Pieces of one kind are sequences of a packed batch to the kernel, whatever their number: those of a stage's own rank are a
call for the diagonals and one for the full pieces, those of another rank one call; bands are called together if their
windows lie alike. Queries and keys go in as they are where the pieces lie one after another; else their rows are gathered.
All sequences of a micro-batch that are alike are heads side by side, and grouped queries share their key inside the kernel.

The kernel aligns its masks at a piece's last query and last key. Query a of n sees key b of m if

    -left <= b - (a + m - n) <= right,    a band, 0 <= a + offset - b < window, with right = offset - m + n and left = window - 1 - right

No sequence has no keys: the kernel would give such rows lse = inf (Dao-AILab/flash-attention #978).

Sources: torch/nn/attention/varlen.py for the arguments; flash_attn_interface.py :: flash_attn_varlen_func for the alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.pieces import BackwardInputs, PartialPart, Piece, Rows, Stage


class _Call(NamedTuple):
    """Pieces of one call of the kernel, by their queries; its windows (-1: no limit)."""

    pieces: tuple[Piece, ...]
    causal: bool
    left: int
    right: int


class TorchFlash:
    """torch's flash kernel for packed sequences."""

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        """See ``pieces.PieceKernel``."""
        heads = q.x.shape[1:3]
        for call in calls_of(stage.pieces, stage.window):
            queries, keys = _where(call, q, keys=False), _where(call, kv, keys=True)
            of_keys = _taken(kv.x, keys)
            out, lse = _forward(_taken(q.x, queries).flatten(1, 2), of_keys[:, :, 0], of_keys[:, :, 1], *_lengths(call, q.x.device), call)
            so_far.add_rows(call.pieces, queries, out.unflatten(1, heads), lse.t().unflatten(1, heads))

    def backward(self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None) -> None:
        """See ``pieces.PieceKernel``."""
        heads = inputs.q.x.shape[1:3]
        for call in calls_of(stage.pieces, stage.window):
            queries, keys = _where(call, inputs.q, keys=False), _where(call, kv, keys=True)
            q, out, d_out = (_taken(rows.x, queries).flatten(1, 2) for rows in (inputs.q, inputs.out, inputs.d_out))
            lse = _taken(inputs.lse.x, queries).flatten(1).t().contiguous()
            of_keys = _taken(kv.x, keys)
            of_q, *of_kv = _backward(d_out, q, of_keys[:, :, 0], of_keys[:, :, 1], out, lse, *_lengths(call, q.device), call)
            _add(d_q.x, queries, of_q.unflatten(1, heads))
            for place, gradient in enumerate(of_kv):
                into = d_kv.x[:, :, place]
                for some, rows in _apart(call, kv):
                    _add(into, rows, _taken(gradient, some))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, call: _Call
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the kernel on q [rows, heads, d], k and v [rows, groups, d]; return out and lse [heads, rows]."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, max_q, max_k, 0.0, call.causal, False, window_size_left=call.left, window_size_right=call.right
    )
    return found[0], found[1]


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    call: _Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Call the kernel's backward, with the lse [heads, rows] and out over all keys; return the gradients of q, k and v."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, 0.0, call.causal, *no_dropout, window_size_left=call.left,
        window_size_right=call.right,
    )  # fmt: skip
    return found


@lru_cache(maxsize=256)
def calls_of(pieces: tuple[Piece, ...], window: int | None) -> tuple[_Call, ...]:
    """Return the kernel calls of a stage: pieces of one kind together, unless they share queries."""
    groups: dict[tuple[bool, int, int], list[list[Piece]]] = {}
    for piece in sorted(pieces, key=lambda p: (p.sequence, p.q_start)):
        left = right = -1
        if piece.kind == "band":
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            right = piece.offset - keys + queries
            left = -1 if window is None else window - 1 - right
            assert right >= 0 and left >= -1, f"{piece} has keys that no query sees, or queries without keys"
            if piece.offset >= keys - 1:  # all keys are before all queries
                right = -1
        several = groups.setdefault((piece.kind == "diagonal", left, right), [[]])
        last = several[-1][-1] if several[-1] else None
        if last is not None and last.sequence == piece.sequence and piece.q_start < last.q_stop:
            several.append([])
        several[-1].append(piece)
    return tuple(_Call(tuple(some), *mask) for mask, several in groups.items() for some in several)


def _runs(pieces: Sequence[Piece], rows: Rows, keys: bool) -> list[tuple[int, int]]:
    """Return (first row in the tensor, number of rows) of the queries or keys of each piece."""
    runs = ((p.sequence, p.k_start, p.k_stop) if keys else (p.sequence, p.q_start, p.q_stop) for p in pieces)
    return [(rows.starts[sequence] + start * rows.stride, stop - start) for sequence, start, stop in runs]


def _where(call: _Call, rows: Rows, keys: bool) -> slice | Tensor:
    """Return where a call's queries or keys are: a slice if they lie one after another, else an index."""
    return _place(tuple(_runs(call.pieces, rows, keys)), rows.stride, rows.x.device)


@lru_cache(maxsize=256)
def _place(runs: tuple[tuple[int, int], ...], stride: int, device: torch.device) -> slice | Tensor:
    if stride == 1 and all(start + count == following for (start, count), (following, _) in pairwise(runs)):
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])
    return _to(torch.cat([torch.arange(start, start + count * stride, stride) for start, count in runs]), device)


def _apart(call: _Call, kv: Rows) -> tuple[tuple[slice | Tensor, slice | Tensor], ...]:
    """Return pairs (rows of the call's keys, rows of the tensor), in each of which no row of the tensor is twice."""
    return _rounds(tuple(_runs(call.pieces, kv, keys=True)), kv.stride, kv.x.device)


@lru_cache(maxsize=256)
def _rounds(runs: tuple[tuple[int, int], ...], stride: int, device: torch.device) -> tuple[tuple[slice | Tensor, slice | Tensor], ...]:
    rounds: list[list[int]] = []
    for index in sorted(range(len(runs)), key=lambda i: (runs[i][0] % stride, runs[i])):
        start = runs[index][0]
        for members in rounds:
            last, count = runs[members[-1]]
            if last % stride != start % stride or last + count * stride <= start:  # of another sequence, or behind it
                members.append(index)
                break
        else:
            rounds.append([index])
    firsts = [0, *accumulate(count for _, count in runs)]
    found = []
    for members in rounds:
        mine = tuple((firsts[i], runs[i][1]) for i in sorted(members))
        found.append((_place(mine, 1, device), _place(tuple(runs[i] for i in sorted(members)), stride, device)))
    return tuple(found)


def _taken(x: Tensor, where: slice | Tensor) -> Tensor:
    return x[where] if isinstance(where, slice) else x.index_select(0, where)


def _add(into: Tensor, where: slice | Tensor, x: Tensor) -> None:
    """Add rows, none of which is twice in ``where``: on a GPU, too, the sum is the same every time."""
    if isinstance(where, slice):
        into[where].add_(x)
    else:
        into.index_add_(0, where, x.to(into.dtype))


@lru_cache(maxsize=256)
def _lengths(call: _Call, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return the cumulative lengths of queries and keys, int32 [n + 1], and the longest of each."""
    queries, keys = [p.q_stop - p.q_start for p in call.pieces], [p.k_stop - p.k_start for p in call.pieces]
    of_q, of_k = (_to(torch.tensor([0, *accumulate(n)], dtype=torch.int32), device) for n in (queries, keys))
    return of_q, of_k, max(queries), max(keys)


def _to(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
