"""Attention in pieces by GPU kernels, and the choice between them and the CPU's (``piece_kernel``).

``FlashPieces`` is a flash kernel for packed sequences: pieces of one kind are sequences of one call, those of a stage's
own rank a call for the diagonals and one for the full pieces, those of another rank one call. ``DensePieces`` is a call
of cuDNN's kernel for each piece; it takes no bands.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.allocator import to_device
from megatron_sp.ops.attention import AttentionMask, torch_has_varlen
from megatron_sp.ops.attention_pieces import AttentionPiece, Run, Stage
from megatron_sp.ops.flash_packages import FLASH_NAMES, Lengths, Pairs
from megatron_sp.ops.gpu_kernels import CUDNN, FlashKernel, PackageFlash, TorchFlash, takes_cudnn
from megatron_sp.ops.partial_attention import (
    BackwardInputs,
    Columns,
    Partial,
    PartialPart,
    PieceKernel,
    Rows,
    attend,
    attend_backward,
)
from megatron_sp.ops.tiled_attention import CPUFlash, Reference

Place = slice | Tensor  # rows of a tensor: an index where they do not lie one after another


def piece_kernel(name: str, x: Tensor, dropout: float = 0.0, *, v: Tensor | None = None) -> PieceKernel:
    """Return the kernel for pieces that computes as the attention kernel ``name`` does, for x [s, m, r, d] and v.

    Raises ValueError if there is none.
    """
    if name == "reference":
        return Reference(dropout)
    if dropout > 0:
        raise ValueError(
            f"attention dropout ({dropout}) in the kernel {name} under context parallelism would depend on the layout:"
            " use the reference kernel (--attention-backend unfused), whose dropout is by hash, or"
            " --attention-dropout 0"
        )
    if x.device.type != availability.GPU:
        return CPUFlash()
    if name in FLASH_NAMES:
        return FlashPieces(PackageFlash(name))
    cudnn = takes_cudnn(x, x[:, :, :1], x[:, :, :1] if v is None else v, True) if name == "cudnn" else None
    if cudnn is not None:
        return DensePieces(cudnn.groups)
    if torch_has_varlen(x, v):
        return FlashPieces(TorchFlash())
    dtype = str(x.dtype).removeprefix("torch.")
    raise ValueError(
        f"no kernel for context parallelism on {x.device.type} takes {dtype} and heads {x.shape[-1]} wide:"
        " torch's flash kernel takes bf16 and fp16 and widths up to 256 that are multiples of 8, from compute"
        " capability 8.0 on; or use the reference kernel (--attention-backend unfused)"
    )


@dataclass(frozen=True, eq=False)
class _Call:
    pieces: tuple[AttentionPiece, ...]  # of one call of the kernel, by their queries, of which they share none
    causal: bool
    left: int  # keys before and behind a query's own that it sees; -1: all
    right: int
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # on the device, for all layers

    def where(self, rows: Rows, keys: bool) -> Place:
        name = "where", keys, rows.starts, rows.stride, rows.x.device
        if name not in self.known:
            self.known[name] = _place(self._runs(rows, keys), rows.stride, rows.x.device)
        return self.known[name]

    def apart(self, kv: Rows) -> list[tuple[Place, Place]]:
        # pairs (rows of the call's keys, rows of the tensor), in each of which no row of the tensor is twice: keys that
        # several pieces share are added one after another
        name = "apart", kv.starts, kv.stride, kv.x.device
        if name not in self.known:
            self.known[name] = _rounds(self._runs(kv, keys=True), kv.stride, kv.x.device)
        return self.known[name]

    def pairs(self, device: torch.device) -> Pairs:
        if device not in self.known:
            queries, keys = [p.q_stop - p.q_start for p in self.pieces], [p.k_stop - p.k_start for p in self.pieces]
            ends = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
            lengths = Lengths(to_device(ends[0], device), to_device(ends[1], device), max(queries), max(keys))
            self.known[device] = Pairs(self.causal, None, lengths, (self.left, self.right))
        return self.known[device]

    def _runs(self, rows: Rows, keys: bool) -> list[Run]:
        # (first row in the tensor, number of rows) of the queries or keys of each piece
        runs = ((p.sequence, p.k_start, p.k_stop) if keys else (p.sequence, p.q_start, p.q_stop) for p in self.pieces)
        return [(rows.starts[sequence] + start * rows.stride, stop - start) for sequence, start, stop in runs]


@dataclass(frozen=True)
class FlashPieces:
    """A flash kernel for packed sequences: torch's, or that of a FlashAttention package."""

    kernel: FlashKernel

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        heads = q.x.shape[1:3]
        for call in _calls(stage):
            queries = call.where(q, keys=False)
            k, v = _keys_and_values(kv, call, q.x.shape[-1])
            out, lse = self.kernel.forward(_taken(q.x, queries).flatten(1, 2), k, v, call.pairs(q.x.device))
            spans = [(piece.sequence, piece.q_start, piece.q_stop) for piece in call.pieces]
            so_far.add(queries, out.unflatten(1, heads), lse.t().unflatten(1, heads), so_far.is_first(spans))
            so_far.mark(spans)

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        heads, d = inputs.q.x.shape[1:3], inputs.q.x.shape[-1]
        gradients = d_kv.x.flatten(2)
        for call in _calls(stage):
            queries = call.where(inputs.q, keys=False)
            q, out, d_out = (_taken(rows.x, queries).flatten(1, 2) for rows in (inputs.q, inputs.out, inputs.d_out))
            lse = _taken(inputs.lse.x, queries).flatten(1).t().contiguous()
            k, v = _keys_and_values(kv, call, d)
            allocate = partial(_empty, q, k, v)
            of_q, *of_kv = self.kernel.backward(d_out, q, k, v, out, lse, call.pairs(q.device), allocate)
            _add(d_q.x, queries, of_q.unflatten(1, heads))
            for into, gradient in zip((gradients[..., :d], gradients[..., d:]), of_kv, strict=True):
                for some, rows in call.apart(kv):
                    _add(into, rows, _taken(gradient, some))


