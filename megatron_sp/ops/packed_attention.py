"""Attention of packed documents and of right-padded sequences, computed only on pairs that attend to each other.

Both are lists of ``Segment``: some queries of a sequence with some of its keys. A document attends to itself; in a
padded sequence all queries attend to the real keys. Gradients are written directly into one tensor at the segment's
place: slices under autograd would need a zero tensor of the full size for each of them, and a concatenation a copy.

On the CPU (``CPUSegments``) long segments are passed to torch's fused kernel as views, one call each. Short ones, whose
call costs more than their work, are batched with others of about the same length: copied side by side, right-padded to
the longest. Causal attention never sees later positions, and their gradient is zero, so the padding has no effect;
without the causal mask only segments of the same length share a batch.

A sliding window splits a longer segment into tiles of queries, each with the keys that its windows reach
(``in_windows``): work is proportional to the length times the window. All tiles but the first and the last have the
same shape and share a mask; their keys overlap, so their gradients are added.

On a GPU (``varlen``) one kernel call takes all documents of the batch, with cumulative lengths. In all other cases
(``one_by_one``) the caller's kernel is called for each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from megatron_sp.ops.backward import gradients_of
from megatron_sp.ops.lse_kernels import Gradients, empty_gradients
from megatron_sp.ops.memory import blocks, empty, to_device
from megatron_sp.utils.numbers import window_tile

_BATCHED_BYTES = 1 << 18  # of a segment's queries: above this size a separate call costs little compared with its work
_FILL = 0.75  # the shortest segment of a batch, of the longest
_SHORT = 8  # up to here all lengths share a batch: it is calls that cost


class Segment(NamedTuple):
    """Query rows ``start`` to ``start + queries`` of a sequence, which attend to its ``keys`` rows from ``start - before`` on.

    With ``before`` > 0, each query attends to itself and ``before`` keys before it: a sliding window.
    """

    sequence: int
    start: int
    queries: int
    keys: int
    before: int = 0


Segments = tuple[Segment, ...]
Attend = Callable[[Tensor, Tensor, Tensor, Segment], Tensor]


@lru_cache(maxsize=16)
def segments_of_documents(documents: tuple[tuple[int, ...], ...]) -> Segments:
    """Return the segments of packed documents, given the ends of the documents of each sequence."""
    return tuple(
        Segment(sequence, start, end - start, end - start)
        for sequence, ends in enumerate(documents) for start, end in zip((0, *ends), ends, strict=False)
    )  # fmt: skip


def segments_of_lengths(lengths: Sequence[int], s: int) -> Segments:
    """Return segments in which all ``s`` queries of a sequence attend to its first ``length`` keys; none for a sequence of length 0."""
    return tuple(Segment(sequence, 0, s, min(length, s)) for sequence, length in enumerate(lengths) if length > 0)


@lru_cache(maxsize=16)
def in_windows(segments: Segments, window: int) -> Segments:
    """Split causal segments longer than the window into tiles: the first ``window`` queries, which attend to all keys before them, and
    then a few queries at a time."""
    tile, found = window_tile(window), list[Segment]()
    for segment in segments:
        end = segment.start + segment.queries
        first = min(segment.queries, window)
        found.append(segment._replace(queries=first, keys=first))
        for start in range(segment.start + first, end, tile):
            queries = min(tile, end - start)
            found.append(Segment(segment.sequence, start, queries, window - 1 + queries, before=window - 1))
    return tuple(found)


@lru_cache(maxsize=16)
def batches_of(segments: Segments, causal: bool) -> tuple[Segments, ...]:
    """Group segments into batches to compute together, longest first; then window tiles, which overlap, one by one."""
    found: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda g: (g.before > 0, -g.queries, -g.keys, g)):
        longest = found[-1][0] if found and not segment.before else None
        alike = longest is not None and (longest.queries, longest.keys) == (segment.queries, segment.keys)
        if longest is not None and causal and segment.queries == segment.keys and longest.queries == longest.keys:
            alike = longest.queries <= _SHORT or segment.queries >= _FILL * longest.queries
        if alike:
            found[-1].append(segment)
        else:
            found.append([segment])
    return tuple(map(tuple, found))


class _Call(NamedTuple):
    """Segments of one kernel call, longest first, and the columns of a sequence to compute: all, if there are several segments."""

    segments: Segments
    each: int
    columns: slice


def _calls(segments: Segments, causal: bool, q: Tensor, each: int) -> Iterator[_Call]:
    """Yield kernel calls whose results take about 1 MiB each (``ops/memory.py :: blocks``); a long segment has calls of its own."""
    row = q.shape[2] * q.shape[3] * q.element_size()
    for batch in batches_of(segments, causal):
        of_one = batch[0].queries * each * row
        if of_one <= _BATCHED_BYTES:
            yield from (_Call(batch[some], each, slice(0, each)) for some in blocks(len(batch), of_one, q.device))
            continue
        rows = max(batch[0].queries, batch[0].keys)  # results of backward are as long as the keys
        yield from (_Call((segment,), each, columns) for segment in batch for columns in blocks(each, rows * row, q.device))


class _Places:
    """Gather and scatter of the rows of a kernel call, in tensors [s, m, r, d].

    Args:
        call: the kernel call.
        keys: True for the rows of the keys; else those of the queries.
    """

    def __init__(self, call: _Call, keys: bool) -> None:
        lengths = [segment.keys if keys else segment.queries for segment in call.segments]
        longest, first = max(lengths), call.segments[0]
        self.alone: tuple[slice, slice] | None = None
        self.adds = keys and first.before > 0
        if len(lengths) == 1:
            column, row = first.sequence * call.each, first.start - (first.before if keys else 0)
            self.alone = slice(row, row + longest), slice(column + call.columns.start, column + call.columns.stop)
            return
        start, length = torch.tensor([segment.start for segment in call.segments])[:, None], torch.tensor(lengths)[:, None]
        at = torch.arange(longest)
        self.each, self.padded, self.valid = call.each, min(lengths) < longest, at < length
        self.rows = start + torch.minimum(at, length - 1)  # past the end of a segment its last row is repeated: any finite number will do
        self.columns = torch.tensor([segment.sequence * call.each for segment in call.segments])[:, None] + torch.arange(call.each)

    def take(self, x: Tensor, zero_behind: bool = False) -> Tensor:
        """Gather rows: [s, m, r, d] -> [n * each, r, longest, d]; a view for one segment."""
        if self.alone is not None:
            return x[self.alone].permute(1, 2, 0, 3)
        taken = x[self.rows[:, None, :], self.columns[:, :, None]]  # [n, each, longest, r, d]
        if zero_behind and self.padded:
            taken.mul_(self.valid[:, None, :, None, None])
        return taken.flatten(0, 1).transpose(1, 2)

    def put(self, into: Tensor, x: Tensor) -> None:
        """Scatter rows [n * each, r, longest, d] into ``into`` [s, m, r, d]; those of a window tile's keys are added."""
        if self.alone is not None:
            place = into[self.alone]
            place.add_(x.permute(2, 0, 1, 3)) if self.adds else place.copy_(x.permute(2, 0, 1, 3))
            return
        x = x.unflatten(0, (-1, self.each)).permute(0, 3, 1, 2, 4)  # [n, longest, each, r, d]
        if not self.padded:
            into[self.rows[:, :, None], self.columns[:, None, :]] = x
            return
        segment, at = self.valid.nonzero(as_tuple=True)
        into[self.rows[segment, at][:, None], self.columns[segment]] = x[segment, at]


