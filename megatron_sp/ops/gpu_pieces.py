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

from collections.abc import Hashable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.memory import to_device
from megatron_sp.ops.pieces import BackwardInputs, PartialPart, Piece, Rows, Run, Stage


class _Mask(NamedTuple):
    """Mask of a call: causal, or keys before and behind a query's own that it sees (-1: all)."""

    causal: bool
    left: int
    right: int


class _Call:
    """Pieces of one call of the kernel, by their queries; keeps lengths and indices on the device for all layers.

    Args:
        pieces: share no query.
        mask: of all of them.
    """

    def __init__(self, pieces: tuple[Piece, ...], mask: _Mask) -> None:
        self.pieces, self.mask = pieces, mask
        self._known: dict[Hashable, Any] = {}

    def where(self, rows: Rows, keys: bool) -> slice | Tensor:
        """Return where the queries or keys are: a slice if they lie one after another, else an index."""
        name = "where", keys, rows.starts, rows.stride, rows.x.device
        if name not in self._known:
            self._known[name] = _place(self._runs(rows, keys), rows.stride, rows.x.device)
        return self._known[name]

    def apart(self, kv: Rows) -> list[tuple[slice | Tensor, slice | Tensor]]:
        """Return pairs (rows of the call's keys, rows of the tensor), in each of which no row of the tensor is twice."""
        name = "apart", kv.starts, kv.stride, kv.x.device
        if name not in self._known:
            self._known[name] = _rounds(self._runs(kv, keys=True), kv.stride, kv.x.device)
        return self._known[name]

    def lengths(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Return the cumulative lengths of queries and keys, int32 [n + 1], and the longest of each."""
        if device not in self._known:
            queries, keys = [p.q_stop - p.q_start for p in self.pieces], [p.k_stop - p.k_start for p in self.pieces]
            of_q, of_k = (to_device(torch.tensor([0, *accumulate(n)], dtype=torch.int32), device) for n in (queries, keys))
            self._known[device] = of_q, of_k, max(queries), max(keys)
        return self._known[device]

    def _runs(self, rows: Rows, keys: bool) -> list[Run]:
        """Return (first row in the tensor, number of rows) of the queries or keys of each piece."""
        runs = ((p.sequence, p.k_start, p.k_stop) if keys else (p.sequence, p.q_start, p.q_stop) for p in self.pieces)
        return [(rows.starts[sequence] + start * rows.stride, stop - start) for sequence, start, stop in runs]


class TorchFlash:
    """torch's flash kernel for packed sequences."""

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        """See ``pieces.PieceKernel``."""
        heads = q.x.shape[1:3]
        for call in _calls(stage):
            queries, keys = call.where(q, keys=False), call.where(kv, keys=True)
            of_keys = _taken(kv.x, keys)
            out, lse = _forward(
                _taken(q.x, queries).flatten(1, 2), of_keys[:, :, 0], of_keys[:, :, 1], *call.lengths(q.x.device), call.mask
            )
            so_far.add_rows(call.pieces, queries, out.unflatten(1, heads), lse.t().unflatten(1, heads))

    def backward(self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None) -> None:
        """See ``pieces.PieceKernel``."""
        heads = inputs.q.x.shape[1:3]
        for call in _calls(stage):
            queries, keys = call.where(inputs.q, keys=False), call.where(kv, keys=True)
            q, out, d_out = (_taken(rows.x, queries).flatten(1, 2) for rows in (inputs.q, inputs.out, inputs.d_out))
            lse = _taken(inputs.lse.x, queries).flatten(1).t().contiguous()
            of_keys = _taken(kv.x, keys)
            of_q, *of_kv = _backward(d_out, q, of_keys[:, :, 0], of_keys[:, :, 1], out, lse, *call.lengths(q.device), call.mask)
            _add(d_q.x, queries, of_q.unflatten(1, heads))
            for place, gradient in enumerate(of_kv):
                for some, rows in call.apart(kv):
                    _add(d_kv.x[:, :, place], rows, _taken(gradient, some))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, mask: _Mask
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the kernel on q [rows, heads, d], k and v [rows, groups, d]; return out and lse [heads, rows]."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, max_q, max_k, 0.0, mask.causal, False, window_size_left=mask.left, window_size_right=mask.right
    )
    return found[0], found[1]


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    mask: _Mask,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Call the kernel's backward, with the lse [heads, rows] and out over all keys; return the gradients of q, k and v."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, 0.0, mask.causal, *no_dropout, window_size_left=mask.left,
        window_size_right=mask.right,
    )  # fmt: skip
    return found


def _calls(stage: Stage) -> tuple[_Call, ...]:
    found: tuple[_Call, ...] = stage.once("calls", lambda: calls_of(stage.pieces, stage.window))
    return found


def calls_of(pieces: tuple[Piece, ...], window: int | None) -> tuple[_Call, ...]:
    """Return the kernel calls of a stage: pieces of one kind together, unless they share queries."""
    groups: dict[tuple[bool, int, int], list[list[Piece]]] = {}
    for piece in sorted(pieces, key=lambda p: (p.sequence, p.q_start)):
        left = right = -1
        if piece.kind == "band":
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            right = piece.offset - keys + queries
            assert window is not None, f"{piece} is a band, and the stage has no window"
            left = window - 1 - right
            assert right >= 0 and left >= 0, f"{piece} has keys that no query sees, or queries without keys"  # -1 would be no limit
            if piece.offset >= keys - 1:  # all keys are before all queries
                right = -1
        several = groups.setdefault((piece.kind == "diagonal", left, right), [[]])
        last = several[-1][-1] if several[-1] else None
        if last is not None and last.sequence == piece.sequence and piece.q_start < last.q_stop:
            several.append([])
        several[-1].append(piece)
    return tuple(_Call(tuple(some), _Mask(*mask)) for mask, several in groups.items() for some in several)


def _place(runs: list[Run], stride: int, device: torch.device) -> slice | Tensor:
    if stride == 1 and all(start + count == following for (start, count), (following, _) in pairwise(runs)):
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])
    return to_device(torch.cat([torch.arange(start, start + count * stride, stride) for start, count in runs]), device)


def _rounds(runs: list[Run], stride: int, device: torch.device) -> list[tuple[slice | Tensor, slice | Tensor]]:
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
        mine = [(firsts[i], runs[i][1]) for i in sorted(members)]
        found.append((_place(mine, 1, device), _place([runs[i] for i in sorted(members)], stride, device)))
    return found


def _taken(x: Tensor, where: slice | Tensor) -> Tensor:
    return x[where] if isinstance(where, slice) else x.index_select(0, where)


def _add(into: Tensor, where: slice | Tensor, x: Tensor) -> None:
    """Add rows, none of which is twice in ``where``: on a GPU, too, the sum is the same every time."""
    if isinstance(where, slice):
        into[where].add_(x)
    else:
        into.index_add_(0, where, x.to(into.dtype))
