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
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_kernels import empty_gradients
from megatron_sp.ops.attention_pieces import AttentionPiece, Stage, runs_of_equal
from megatron_sp.ops.custom_backward import gradients_of

Kind = Literal["full", "diagonal", "band"]
Run = tuple[int, int]
Attend = Callable[[Tensor, Tensor, Tensor, "AttentionPiece"], Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of several sequences in one tensor x [rows, m, ...]: row i of one is at ``starts[sequence] + i * stride``.

    If all sequences are alike there is one entry in ``starts``, and the sequences lie side by side in dim 1.
    """

    x: Tensor
    starts: tuple[int, ...]
    stride: int

    @classmethod
    def interleaved(cls, x: Tensor, sequences: int) -> Rows:
        """Return the rows of x [s, sequences * m, ...], where the sequences are side by side in each position."""
        shape = (x.shape[0] * sequences, x.shape[1] // sequences, *x.shape[2:])
        return cls(x.reshape(shape), tuple(range(sequences)), sequences)

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.x.shape[-1]

    def split(self, k_width: int) -> tuple[Rows, Rows]:
        """Return views of keys [rows, m, 1, k_width] and values [rows, m, 1, d_v] that lie side by side."""
        x = self.x.flatten(2)
        return replace(self, x=x[:, :, None, :k_width]), replace(self, x=x[:, :, None, k_width:])

    def half(self, number: int) -> Rows:
        """Return the first (0) or the second (1) half of the columns m, of which the first has one more if m is odd."""
        middle = (self.x.shape[1] + 1) // 2
        return replace(self, x=self.x[:, middle:] if number else self.x[:, :middle])

    def of_piece(self, piece: AttentionPiece, *, keys: bool) -> slice:
        """Return where a piece's queries, or its keys, are."""
        start, stop = (piece.k_start, piece.k_stop) if keys else (piece.q_start, piece.q_stop)
        return self.slice(piece.sequence, start, stop - start)

    def slice(self, sequence: int, start: int, count: int) -> slice:
        """Return where ``count`` rows of a sequence are."""
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
        """Number of sequences with pieces of their own."""
        return 1 if self.alike else self.batch

    def of_queries(self, x: Tensor) -> list[Rows]:
        """Split a tensor [s, m, r, ...] of the queries into parts with uniform heads: views, if strides allow it."""
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


def one_by_one(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[AttentionPiece], each: int, attend: Attend) -> Tensor:
    """Compute attention with any kernel that autograd differentiates, one call per piece; zero for queries outside all.

    Pieces share neither queries nor keys, and ``each`` is the columns of m per sequence. Gradients are written straight to
    their places: slices under autograd would need a zero tensor of the full size for each, a concatenation a copy.
    """
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
            found = gradients_of(leaves, [part], [grad[rows, columns]])
            del part, leaves
            for into, at, mine in zip(grads, (rows, seen, seen), found, strict=True):
                into[at, columns] = mine
        return *grads, None, None, None, None


def _place_of(piece: AttentionPiece, each: int) -> tuple[slice, slice, slice]:
    columns = slice(piece.sequence * each, (piece.sequence + 1) * each)
    return slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop), columns