@dataclass(frozen=True)
class CPUSegments:
    """torch's fused CPU kernel, called for batches of segments (an ``LseKernel``); its lse are those of the calls.

    q is [s, m, r, d], k and v are [s, m, 1, d]; the output is zero for queries outside all segments.

    Attributes:
        segments: non-overlapping, except for the keys of ``in_windows``.
        each: consecutive columns of m per sequence.
        causal: causal mask within a segment.
    """

    segments: Segments
    each: int
    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, sums = empty(q.shape, dtype=q.dtype, device=q.device), []
        _zero_outside(out, self.segments, self.each, keys=False)
        for call in _calls(self.segments, self.causal, q, self.each):
            queries, (is_causal, mask) = _Places(call, keys=False), _mask_of(call, self.causal, q.dtype)
            result, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_operands(q, k, v, call, queries), 0.0, is_causal, attn_mask=mask
            )
            queries.put(out, result)
            sums.append(log_sums)
        return out, *sums

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        grads = _gradients_of(q, k, v, self.segments, self.each)
        for call, log_sums in zip(_calls(self.segments, self.causal, q, self.each), lse, strict=True):
            queries, keys, (is_causal, mask) = _Places(call, keys=False), _Places(call, keys=True), _mask_of(call, self.causal, q.dtype)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                queries.take(grad, zero_behind=True), *_operands(q, k, v, call, queries), queries.take(out), log_sums, 0.0, is_causal,
                attn_mask=mask,
            )  # fmt: skip
            queries.put(grads.q, found[0])
            for into, of_queries in zip(grads[1:], found[1:], strict=True):  # the group's one key and value served all its queries
                keys.put(into, of_queries if q.shape[2] == 1 else of_queries.sum(1, keepdim=True))
        return grads


