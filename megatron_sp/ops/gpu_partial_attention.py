"""Attention in pieces by GPU kernels, and the choice between them and the CPU's (``piece_kernel``).

``FlashPieces`` is a flash kernel for packed sequences: pieces of one kind are sequences of one call, those of a stage's
own rank a call for the diagonals and one for the full pieces, those of another rank one call; bands are called together
if their windows lie alike. ``DensePieces`` is a call of cuDNN's kernel for each piece; it takes no bands. No sequence
has no keys: the kernel would give such rows lse = inf (Dao-AILab/flash-attention #978).

The kernel aligns its masks at a piece's last query and last key. Query a of n sees key b of m if

    -left <= b - (a + m - n) <= right

which for a band, 0 <= a + offset - b < window, are right = offset - m + n and left = window - 1 - right.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.allocator import to_device
from megatron_sp.ops.attention_pieces import AttentionPiece, Run, Stage
from megatron_sp.ops.flash_packages import Lengths, Pairs
from megatron_sp.ops.gpu_kernels import CUDNN, FlashKernel
from megatron_sp.ops.partial_attention import BackwardInputs, PartialPart, Rows


class _Mask(NamedTuple):
    causal: bool
    left: int
    right: int


class _Call:
    def __init__(self, pieces: tuple[AttentionPiece, ...], mask: _Mask) -> None:
        self.pieces, self.mask = pieces, mask
        self._known: dict[Hashable, Any] = {}

    def where(self, rows: Rows, keys: bool) -> slice | Tensor:
        name = "where", keys, rows.starts, rows.stride, rows.x.device
        if name not in self._known:
            self._known[name] = _place(self._runs(rows, keys), rows.stride, rows.x.device)
        return self._known[name]

    def apart(self, kv: Rows) -> list[tuple[slice | Tensor, slice | Tensor]]:
        name = "apart", kv.starts, kv.stride, kv.x.device
        if name not in self._known:
            self._known[name] = _rounds(self._runs(kv, keys=True), kv.stride, kv.x.device)
        return self._known[name]

    def pairs(self, device: torch.device) -> Pairs:
        return Pairs(self.mask.causal, None, self.lengths(device), (self.mask.left, self.mask.right))

    def lengths(self, device: torch.device) -> Lengths:
        if device not in self._known:
            queries, keys = [p.q_stop - p.q_start for p in self.pieces], [p.k_stop - p.k_start for p in self.pieces]
            of_q, of_k = (
                to_device(torch.tensor([0, *accumulate(n)], dtype=torch.int32), device) for n in (queries, keys)
            )
            self._known[device] = Lengths(of_q, of_k, max(queries), max(keys))
        found: Lengths = self._known[device]
        return found

    def _runs(self, rows: Rows, keys: bool) -> list[Run]:
        runs = ((p.sequence, p.k_start, p.k_stop) if keys else (p.sequence, p.q_start, p.q_stop) for p in self.pieces)
        return [(rows.starts[sequence] + start * rows.stride, stop - start) for sequence, start, stop in runs]


@dataclass(frozen=True)
class FlashPieces:
    """A flash kernel for packed sequences: torch's, or that of a FlashAttention package."""

    kernel: FlashKernel

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        heads = q.x.shape[1:3]
        for call in _calls(stage):
            queries, keys = call.where(q, keys=False), call.where(kv, keys=True)
            k, v = _keys_and_values(kv, keys, q.width)
            out, lse = self.kernel.forward(_taken(q.x, queries).flatten(1, 2), k, v, call.pairs(q.x.device))
            so_far.add_rows(call.pieces, queries, out.unflatten(1, heads), lse.t().unflatten(1, heads))

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        heads, d = inputs.q.x.shape[1:3], inputs.q.width
        gradients = d_kv.x.flatten(2)
        for call in _calls(stage):
            queries, keys = call.where(inputs.q, keys=False), call.where(kv, keys=True)
            q, out, d_out = (_taken(rows.x, queries).flatten(1, 2) for rows in (inputs.q, inputs.out, inputs.d_out))
            lse = _taken(inputs.lse.x, queries).flatten(1).t().contiguous()
            k, v = _keys_and_values(kv, keys, d)
            of_q, *of_kv = self.kernel.backward(
                d_out, q, k, v, out, lse, call.pairs(q.device), partial(_empty, q, k, v)
            )
            _add(d_q.x, queries, of_q.unflatten(1, heads))
            for into, gradient in zip((gradients[..., :d], gradients[..., d:]), of_kv, strict=True):
                for some, rows in call.apart(kv):
                    _add(into, rows, _taken(gradient, some))


def _keys_and_values(kv: Rows, where: slice | Tensor, k_width: int) -> tuple[Tensor, Tensor]:
    # [rows, m, d] and [rows, m, d_v], views of what is gathered in one go
    both = _taken(kv.x, where).flatten(2)
    return both[..., :k_width], both[..., k_width:]


def _empty(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(k.shape), q.new_empty(v.shape)


@dataclass(frozen=True)
class DensePieces:
    """cuDNN's kernel, a call for each piece; ``groups`` as for ``gpu_kernels.CUDNN``."""

    groups: bool

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        k, v = kv.split(q.width)
        for piece in stage.pieces:
            queries, keys = q.of_piece(piece, keys=False), kv.of_piece(piece, keys=True)
            out, lse = self._kernel(piece).forward(q.x[queries], k.x[keys], v.x[keys])
            so_far.add_rows((piece,), queries, out, lse.permute(2, 0, 1))

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        k, v = kv.split(inputs.q.width)
        gradients = d_kv.x.flatten(2)
        for piece in stage.pieces:
            queries, keys = inputs.q.of_piece(piece, keys=False), kv.of_piece(piece, keys=True)
            q, out, lse, d_out = (rows.x[queries] for rows in inputs)
            final = lse[..., 0].permute(1, 2, 0).contiguous()
            of_q, of_k, of_v = self._kernel(piece).backward(d_out, q, k.x[keys], v.x[keys], out, final)
            d_q.x[queries].add_(of_q)
            gradients[keys].add_(torch.cat((of_k, of_v), 3).flatten(2))

    def _kernel(self, piece: AttentionPiece) -> CUDNN:
        if piece.kind == "band":
            raise ValueError("cuDNN's kernel in pieces has no windows: use torch's flash kernel (sdpa)")
        return CUDNN(piece.kind == "diagonal", self.groups)


def _calls(stage: Stage) -> tuple[_Call, ...]:
    found: tuple[_Call, ...] = stage.once("calls", lambda: calls_of(stage.pieces, stage.window))
    return found


def calls_of(pieces: tuple[AttentionPiece, ...], window: int | None) -> tuple[_Call, ...]:
    """Return the kernel calls of a stage: pieces of one kind together, unless they share queries."""
    groups: dict[tuple[bool, int, int], list[list[AttentionPiece]]] = {}
    for piece in sorted(pieces, key=lambda p: (p.sequence, p.q_start)):
        left = right = -1
        if piece.kind == "band":
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            right = piece.offset - keys + queries
            assert window is not None, f"{piece} is a band, and the stage has no window"
            left = window - 1 - right
            assert right >= 0 and left >= 0, (
                f"{piece} has keys that no query sees, or queries without keys"
            )  # -1 would be no limit
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
    if isinstance(where, slice):
        into[where].add_(x)
    else:
        into.index_add_(0, where, x.to(into.dtype))