def zero_outside(x: Tensor, pieces: Sequence[AttentionPiece], each: int, keys: bool) -> None:
    """Zero the rows of x [s, m, ...] that are in no piece; pieces begin at a sequence's first row and leave no gaps."""
    ends = [0] * (x.shape[1] // each)
    for piece in pieces:
        ends[piece.sequence] = max(ends[piece.sequence], piece.k_stop if keys else piece.q_stop)
    for sequence, end in enumerate(ends):
        if end < x.shape[0]:
            x[end:, sequence * each : (sequence + 1) * each].zero_()


class Places(Protocol):
    """Rows of a call in a tensor: slices if they lie one after another (``alone``), else gathered and scattered."""

    alone: tuple[slice, slice] | None

    def take(self, x: Tensor) -> Tensor:
        """Gather rows."""

    def put(self, into: Tensor, x: Tensor) -> None:
        """Scatter rows."""


class Partial:
    """Attention of all queries [s, m, r, d] of a rank over the keys so far: out and lse, as ``merge_`` continues them."""

    def __init__(self, q: Tensor, columns: Columns, v_width: int | None = None) -> None:
        wide = wide_dtype(q.dtype)
        self.out = empty((*q.shape[:3], v_width or q.shape[3]), dtype=wide, device=q.device).zero_()
        self.lse = empty(q.shape[:3], dtype=wide, device=q.device).fill_(-torch.inf)
        self.parts = [
            PartialPart(out, lse, np.zeros((columns.sequences, q.shape[0]), dtype=bool))
            for out, lse in zip(columns.of_queries(self.out), columns.of_queries(self.lse[..., None]), strict=True)
        ]


class PartialPart:
    """The heads of a ``Partial`` that are uniform: out [n, m, r, d_v], lse [n, m, r, 1].

    ``seen``, bool [sequences, s], are the rows with a key already.
    """

    def __init__(self, out: Rows, lse: Rows, seen: np.ndarray) -> None:
        self.out, self.lse, self.seen = out, lse, seen

    def add(
        self, spans: Sequence[tuple[int, int, int]], at: Places, out: Tensor, lse: Tensor, *, is_last: bool
    ) -> None:
        """Continue with the results of a call, out [n * m, r, rows, d_v] and lse [n * m, r, rows].

        ``spans`` are (sequence, start, stop) of its queries; ``is_last``: no other call has other heads of these queries.
        """
        first = self._is_first(spans)
        if at.alone is not None:
            self._continue(at.alone, out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), first)
        else:
            if not first:
                out, lse = _merged(at.take(self.out.x), at.take(self.lse.x)[..., 0], out, lse)
            at.put(self.out.x, out)
            at.put(self.lse.x, lse[..., None])
        if is_last:
            self._mark(spans)

    def add_rows(self, pieces: Sequence[AttentionPiece], rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Continue with out [n, m, r, d_v] and lse [n, m, r] of pieces that share no query; they belong to ``rows``."""
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

    def _is_first(self, spans: Sequence[tuple[int, int, int]]) -> bool:
        return not any(self.seen[sequence, start:stop].any() for sequence, start, stop in spans)

    def _mark(self, spans: Sequence[tuple[int, int, int]]) -> None:
        for sequence, start, stop in spans:
            self.seen[sequence, start:stop] = True


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    merge_(out, lse, more, more_lse)
    return out, lse


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Continue a softmax over further keys, in place; rows that have seen no key have lse -inf, and out 0.

    ``out`` [..., d] and ``lse`` [...] are of the dtype of sums, ``more`` of any.
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
    """Tensors [n, m, r, d or d_v] and lse [n, m, r, 1] of the queries; out and lse over the keys of *all* stages."""

    q: Rows
    out: Rows
    lse: Rows
    d_out: Rows


class PieceKernel(Protocol):
    """Computes the pieces of a stage, for heads that are uniform.

    Each row of ``kv`` has a head's key and its value side by side, [rows, m, d + d_v] (or [rows, m, 2, d] for one width):
    what travels between ranks is one tensor, of which a run of rows is a view. ``row_keys``: int32 [n, m, r, 1], keys of
    the queries for dropout by hash; None: no dropout.
    """

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
    """Continue the attention of q [s, m, r, d] over the keys and values of a stage; ``row_keys`` are int32 [s, m, r]."""
    if not stage.pieces:
        return
    keys = None if row_keys is None else columns.of_queries(row_keys[..., None])
    for i, parts in enumerate(zip(columns.of_queries(q), columns.of_keys(kv), so_far.parts, strict=True)):
        kernel.forward(stage, *parts, None if keys is None else keys[i])


def attend_backward(
    kernel: PieceKernel, stage: Stage, inputs: tuple[Tensor, Tensor, Tensor, Tensor], kv: Rows, d_q: Tensor, d_kv: Rows,
    columns: Columns,
    row_keys: Tensor | None = None, half: int | None = None,
) -> None:  # fmt: skip
    """Add the gradients of a stage to ``d_q`` and ``d_kv``.

    ``inputs`` are q, *final* out, final lse and the gradient of out. ``d_q`` is in the dtype of sums, ``d_kv``, too, unless
    each key is in one piece at most. ``half`` is 0 or 1 for that half of the heads alone.
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