def _keys_and_values(kv: Rows, call: _Call, k_width: int) -> tuple[Tensor, Tensor]:
    # [rows, m, d] and [rows, m, d_v], views of what is gathered in one go
    both = _taken(kv.x, call.where(kv, keys=True)).flatten(2)
    return both[..., :k_width], both[..., k_width:]


def _empty(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # memory for gradients; keys and values may lie side by side, their gradients do not
    return torch.empty_like(q), q.new_empty(k.shape), q.new_empty(v.shape)


@dataclass(frozen=True)
class DensePieces:
    """cuDNN's kernel, a call for each piece."""

    groups: bool  # as for ``gpu_kernels.CUDNN``

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        k, v = kv.split(q.x.shape[-1])
        for kernel, queries, keys, piece in self._pieces(stage, q, kv):
            out, lse = kernel.forward(q.x[queries], k.x[keys], v.x[keys])
            spans = ((piece.sequence, piece.q_start, piece.q_stop),)
            so_far.add(queries, out, lse.permute(2, 0, 1), so_far.is_first(spans))
            so_far.mark(spans)

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        k, v = kv.split(inputs.q.x.shape[-1])
        gradients = d_kv.x.flatten(2)
        for kernel, queries, keys, _ in self._pieces(stage, inputs.q, kv):
            q, out, lse, d_out = (rows.x[queries] for rows in inputs)
            final = lse[..., 0].permute(1, 2, 0).contiguous()
            of_q, of_k, of_v = kernel.backward(d_out, q, k.x[keys], v.x[keys], out, final)
            d_q.x[queries].add_(of_q)
            gradients[keys].add_(torch.cat((of_k, of_v), 3).flatten(2))

    def _pieces(self, stage: Stage, q: Rows, kv: Rows) -> Iterator[tuple[CUDNN, slice, slice, AttentionPiece]]:
        for piece in stage.pieces:
            queries = q.slice(piece.sequence, piece.q_start, piece.q_stop - piece.q_start)
            keys = kv.slice(piece.sequence, piece.k_start, piece.k_stop - piece.k_start)
            if piece.kind == "band":
                raise ValueError("cuDNN's kernel in pieces has no windows: use torch's flash kernel (sdpa)")
            yield CUDNN(piece.kind == "diagonal", self.groups), queries, keys, piece


def _calls(stage: Stage) -> tuple[_Call, ...]:
    calls: tuple[_Call, ...] = stage.once("calls", lambda: calls_of(stage.pieces, stage.window))
    return calls


def calls_of(pieces: tuple[AttentionPiece, ...], window: int | None) -> tuple[_Call, ...]:
    # pieces of one kind together, unless they share queries; bands, if their windows lie alike. The kernel aligns its
    # masks at a piece's last query and last key: query a of n sees key b of m if
    #     -left <= b - (a + m - n) <= right
    # which for a band, 0 <= a + offset - b < window, are right = offset - m + n and left = window - 1 - right. No
    # sequence has no keys: the kernel would give such rows lse = inf (Dao-AILab/flash-attention #978)
    groups: dict[tuple[bool, int, int], list[list[AttentionPiece]]] = {}
    for piece in sorted(pieces, key=lambda p: (p.sequence, p.q_start)):
        left = right = -1
        if piece.kind == "band":
            queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            right = piece.offset - keys + queries
            assert window is not None, f"{piece} is a band, and the stage has no window"
            left = window - 1 - right
            # -1 would be no limit
            assert right >= 0 and left >= 0, f"{piece} has keys that no query sees, or queries without keys"
            if piece.offset >= keys - 1:  # all keys are before all queries
                right = -1
        several = groups.setdefault((piece.kind == "diagonal", left, right), [[]])
        last = several[-1][-1] if several[-1] else None
        if last is not None and last.sequence == piece.sequence and piece.q_start < last.q_stop:
            several.append([])
        several[-1].append(piece)
    return tuple(_Call(tuple(some), *mask) for mask, several in groups.items() for some in several)


def _place(runs: list[Run], stride: int, device: torch.device) -> Place:
    if stride == 1 and all(start + count == following for (start, count), (following, _) in pairwise(runs)):
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])
    return to_device(torch.cat([torch.arange(start, start + count * stride, stride) for start, count in runs]), device)


