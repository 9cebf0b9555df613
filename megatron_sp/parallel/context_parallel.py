"""Attention over the positions of all cp ranks, with keys and values exchanged as the mask needs them.

Rank i has the queries, keys and values of its own positions (``context_plan.py``). In shift t = 1 .. c-1 it sends to
rank i+t the rows of its keys and values that that rank's queries see, and receives such rows from rank i-t; a shift in
which nobody needs anything does not take place. Softmax is continued over what arrives (``ops/partial_attention.py``):

    forward     own pieces | pieces with i-1 | pieces with i-2 | ...    the next shift's rows travel under these
                 kv 1 -----^  kv 2 ----------^
    backward    own pieces, first half | pieces with i-1 | pieces with i-2 | ... | own pieces, second half
                 kv 1 -----------------^  kv 2 ----------^  d kv 1 to i-1       d kv c-1 ---------------^

Backward has the keys and values sent once more (or kept, ``keep_kv``). A rank sends what its queries add to another's
gradients of keys and values in the dtype of the activations, and the owner adds up in fp32 (fp64 for fp64) in an order
that plan and heads give, so results repeat bit for bit.

Sources: Ring Attention (arXiv:2310.01889), whose ring of equal parts this is not; DistFlashAttn (arXiv:2310.03294);
planned exchange for packed documents: MagiAttention (arXiv:2505.13211).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_pieces import Stage, each_key_once, halves
from megatron_sp.ops.partial_attention import (
    Columns,
    Partial,
    PieceKernel,
    Rows,
    attend,
    attend_backward,
    can_halve,
    wide_dtype,
)
from megatron_sp.parallel.context_plan import ContextPlan, Run
from megatron_sp.parallel.parallel_context import ContextParallel
from megatron_sp.parallel.sequence_slices import SliceKeys


class ContextAttention(NamedTuple):
    """Result of ``context_attention``, and all that a later pass needs to do without computing it again."""

    out: Tensor  # [L, m, r, d_v]
    # [L, m, r], fp32 (fp64 for fp64): logarithm of the sum of the exponentials of each query's scores; -inf for a query
    # without keys. Has no gradient.
    lse: Tensor
    # keys and values of other ranks, in the order of the shifts, with ``keep_kv``; else empty
    received: tuple[Tensor, ...] = ()


def context_attention(
    q: Tensor, kv: Tensor, plan: ContextPlan, cp: ContextParallel, kernel: PieceKernel, *, batch: int,
    counts: tuple[int, ...] | None = None, row_keys: Tensor | None = None, kept: ContextAttention | None = None,
    slices: SliceKeys | None = None, cover: Callable[[], None] | None = None,
) -> ContextAttention:  # fmt: skip
    """Compute the attention of this rank's queries over the keys and values of all cp ranks. Collective over cp.

    ``q`` is [L, m, r, d] for this rank's L positions, with the heads of a sequence side by side in m, ``kv`` is
    ``paired`` or [L, m, 2, d]. Where the numbers of queries of a sequence's keys differ, they are ``counts``, q is [L,
    b * sum(counts), 1, d] and kv [L, b * len(counts), d + d_v]. ``row_keys``: int32 [L, m, r], for dropout by hash.
    ``kept`` is the result of an earlier pass over the same inputs. The backward passes of a row's slices run from the
    last to the first. ``cover`` is independent work for the end of backward.

    Raises ValueError for tensors that are not the plan's, RuntimeError if the plan leaves out pairs.
    """
    if plan.cp_size != cp.size:
        raise ValueError(
            f"the plan is for {plan.cp_size} ranks, and the cp group has {cp.size}: plan for the group's size"
        )
    length = plan.lengths[cp.rank]
    if (q.shape[0], kv.shape[0]) != (length, length):
        raise ValueError(
            f"cp rank {cp.rank} has queries of {q.shape[0]} positions and keys of {kv.shape[0]}, and the plan gives it"
            f" {length}: cut the sequence by the plan"
        )
    groups = q.shape[1] if counts is None else q.shape[1] // sum(counts) * len(counts)
    uneven = counts is not None and (q.shape[1] != batch * sum(counts) or q.shape[2] != 1)
    narrow = kv.shape[2] <= q.shape[3] if kv.ndim == 3 else kv.shape[2:] != (2, q.shape[3])
    if uneven or kv.shape[1] != groups or groups % batch or narrow:
        each = "" if counts is None else f" with {counts} queries for each key"
        raise ValueError(
            f"queries {tuple(q.shape)} and keys and values {tuple(kv.shape)} do not fit together for {batch} sequences"
            f"{each}: [L, b * g, r, d] and [L, b * g, 2, d] do"
        )
    plan.require_all_pairs(cp.rank)
    if not plan.alike and plan.mask.sequences != batch:
        raise ValueError(f"the mask describes {plan.mask.sequences} sequences, and there are {batch}")
    tables = _tables_of(plan, cp.rank, Columns(batch, plan.alike, counts))
    # whether backward may follow is known here only: inside forward autograd is always off
    pass_ = _Pass(cp, kernel, tables, torch.is_grad_enabled(), slices, cover)
    out, lse, *received = _ContextAttention.apply(pass_, kept, row_keys, q, kv)
    return ContextAttention(out, lse, tuple(received))


def paired(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values side by side, [L, m, d + d_v]: the same memory if they are so already, else a copy."""
    return _Paired.apply(k, v)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> Tensor:
        ctx.widths = k.shape[3], v.shape[3]
        shape, stride = (*k.shape[:2], sum(ctx.widths)), (*k.stride()[:2], 1)
        beside = v.storage_offset() == k.storage_offset() + k.shape[3] and k.stride()[:2] == v.stride()[:2]
        beside = beside and k.stride(3) == v.stride(3) == 1
        if not beside or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return torch.cat((k, v), 3).view(shape)
        alias = torch.empty(0, dtype=k.dtype, device=k.device)  # neither a leaf nor a view for autograd
        return alias.set_(k.untyped_storage(), k.storage_offset(), shape, stride)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        of_k, of_v = grad[:, :, None].split_with_sizes(ctx.widths, 3)
        return of_k, of_v