def _mask_of(call: _Call, causal: bool, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """Return (whether to use the kernel's causal mask, additive mask or None); only a window tile has an additive mask."""
    segment = call.segments[0]
    return (False, window_mask(segment.queries, segment.before, dtype, torch.device("cpu"))) if segment.before else (causal, None)


@lru_cache(maxsize=4)
def window_mask(queries: int, before: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an additive mask [queries, before + queries]: 0 where query i attends to key j, i <= j <= i + before, else -inf.

    On a GPU its rows are a multiple of 16 elements apart: SDPA then takes it as it is, where it would save a padded copy
    for each tile.
    """
    keys = before + queries
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    hidden = (distance < 0) | (distance > before)
    apart = keys if device.type == "cpu" else -(-keys // 16) * 16
    return torch.zeros(queries, apart, dtype=dtype, device=device)[:, :keys].masked_fill_(hidden, -torch.inf)


def _operands(q: Tensor, k: Tensor, v: Tensor, call: _Call, queries: _Places) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v for the kernel, all [n * each, r, longest, d]; keys and values are expanded over r without a copy."""
    keys, r = _Places(call, keys=True), q.shape[2]
    return queries.take(q), keys.take(k).expand(-1, r, -1, -1), keys.take(v).expand(-1, r, -1, -1)


def _gradients_of(q: Tensor, k: Tensor, v: Tensor, segments: Segments, each: int) -> Gradients:
    """Allocate the gradients, zero outside the segments."""
    grads = empty_gradients(q, k, v)
    for grad, keys in zip(grads, (False, True, True), strict=True):
        _zero_outside(grad, segments, each, keys)
    return grads


def _zero_outside(x: Tensor, segments: Segments, each: int, keys: bool) -> None:
    """Zero the rows that no segment writes: those after the segments of each sequence, which are contiguous from the first row on."""
    if keys and any(segment.before for segment in segments):  # added up
        x.zero_()
        return
    ends = [0] * (x.shape[1] // each)
    for segment in segments:
        ends[segment.sequence] = max(ends[segment.sequence], segment.start + (segment.keys if keys else segment.queries))
    for sequence, end in enumerate(ends):
        if end < x.shape[0]:
            x[end:, sequence * each : (sequence + 1) * each].zero_()


def varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, each: int, kernel: Callable[..., Tensor]) -> Tensor:
    """Compute the attention of all documents in one call of a GPU kernel.

    A single sequence with one query head per key head needs no copies; otherwise the kernel's layout, with the tokens
    of one sequence after those of another and the groups of heads side by side, takes a copy of each operand.

    Args:
        q: [s, m, r, d].
        k, v: [s, m, 1, d].
        segments: documents, in order, which cover every row.
        each: columns of m per sequence.
        kernel: function of (q [tokens, heads, d], k, v [tokens, groups, d], cumulative lengths int32 [n + 1], longest
            length).
    """
    by_token = [rearrange(t, "s (b g) r d -> (b s) (g r) d", g=each) for t in (q, k, v)]
    ends = ends_of(segments, q.shape[0], q.device)
    out = kernel(*by_token, ends, max(segment.queries for segment in segments))
    return rearrange(out, "(b s) (g r) d -> s (b g) r d", s=q.shape[0], g=each)


@lru_cache(maxsize=4)
def ends_of(segments: Segments, s: int, device: torch.device) -> Tensor:
    """Return cumulative document lengths over all sequences, int32 [n + 1], cached for all layers; the host does not wait."""
    ends = torch.tensor([0, *(segment.sequence * s + segment.start + segment.queries for segment in segments)], dtype=torch.int32)
    return to_device(ends, device)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, segments: Segments, each: int, attend: Attend) -> Tensor:
    """Compute attention with any kernel, one call per segment.

    Args:
        q: [s, m, r, d].
        k, v: [s, m, 1, d].
        segments: non-overlapping.
        each: columns of m per sequence.
        attend: differentiable function of the segment's q [queries, each, r, d], k and v [keys, each, 1, d], and the
            segment.
    Returns:
        [s, m, r, d]; zero for queries outside all segments.
    """
    return _OneByOne.apply(q, k, v, segments, each, attend, torch.is_grad_enabled())


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, each: int, attend: Attend, train: bool
    ) -> Tensor:  # fmt: skip
        out = empty(q.shape, dtype=q.dtype, device=q.device)
        _zero_outside(out, segments, each, keys=False)
        ctx.segments, ctx.each, ctx.parts = segments, each, []
        for segment in segments:
            rows, seen, columns = _runs(segment, each)
            leaves = [t[at, columns].detach().requires_grad_(train) for t, at in ((q, rows), (k, seen), (v, seen))]
            with torch.set_grad_enabled(train):
                part = attend(leaves[0], leaves[1], leaves[2], segment)
            out[rows, columns] = part.detach()
            if train:
                ctx.parts.append((leaves, part))
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        grads = _gradients_of(q, k, v, ctx.segments, ctx.each)
        parts, ctx.parts = ctx.parts, []
        if len(parts) != len(ctx.segments):
            raise RuntimeError("the packed attention's backward ran already: its tensors are gone (retain_graph is not supported)")
        for segment in reversed(ctx.segments):
            (leaves, part), (rows, seen, columns) = parts.pop(), _runs(segment, ctx.each)
            found = gradients_of(leaves, [part], [grad[rows, columns]])
            del part, leaves
            for into, at, mine in zip(grads, (rows, seen, seen), found, strict=True):
                into[at, columns] = mine
        return *grads, None, None, None, None


def _runs(segment: Segment, each: int) -> tuple[slice, slice, slice]:
    """Return (query rows, key rows, columns) of a segment."""
    start, first = segment.start, segment.sequence * each
    return slice(start, start + segment.queries), slice(start, start + segment.keys), slice(first, first + each)