def _rounds(runs: list[Run], stride: int, device: torch.device) -> list[tuple[Place, Place]]:
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
    places = []
    for members in map(sorted, rounds):
        of_call, of_tensor = [(firsts[i], runs[i][1]) for i in members], [runs[i] for i in members]
        places.append((_place(of_call, 1, device), _place(of_tensor, stride, device)))
    return places


def _taken(x: Tensor, place: Place) -> Tensor:
    return x[place] if isinstance(place, slice) else x.index_select(0, place)


def _add(into: Tensor, place: Place, x: Tensor) -> None:
    # no row is twice in ``place``: on a GPU, too, the sum is the same every time
    if isinstance(place, slice):
        into[place].add_(x)
    else:
        into.index_add_(0, place, x.to(into.dtype))


def example_in_pieces(name: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: AttentionMask) -> list[Tensor]:
    """Return output and gradients of q, k and v of attention whose keys come in two parts."""
    kernel, columns, kv = piece_kernel(name, q, v=v), Columns(1, True), torch.cat((k, v), 3).flatten(2)
    so_far = Partial(q, columns, v.shape[3])
    middle, s = len(q) // 2, len(q)
    stages = [
        (Stage(tuple(_example_pieces(mask, s, start, stop)), mask.window), Rows.interleaved(kv[start:stop], 1))
        for start, stop in ((0, middle), (middle, s))
    ]  # fmt: skip
    for stage, rows in stages:
        attend(kernel, stage, q, rows, so_far, columns)
    out, wide = so_far.out.to(q.dtype), so_far.out.dtype
    d_q, d_kv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    for (stage, rows), into in zip(stages, (d_kv[:middle], d_kv[middle:]), strict=True):
        attend_backward(kernel, stage, (q, out, so_far.lse, grad), rows, d_q, Rows.interleaved(into, 1), columns)
    of_k, of_v = d_kv[:, :, None].split_with_sizes((k.shape[3], v.shape[3]), 3)
    return [out, d_q, of_k, of_v]


def _example_pieces(mask: AttentionMask, s: int, start: int, stop: int) -> Iterator[AttentionPiece]:
    ends = (0, *(mask.documents[0] if mask.documents else (s,)))
    for begin, end in pairwise(ends):
        first, last = max(begin, start), min(end, stop)
        if first >= last:
            continue
        if not mask.causal:
            yield AttentionPiece(-1, begin, end, first - start, last - start, "full")
            continue
        own = AttentionPiece(-1, first, last, first - start, last - start, "diagonal")
        yield own if mask.window is None else own._replace(kind="band")
        if mask.window is None:
            if last < end:
                yield AttentionPiece(-1, last, end, first - start, last - start, "full")
        elif (reach := min(end, last + mask.window - 1)) > last:
            seen = max(first, last - mask.window + 1)
            yield AttentionPiece(-1, last, reach, seen - start, last - start, "band", last - seen)