@dataclass(frozen=True)
class _Message:
    # the rows that rank j sends to rank i, and on the way back their gradients. A row is the key and the value of each
    # head, so that one exchange carries both. Where all sequences need the same rows these lie as in [L, m, d + d_v],
    # and one run of them is no copy; else the rows of one sequence follow those of another, [rows, m / b, d + d_v]
    runs: tuple[tuple[Run, ...], ...]  # for each sequence (one entry if all are alike) runs of rows of L_j
    columns: Columns

    @cached_property
    def same(self) -> bool:
        return len(set(self.runs)) == 1

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def numel(self, kv: Tensor) -> int:
        # the number of elements, for keys and values kv [L, m, d + d_v]
        return sum(self.num_rows) * (kv.shape[1] // self.columns.sequences) * kv.shape[2:].numel()

    def pack(self, kv: Tensor) -> Tensor:
        # the rows of kv [L, m, d + d_v], flat; a view if they are one run for all sequences
        if self.same and len(self.runs[0]) == 1:
            ((start, stop),) = self.runs[0]
            return kv[start:stop].view(-1)
        send = empty((self.numel(kv),), dtype=kv.dtype, device=kv.device)
        for part, rows in self.parts(send, kv):
            part.copy_(rows)
        return send

    def rows(self, flat: Tensor, kv: Tensor) -> Rows:
        # the rows of a message as the kernels address them; ``kv`` is for the shape
        sequences, m = self.columns.sequences, kv.shape[1] // self.columns.sequences
        x = flat.view(-1, m, *kv.shape[2:])
        if self.same:
            return Rows(x, tuple(range(sequences)), sequences)
        counts = self.num_rows
        return Rows(x, tuple(sum(counts[:sequence]) for sequence in range(sequences)), 1)

    def parts(self, flat: Tensor, kv: Tensor) -> list[tuple[Tensor, Tensor]]:
        # (part of the message, rows of kv [L, m, d + d_v]), run by run
        parts, start_of_run = [], 0
        by_sequence = [kv] if self.same else kv.unflatten(1, (self.columns.sequences, -1)).unbind(1)
        for of_sequence, runs in zip(by_sequence, self.runs, strict=False):
            for start, stop in runs:
                rows = of_sequence[start:stop]
                parts.append((flat[start_of_run : start_of_run + rows.numel()].view(rows.shape), rows))
                start_of_run += rows.numel()
        return parts


# some of a stage's pieces, or all of them for one half of the heads
_Half = tuple[Stage, int | None]


class _Tables:
    # stages, messages and shifts of a rank, for all layers and passes; derived from the plan when first asked for
    def __init__(self, plan: ContextPlan, rank: int, columns: Columns) -> None:
        self.plan, self.rank, self.columns, size = plan, rank, columns, plan.cp_size
        # those in which any rank sends anything to any other; the same on all ranks
        self.shifts = [
            t for t in range(1, size) if any(plan.num_rows((j + t) % size, j, columns.batch) for j in range(size))
        ]
        self._messages: dict[tuple[int, int], _Message] = {}
        self._stages: dict[int, Stage] = {}
        self._halves: tuple[_Half, _Half] | None = None

    def message(self, i: int, j: int) -> _Message:
        if (i, j) not in self._messages:
            self._messages[i, j] = _Message(self.plan.local_rows(i, j), self.columns)
        return self._messages[i, j]

    def stage(self, j: int) -> Stage:
        if j not in self._stages:
            plan, own = self.plan, (self.plan.keys[j],) * self.columns.sequences
            runs = own if j == self.rank else plan.rows(self.rank, j)
            self._stages[j] = Stage(plan.pieces(self.rank, j), plan.mask.window, runs, plan.mask.documents)
        return self._stages[j]

    def halves(self, by_heads: bool) -> tuple[_Half, _Half]:
        # two halves of the stage with own keys: the last gradients, if there are any, travel under the second. Half of
        # the heads costs nothing; with a single key/value head it is half of all heads' work, in more pieces, since a
        # triangle cut in two takes longer than whole
        own = self.stage(self.rank)
        if by_heads and self.shifts:
            return (own, 0), (own, 1)
        if self._halves is None:
            first, second = halves(own.pieces, own.window) if self.shifts else (own.pieces, ())
            self._halves = (
                (replace(own, pieces=first, _known={}), None),
                (replace(own, pieces=second, _known={}), None),
            )
        return self._halves


_tables_of = lru_cache(maxsize=64)(_Tables)  # of the slices of a row, in several micro-batches


@dataclass(frozen=True)
class _Pass:
    cp: ContextParallel
    kernel: PieceKernel
    tables: _Tables
    train: bool
    slices: SliceKeys | None = None
    cover: Callable[[], None] | None = None

    def peer(self, shift: int) -> int:
        return (self.cp.rank + shift) % self.cp.size

    def exchange(self, name: str, send: Tensor, to: int, source: int, count: int) -> Handle:
        # ``send`` to one rank, and ``count`` elements from another
        counts = [
            [n if r == rank else 0 for r in range(self.cp.size)] for rank, n in ((to, send.numel()), (source, count))
        ]
        return self.cp.exchange_async(name, send, *counts)


class _Arrivals:
    # keys and values of other ranks, shift by shift, some shifts ahead of their use
    def __init__(self, pass_: _Pass, kv: Tensor, kept: tuple[Tensor, ...] = ()) -> None:
        self.pass_, self.kv, self.kept = pass_, kv, kept
        self.shifts = pass_.tables.shifts
        self.num_started, self.under_way = 0, deque[Handle]()
        self._start(max(1, pass_.cp.stages_ahead))

    def _start(self, count: int) -> None:
        # of a shift: this rank's rows go to the rank ``shift`` ahead, the rows of the one ``shift`` behind come here
        rank, message = self.pass_.cp.rank, self.pass_.tables.message
        for shift in self.shifts[self.num_started : 0 if self.kept else count]:
            to, source = self.pass_.peer(shift), self.pass_.peer(-shift)
            send, arriving = message(to, rank).pack(self.kv), message(rank, source).numel(self.kv)
            self.under_way.append(self.pass_.exchange("kv", send, to, source, arriving))
            self.num_started += 1

    def wait(self, index: int) -> Tensor:
        if self.kept:
            return self.kept[index]
        self._start(index + 1 + max(1, self.pass_.cp.stages_ahead))
        return self.under_way.popleft().wait()


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pass_: _Pass, kept: ContextAttention | None, row_keys: Tensor | None, q: Tensor, kv: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, kv = q.contiguous(), kv.contiguous()
        ctx.set_materialize_grads(False)
        ctx.pass_ = pass_
        if kept is None:
            kept = _forward(pass_, q, kv, row_keys)
        else:  # tensors of their own for autograd, which marks what is returned as results of this node
            kept = ContextAttention(kept.out.detach(), kept.lse.detach(), tuple(x.detach() for x in kept.received))
        if pass_.train and any(ctx.needs_input_grad):
            # keys and values of a slice are kept until the last one that sees them
            ctx.save_for_backward(row_keys, q, None if pass_.slices is not None else kv, *kept[:2], *kept.received)
        ctx.mark_non_differentiable(kept.lse, *kept.received)
        return kept.out, kept.lse, *kept.received

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_out: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        row_keys, q, kv, out, lse, *received = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(out)  # others wait for this rank's part
        return None, None, None, *_backward(ctx.pass_, (q, out, lse, d_out.contiguous()), kv, row_keys, tuple(received))


def _forward(pass_: _Pass, q: Tensor, kv: Tensor, row_keys: Tensor | None) -> ContextAttention:
    rank, kernel, tables, columns = pass_.cp.rank, pass_.kernel, pass_.tables, pass_.tables.columns
    if pass_.slices is not None:
        kv = pass_.slices.add(kv)
    arrivals, received = _Arrivals(pass_, kv), list[Tensor]()
    so_far = Partial(q, columns, kv.shape[2:].numel() - q.shape[3])
    attend(kernel, tables.stage(rank), q, Rows.interleaved(kv, columns.sequences), so_far, columns, row_keys)
    for index, shift in enumerate(arrivals.shifts):
        source, arrived = pass_.peer(-shift), arrivals.wait(index)
        rows = tables.message(rank, source).rows(arrived, kv)
        attend(kernel, tables.stage(source), q, rows, so_far, columns, row_keys)
        if pass_.cp.keep_kv:
            received.append(arrived)
        del arrived, rows  # before the next but one is given memory
    return ContextAttention(so_far.out.to(q.dtype), so_far.lse, tuple(received))


def _backward(
    pass_: _Pass, of_queries: tuple[Tensor, Tensor, Tensor, Tensor], own_kv: Tensor | None, row_keys: Tensor | None,
    received: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # the gradients of q and kv; ``of_queries``: q, out, lse and the gradient of out
    rank, kernel, tables, slices = pass_.cp.rank, pass_.kernel, pass_.tables, pass_.slices
    columns, kv = tables.columns, own_kv if slices is None else slices.so_far()
    assert kv is not None
    wide = wide_dtype(kv.dtype)
    arrivals = _Arrivals(pass_, kv, received)
    d_q = empty(of_queries[0].shape, dtype=wide, device=kv.device).zero_()
    d_kv = empty(kv.shape, dtype=wide, device=kv.device).zero_() if slices is None else slices.gradient(wide)
    own, of_own = Rows.interleaved(kv, columns.sequences), Rows.interleaved(d_kv, columns.sequences)
    first, second = tables.halves(can_halve(columns, own))
    attend_backward(kernel, first[0], of_queries, own, d_q, of_own, columns, row_keys, first[1])
    returning: tuple[int, Handle] | None = None
    for index, shift in enumerate(arrivals.shifts):
        source, arrived = pass_.peer(-shift), arrivals.wait(index)
        message, stage = tables.message(rank, source), tables.stage(source)
        d_rows = empty(arrived.shape, dtype=kv.dtype if each_key_once(stage) else wide, device=kv.device).zero_()
        rows, into = message.rows(arrived, kv), message.rows(d_rows, kv)
        attend_backward(kernel, stage, of_queries, rows, d_q, into, columns, row_keys)
        del arrived, rows, into  # before the gradients are cast
        d_rows, peer = d_rows.to(kv.dtype), pass_.peer(shift)
        # the gradients go back to whose rows these are; those of this rank's rows come from where the rows went
        handle = pass_.exchange("d kv", d_rows, source, peer, tables.message(peer, rank).numel(kv))
        del d_rows
        _add_arrived(pass_, d_kv, returning)
        returning = shift, handle
    attend_backward(kernel, second[0], of_queries, own, d_q, of_own, columns, row_keys, second[1])
    if pass_.cover is not None:
        pass_.cover()
    _add_arrived(pass_, d_kv, returning)
    if slices is not None:
        d_kv = slices.take_gradient()  # the other rows are for the slices before this one
    return d_q.to(kv.dtype), d_kv.to(kv.dtype)


def _add_arrived(pass_: _Pass, d_kv: Tensor, returning: tuple[int, Handle] | None) -> None:
    if returning is not None:
        shift, handle = returning
        message = pass_.tables.message(pass_.peer(shift), pass_.cp.rank)
        for part, rows in message.parts(handle.wait(), d_kv):
            rows.add_(part)
