"""Attention in pieces: kernels that give and take the logarithm of the softmax's sum (lse), so that keys come in parts.

Softmax over keys A and B is the mean of those over A and over B, weighted by their sums. With s = lse over A and B,

    forward     out = out_A exp(lse_A - s) + out_B exp(lse_B - s),    s = log(exp(lse_A) + exp(lse_B))
    backward    P = exp(q k^T / sqrt(d) - s),  dS = P (d_out v^T - rowsum(d_out out)) / sqrt(d)
                dq = dS k,  dk = dS^T q,  dv = P^T d_out

where backward needs the *final* out and s, and no merge: each piece adds its share. Sums are in fp32 (fp64 for fp64).
FlashAttention merges so between blocks (arXiv:2205.14135), Ring Attention between ranks (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_kernels import empty_gradients
from megatron_sp.ops.attention_pieces import AttentionPiece, Stage, runs_of_equal
from megatron_sp.ops.custom_backward import gradients_of

Attend = Callable[[Tensor, Tensor, Tensor, "AttentionPiece"], Tensor]
Spans = Sequence[tuple[int, int, int]]  # (sequence, start, stop) of queries


@dataclass(frozen=True)
class Rows:
    """Rows of several sequences in x [rows, m, ...]: row i of one is at ``starts[sequence] + i * stride``."""

    x: Tensor
    starts: tuple[int, ...]
    stride: int

    @classmethod
    def interleaved(cls, x: Tensor, sequences: int) -> Rows:
        # of x [s, sequences * m, ...], where the sequences are side by side in each position
        shape = (x.shape[0] * sequences, x.shape[1] // sequences, *x.shape[2:])
        return cls(x.reshape(shape), tuple(range(sequences)), sequences)

    def split(self, k_width: int) -> tuple[Rows, Rows]:
        # views of keys [rows, m, 1, k_width] and values [rows, m, 1, d_v] that lie side by side
        x = self.x.flatten(2)
        return replace(self, x=x[:, :, None, :k_width]), replace(self, x=x[:, :, None, k_width:])

    def slice(self, sequence: int, start: int, count: int) -> slice:
        first = self.starts[sequence] + start * self.stride
        return slice(first, first + (count - 1) * self.stride + 1, self.stride)


@dataclass(frozen=True)
class Columns:
    """Correspondence between the columns m of the queries and those of the keys and values."""

    batch: int  # b sequences
    alike: bool  # their pieces are the same, so they are one sequence of b times as many heads
    # number of queries of each key/value head of a sequence, if these differ: queries are [s, b * sum(counts), 1, d],
    # keys and values [s, b * len(counts), d + d_v]; None: [s, m, r, d] and [s, m, d + d_v]
    counts: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        # with pieces of their own
        return 1 if self.alike else self.batch

    def of_queries(self, x: Tensor) -> list[Rows]:
        # parts of [s, m, r, ...] with uniform heads: views, if strides allow it
        return self._uniform(Rows.interleaved(x, self.sequences), self.counts, queries=True)

    def of_keys(self, rows: Rows) -> list[Rows]:
        return self._uniform(rows, None if self.counts is None else (1,) * len(self.counts), queries=False)

    def _uniform(self, rows: Rows, widths: tuple[int, ...] | None, queries: bool) -> list[Rows]:
        if self.counts is None or widths is None:
            return [rows]
        parts = []
        by_sequence = rows.x.unflatten(1, (self.batch if self.alike else 1, sum(widths)))
        for sequence in range(by_sequence.shape[1]):
            for heads in runs_of_equal(self.counts):
                x = by_sequence[:, sequence, sum(widths[: heads.start]) : sum(widths[: heads.stop])]
                if queries:
                    x = x.squeeze(2).unflatten(1, (heads.stop - heads.start, self.counts[heads.start]))
                parts.append(replace(rows, x=x))
        return parts


def one_by_one(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[AttentionPiece], each: int, attend: Attend) -> Tensor:
    """Compute attention with any kernel that autograd differentiates, one call per piece; zero for other queries."""
    # pieces share neither queries nor keys, and ``each`` is the columns of m per sequence. Gradients are written to
    # their places: slices under autograd would need a zero tensor of the full size for each, a concatenation a copy
    return _OneByOne.apply(q, k, v, pieces, each, attend, torch.is_grad_enabled())


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[AttentionPiece], each: int, attend: Attend,
        train: bool,
    ) -> Tensor:  # fmt: skip
        out = empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        zero_outside(out, pieces, each, keys=False)
        ctx.pieces, ctx.each, ctx.parts = pieces, each, []
        for piece in pieces:
            rows, seen, columns = _place_of(piece, each)
            leaves = [t[at, columns].detach().requires_grad_(train) for t, at in ((q, rows), (k, seen), (v, seen))]
            with torch.set_grad_enabled(train):
                part = attend(leaves[0], leaves[1], leaves[2], piece)
            out[rows, columns] = part.detach()
            if train:
                ctx.parts.append((leaves, part))
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = empty_gradients(*ctx.saved_tensors)
        for x, keys in zip(grads, (False, True, True), strict=True):
            zero_outside(x, ctx.pieces, ctx.each, keys)
        parts, ctx.parts = ctx.parts, []
        if len(parts) != len(ctx.pieces):
            raise RuntimeError(
                "the packed attention's backward ran already: its tensors are gone (retain_graph is not supported)"
            )
        for piece in reversed(ctx.pieces):
            (leaves, part), (rows, seen, columns) = parts.pop(), _place_of(piece, ctx.each)
            of_piece = gradients_of(leaves, [part], [grad[rows, columns]])
            del part, leaves  # this piece's graph goes before the next one's backward needs memory
            for x, at, gradient in zip(grads, (rows, seen, seen), of_piece, strict=True):
                x[at, columns] = gradient
        return *grads, None, None, None, None


def _place_of(piece: AttentionPiece, each: int) -> tuple[slice, slice, slice]:
    columns = slice(piece.sequence * each, (piece.sequence + 1) * each)
    return slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop), columns


def zero_outside(x: Tensor, pieces: Sequence[AttentionPiece], each: int, keys: bool) -> None:
    # the rows of x [s, m, ...] that are in no piece; pieces begin at a sequence's first row, without gaps
    ends = [0] * (x.shape[1] // each)
    for piece in pieces:
        ends[piece.sequence] = max(ends[piece.sequence], piece.k_stop if keys else piece.q_stop)
    for sequence, end in enumerate(ends):
        if end < x.shape[0]:
            x[end:, sequence * each : (sequence + 1) * each].zero_()


class Partial:
    """Attention of all queries [s, m, r, d] of a rank over the keys so far: out and lse, as ``merge_`` continues."""

    def __init__(self, q: Tensor, columns: Columns, v_width: int | None = None) -> None:
        wide = wide_dtype(q.dtype)
        self.out = empty((*q.shape[:3], v_width or q.shape[3]), dtype=wide, device=q.device).zero_()
        self.lse = empty(q.shape[:3], dtype=wide, device=q.device).fill_(-torch.inf)
        by_part = zip(columns.of_queries(self.out), columns.of_queries(self.lse[..., None]), strict=True)
        shape = columns.sequences, q.shape[0]
        self.parts = [PartialPart(out, lse, np.zeros(shape, dtype=bool)) for out, lse in by_part]


@dataclass(frozen=True)
class PartialPart:
    # the heads of a ``Partial`` that are uniform

    out: Rows  # [n, m, r, d_v]
    lse: Rows  # [n, m, r, 1]
    seen: np.ndarray  # bool [sequences, s], rows with a key already: what others get is copied, with the bits of a call

    def is_first(self, spans: Spans) -> bool:
        return not any(self.seen[sequence, start:stop].any() for sequence, start, stop in spans)

    def mark(self, spans: Spans) -> None:
        for sequence, start, stop in spans:
            self.seen[sequence, start:stop] = True

    def add(
        self, place: slice | tuple[slice, slice] | Tensor, out: Tensor, lse: Tensor, first: bool
    ) -> None:  # fmt: skip
        # continue rows with out [n, m, r, d_v] and lse [n, m, r]; ``first``: they have seen no key yet
        if isinstance(place, Tensor):
            if not first:
                so_far = self.out.x.index_select(0, place), self.lse.x.index_select(0, place)[..., 0]
                merge_(*so_far, out, lse)
                out, lse = so_far
            self.out.x.index_copy_(0, place, out.to(self.out.x.dtype))
            self.lse.x.index_copy_(0, place, lse[..., None].to(self.lse.x.dtype))
        elif first:
            self.out.x[place].copy_(out)
            self.lse.x[place][..., 0].copy_(lse)
        else:
            merge_(self.out.x[place], self.lse.x[place][..., 0], out, lse)


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    # continues a softmax over further keys, in place; rows that have seen no key have lse -inf, and out 0. ``out`` and
    # ``lse`` are of the dtype of sums, ``more`` of any
    total = torch.logaddexp(lse, more_lse)
    # -inf less -inf would be NaN
    finite = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - finite).exp_()[..., None]).add_(more * (more_lse - finite).exp_()[..., None])
    lse.copy_(total)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BackwardInputs(NamedTuple):
    # [n, m, r, d or d_v] and lse [n, m, r, 1] of the queries; out and lse over the keys of *all* stages

    q: Rows
    out: Rows
    lse: Rows
    d_out: Rows


class PieceKernel(Protocol):
    """Computes the pieces of a stage, for heads that are uniform."""

    # each row of ``kv`` has a head's key and its value side by side, [rows, m, d + d_v] (or [rows, m, 2, d]): what
    # travels between ranks is one tensor, of which a run of rows is a view. ``row_keys``, int32 [n, m, r, 1], are for
    # dropout by hash

    def forward(self, stage: Stage, q: Rows, kv: Rows, so_far: PartialPart, row_keys: Rows | None) -> None:
        """Continue ``so_far`` with the attention of q [n, m, r, d] over kv."""

    def backward(
        self, stage: Stage, inputs: BackwardInputs, kv: Rows, d_q: Rows, d_kv: Rows, row_keys: Rows | None
    ) -> None:
        """Add the gradients to d_q and to d_kv, which sums the r queries of a head."""


def attend(
    kernel: PieceKernel, stage: Stage, q: Tensor, kv: Rows, so_far: Partial, columns: Columns,
    row_keys: Tensor | None = None,
) -> None:  # fmt: skip
    """Continue the attention of q [s, m, r, d] over the keys and values of a stage; row_keys are int32 [s, m, r]."""
    if not stage.pieces:
        return
    keys = None if row_keys is None else columns.of_queries(row_keys[..., None])
    for i, parts in enumerate(zip(columns.of_queries(q), columns.of_keys(kv), so_far.parts, strict=True)):
        kernel.forward(stage, *parts, None if keys is None else keys[i])


def attend_backward(
    kernel: PieceKernel, stage: Stage, inputs: tuple[Tensor, Tensor, Tensor, Tensor], kv: Rows, d_q: Tensor, d_kv: Rows,
    columns: Columns, row_keys: Tensor | None = None, half: int | None = None,
) -> None:  # fmt: skip
    """Add the gradients of a stage to ``d_q`` and ``d_kv``.

    ``inputs`` are q, *final* out, final lse and the gradient of out. ``d_q`` is in the dtype of sums, like ``d_kv``
    unless each key is in one piece at most. ``half`` is 0 or 1 for that half of the heads alone (``can_halve``).
    """
    if not stage.pieces:
        return
    q, out, lse, d_out = inputs
    by_queries = [columns.of_queries(x) for x in (q, out, lse[..., None], d_out, d_q)]
    by_queries += [] if row_keys is None else [columns.of_queries(row_keys[..., None])]
    for part in zip(*by_queries, columns.of_keys(kv), columns.of_keys(d_kv), strict=True):
        rows = list(part)
        if half is not None:  # the first half has one head more if their number is odd
            middles = [(of_part.x.shape[1] + 1) // 2 for of_part in part]
            cuts = [slice(middle, None) if half else slice(middle) for middle in middles]
            rows = [replace(of_part, x=of_part.x[:, cut]) for of_part, cut in zip(part, cuts, strict=True)]
        *of_queries, of_keys, into_kv = rows
        if of_keys.x.shape[1]:
            keys = of_queries[5] if row_keys is not None else None
            kernel.backward(stage, BackwardInputs._make(of_queries[:4]), of_keys, of_queries[4], into_kv, keys)


def can_halve(columns: Columns, kv: Rows) -> bool:
    """Return whether halves of the heads are of about the same work: with one key/value head they are not."""
    widths = [rows.x.shape[1] for rows in columns.of_keys(kv)]
    return 3 * sum(width // 2 for width in widths) >= sum(widths)
