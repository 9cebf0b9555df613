"""Heads of a block under Ulysses: projection, exchange, attention and exchange back (arXiv:2309.14509).

    x [s/sp, b, h] -> norm -> q, k, v of all heads -> exchange -> attention [s, b, some heads] -> exchange
        -> [s/sp, b, n*d_v] -> projection

Between the exchanges a rank has the whole sequence for its share of the heads. Projections write to the send buffer and
attention reads the receive buffer: nothing is permuted. Heads go in chunks (``parallel/heads.py``), one schedule for
all modes:

    forward    project 0 | project 1  | attend 0 | project 2 | attend 1 | ...    the exchange of chunk i+1 and the one
                   in 0 -----^  in 1 --------^ out 0 ...                         back of chunk i-1 under attention of i
    backward   the same from the last chunk to the first; dW of the output projection overlaps with the first exchange,
               the gradients of the QKV projection, message by message, with the last ones

A chunk's heads are *fresh* in backward, kept since the forward pass, or *remade*: where attention's results are kept,
q, k and v need not be, and backward projects and sends them again, so that only those of two chunks exist at a time. A
recomputation that finds the results of its first pass does no more than the output projection; --recompute-qkv does the
same without one.

    backward   remake 1 | d out 1 | remake 0, attention 1 | d out 0 | attention 0 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.parallel.attention_core import Call, Core, Graph, Shared, attend, attend_backward
from megatron_sp.parallel.heads import HeadChunk, Message
from megatron_sp.parallel.linear import projected, projected_by
from megatron_sp.parallel.parallel_context import NO_SP, SequenceParallel
from megatron_sp.parallel.split_projection import (
    HeadColumns,
    project_back_to_ranks,
    project_to_ranks,
    take,
    take_of_ranks,
)
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

_FEW = 4  # pieces, up to which a product for each is cheaper than putting them side by side

# what a recorder calls the parts of the computation
PROJECTION, ATTENTION, OUTPUT_PROJECTION, OTHER = "projection", "attention", "output projection", "other"


@dataclass(frozen=True)
class AttentionPlan:
    """Plan of one block's attention on this rank."""

    chunks: tuple[HeadChunk, ...]  # the exchanges of the heads
    v_width: int  # d_v, width of a head's output
    # s, the real positions (with cp those of a cp rank, perhaps none); exchanges include padding to a multiple of the
    # ranks, attention does not
    seq_length: int
    tp: TensorParallel = NO_TP
    sp: SequenceParallel = NO_SP
    add_input: bool = True  # add the block's input to the result (the residual stream)
    # keeps attention's results for a recomputation, or has them; None: there is none, or it repeats attention
    kept: KeptTensors | None = None
    # ``kept`` has what the exchange back has brought, too, so that the recomputation runs none
    keeps_received: bool = False
    # what backward finds of q, k and v, if no recomputation makes them; "remade": attention's results are kept instead
    heads: Literal["fresh", "remade"] = "fresh"

    @cached_property
    def whole_weight(self) -> bool:
        messages = [message for chunk in self.chunks for message in chunk.fresh.heads]
        heads = [head for message in messages for of_rank in message.heads for head in of_rank]
        return len(set(heads)) == len(heads)


class HeadGrads(NamedTuple):
    # of the heads, on their way to the ranks of their positions

    # each message with the handle of its exchange, in the order in which they were started
    arriving: list[tuple[Message, Handle]]
    overlapped: Tensor | None  # result of the work that was overlapped with the first exchange
    of_core: list[Tensor | None]  # gradients of the core's parameters


@dataclass
class Projection:
    a: Tensor
    weight: Tensor
    bias: Tensor | None


class HeadsPass:
    """One pass of a block's heads: for each chunk project and send, attend, send back, and the same in backward."""

    def __init__(self, plan: AttentionPlan, core: Core, x: Tensor, train: bool) -> None:
        self.plan, self.core = plan, core
        positions = x.shape[0] * plan.tp.parts
        self.sp, self.batch, self.tokens = plan.sp, x.shape[1], positions * x.shape[1]
        self.padded_length = positions * plan.sp.size
        # pieces of 16 bits are put side by side: their sum would be rounded at every step
        self.few = 1 if x.dtype in (torch.bfloat16, torch.float16) else _FEW
        self.replays = plan.kept is not None and plan.kept.replays
        # what backward finds of q, k and v; "none" if there is no backward
        self.heads: Literal["none", "fresh", "remade"] = "none"
        if train:
            self.heads = "remade" if self.replays else plan.heads
        # saved with the op, unless they are those of a recomputation around it
        self.results = KeptTensors() if self.heads == "remade" and not self.replays else None
        # of each chunk, for backward: its attention, or the results with which that is made again; None if there is no
        # backward, or if this rank has no queries in the chunk
        self.states: list[Graph | Call | KeptTensors | None] = []

    # forward

    def forward(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> list[Handle]:
        """Run the forward pass on a [tokens, h]; return the handles of the exchanges back, one for each chunk."""
        chunks, projection = self.plan.chunks, Projection(a, weight, bias)
        coming = [self._project_and_send(chunks[0].fresh.heads, projection)]
        going: list[Handle] = []
        shared: Shared = {}
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                coming.append(self._project_and_send(chunks[index + 1].fresh.heads, projection))
            self.sp.mark(ATTENTION)
            recv_buffers = [handle.wait() for handle in coming[index]]
            coming[index] = []
            out = self._attend(chunk, recv_buffers, shared)
            uses, later = chunk.shares[self.sp.rank].uses, chunks[index + 1 :]
            if later and not any(chunk.shares[self.sp.rank].uses == uses for chunk in later):
                shared.pop(uses.start, None)
            going.append(self._send_back(chunk, out))
        self.sp.mark(OUTPUT_PROJECTION)
        return going

    def release(self) -> list[Tensor]:
        # the tensors that backward needs and no graph has saved, until ``restore``
        released = [tensor for state in self.states if isinstance(state, Call) for tensor in state.release()]
        return released if self.results is None else released + self.results.release()

    def restore(self, saved: Sequence[Tensor]) -> None:
        tensors = iter(saved)
        for state in self.states:
            if isinstance(state, Call):
                state.restore(tensors)
        if self.results is not None:
            self.results.restore(tensors)

    def results_of_first_pass(self, like: Tensor) -> list[Handle]:
        # as from ``forward``, from the results of a recomputation's first pass; none if they have come back
        assert self.plan.kept is not None
        self.sp.mark(OUTPUT_PROJECTION)
        going: list[Handle] = []
        for chunk in self.plan.chunks:
            results = self.plan.kept.section("chunk") if chunk.shares[self.sp.rank].queries else None
            self.states.append(results)
            if not self.plan.keeps_received:
                out = like.new_empty(self.plan.seq_length, 0)
                if results is not None:  # an entry of its own where the kernel's output is another tensor
                    out = (results.find("output") or results.find("attention"))[0]
                going.append(self._send_back(chunk, out))
        return going

    def _project_and_send(self, messages: tuple[Message, ...], projection: Projection) -> list[Handle]:
        handles = []
        self.sp.mark(PROJECTION)
        a, weight, bias = projection.a, projection.weight, projection.bias
        for message in messages:
            rows, widths = message.rows, message.widths
            if self.sp.size == 1 and len(rows) == 1:
                handles.append(done(projected(a, take(weight, rows), None if bias is None else take(bias, rows))))
                continue
            send = empty((self.tokens * sum(widths),), dtype=a.dtype, device=a.device)
            of_ranks = take_of_ranks(weight, message), None if bias is None else take_of_ranks(bias, message)
            project_to_ranks(a, *of_ranks, widths, send)
            counts = [self.tokens * width for width in widths]
            from_each = [self.tokens * widths[self.sp.rank]] * self.sp.size
            handles.append(self.sp.exchange_async(message.part, send, counts, from_each))
        return handles

    def _attend(self, chunk: HeadChunk, recv_buffers: list[Tensor], shared: Shared) -> Tensor:
        share = chunk.shares[self.sp.rank]
        if not share.queries:
            self.states.append(None)
            return recv_buffers[0].new_empty(self.plan.seq_length, 0)
        root = self.plan.kept if self.plan.kept is not None else self.results
        results = None if root is None else root.section("chunk")
        fresh = self.heads == "fresh"
        parts = self._received(chunk.fresh.heads, recv_buffers)
        state = attend(self.core, parts, share, shared, results, train=fresh)
        if results is not None and not any(state.out is tensor for tensor in results.find("attention")):
            results.keep("output", state.out)
        self.states.append(state if fresh else results if self.heads == "remade" else None)
        return state.out.detach()

    def _received(self, messages: tuple[Message, ...], recv_buffers: list[Tensor]) -> dict[str, Tensor]:
        # the parts of a chunk, [s, b, width] each, without the padding
        parts: dict[str, Tensor] = {}
        for message, buffer in zip(messages, recv_buffers, strict=True):
            if message.heads[self.sp.rank]:
                parts[message.part] = buffer.view(self.padded_length, self.batch, -1)[: self.plan.seq_length]
        return parts

    def _send_back(self, chunk: HeadChunk, out: Tensor) -> Handle:
        if self.sp.size == 1 and self.padded_length == self.plan.seq_length:  # what is exchanged comes back as it is
            return done(out)
        return self.sp.exchange_async("out", self._padded(out), *self._counts_back(chunk))

    def _padded(self, x: Tensor) -> Tensor:
        # flatten [s, ...], with zeros after the real positions
        if self.padded_length == self.plan.seq_length:
            return x.reshape(-1)
        padded = empty((self.padded_length, x.shape[1:].numel()), dtype=x.dtype, device=x.device)
        padded[: self.plan.seq_length] = x.reshape(self.plan.seq_length, padded.shape[1])
        padded[self.plan.seq_length :].zero_()
        return padded.view(-1)

    def outputs(self, going: list[Handle]) -> Iterator[HeadColumns]:
        # (columns of [tokens, n*d_v], contents of those columns) of the attention's output as it arrives
        # a few pieces as they arrive, so that the product with each overlaps with the next exchange; many side by side,
        # since a product for each would cost more than the copy; in a recomputation that has them as they were
        chunks, count = self.plan.chunks, self.sp.size * len(self.plan.chunks)
        has_received = self.replays and self.plan.keeps_received
        if count == 1 and not has_received:
            piece = going[0].wait().reshape(self.tokens, -1)
            yield slice(0, piece.shape[1]), piece
            return
        heads = [(share.queries, chunk) for chunk in chunks for share in chunk.shares if share.queries]
        every, joins = slice(0, sum(len(queries) for queries, _ in heads) * self.plan.v_width), count > self.few
        if has_received:
            assert self.plan.kept is not None
            places = [every] if joins else [self._columns(queries) for queries, _ in heads]
            yield from zip(places, self.plan.kept.take("received"), strict=True)
        elif not joins:
            yield from self._pieces(heads, going)
        else:
            joined: Tensor | None = None
            for columns, piece in self._pieces(heads, going):
                if joined is None:
                    joined = empty((self.tokens, every.stop), dtype=piece.dtype, device=piece.device)
                joined[:, columns] = piece
            assert joined is not None
            yield every, joined

    def _columns(self, queries: range) -> slice:
        return slice(queries.start * self.plan.v_width, queries.stop * self.plan.v_width)

    def _pieces(self, heads: list[tuple[range, HeadChunk]], going: list[Handle]) -> Iterator[HeadColumns]:
        # the columns that each chunk has of each rank with queries, as the chunks arrive
        handles, current, start, arrived = iter(going), None, 0, torch.empty(0)
        for queries, chunk in heads:
            if chunk is not current:
                current, start, arrived = chunk, 0, next(handles).wait().reshape(-1)
            width = len(queries) * self.plan.v_width
            yield self._columns(queries), arrived[start : start + self.tokens * width].view(self.tokens, width)
            start += self.tokens * width

    # backward

    def backward_to_messages(
        self, grad: Tensor, w_proj: Tensor, under_first_exchange: Callable[[], Tensor | None],
        remade: Projection | None = None,
    ) -> HeadGrads:  # fmt: skip
        """Compute the gradients of the heads, and start sending them to the ranks of their positions.

        ``grad`` is [tokens, h], ``w_proj`` [h, n*d_v], ``remade`` what the heads are made from again.
        """
        chunks, (last, *others) = self.plan.chunks, reversed(range(len(self.plan.chunks)))
        coming = {last: self._project_grad_and_send(chunks[last], grad, w_proj)}
        heads = {last: self._project_and_send(chunks[last].remade.heads, remade)} if remade is not None else {}
        overlapped = under_first_exchange()
        arriving: list[tuple[Message, Handle]] = []
        d_shared: dict[int, list[Tensor]] = {}
        shared: Shared = {}
        sources: dict[int, Graph] = {}
        of_core: list[Tensor | None] = [None] * len(self.core.parameters)
        for index, following in zip_longest([last, *others], others):
            if following is not None:
                coming[following] = self._project_grad_and_send(chunks[following], grad, w_proj)
                if remade is not None:
                    heads[following] = self._project_and_send(chunks[following].remade.heads, remade)
            if remade is not None and not following:  # that was the last one
                remade.a = remade.a.new_empty(0)
            self.sp.mark(ATTENTION)
            d_out = coming.pop(index).wait()
            chunk, (state, self.states[index]) = chunks[index], (self.states[index], None)
            share, messages = chunk.shares[self.sp.rank], chunk.fresh if remade is None else chunk.remade
            if remade is not None:
                parts = self._received(messages.heads, [handle.wait() for handle in heads.pop(index)])
                if isinstance(state, KeptTensors):
                    state = attend(self.core, parts, share, shared, state, train=True)
                    if isinstance(state, Graph) and state.heads[1] is not None:
                        sources[share.uses.start] = state
                del parts
            d_parts: dict[str, Tensor] = {}
            if state is not None:
                why = "heads are to be remade, and nothing was given to make them from"
                assert not isinstance(state, KeptTensors), why
                d_out = d_out.view(self.padded_length, -1)[: self.plan.seq_length].view(state.out.shape)
                d_parts, of_chunk = attend_backward(self.core, state, sources, d_out, share, d_shared)
                d_parts = {part: self._padded(grad) for part, grad in d_parts.items()}
                of_core = [add(total, g) for total, g in zip(of_core, of_chunk, strict=True)]
            if share.keys:
                shared.pop(share.uses.start, None)
            del state
            arriving += self._send_heads_grads_back(messages.gradients, d_parts, grad)
        return HeadGrads(arriving, overlapped, of_core)

    def _project_grad_and_send(self, chunk: HeadChunk, grad: Tensor, w_proj: Tensor) -> Handle:
        self.sp.mark(OUTPUT_PROJECTION)
        if self.sp.size == 1:
            whole = len(self.plan.chunks) == 1
            return done(projected_by(grad, w_proj if whole else w_proj[:, self._columns(chunk.shares[0].queries)]))
        columns = [self._columns(share.queries) for share in chunk.shares]
        to_me, from_me = self._counts_back(chunk)  # the way back, reversed
        send = empty((sum(from_me),), dtype=grad.dtype, device=grad.device)
        project_back_to_ranks(grad, w_proj, columns, send)
        return self.sp.exchange_async("d out", send, from_me, to_me)

    def _send_heads_grads_back(
        self, messages: tuple[Message, ...], d_parts: dict[str, Tensor], like: Tensor
    ) -> list[tuple[Message, Handle]]:
        if self.sp.size == 1:
            return [(message, done(d_parts[message.part])) for message in reversed(messages)]
        started = []
        # v first: its gradient needs no rotation; the receiver waits for the messages in this order
        for message in reversed(messages):
            widths, rank = message.widths, self.sp.rank
            d_buffer = d_parts[message.part] if widths[rank] else like.new_empty(0)
            counts = [self.tokens * widths[rank]] * self.sp.size, [self.tokens * width for width in widths]
            started.append((message, self.sp.exchange_async(f"d {message.part}", d_buffer, *counts)))
        return started

    def is_whole(self, message: Message) -> bool:
        # it carries all heads, in the order of the weight, from and to this rank alone
        return self.sp.size == 1 and len(self.plan.chunks) == 1 and len(message.rows) == 1

    def by_rows(self, arrived: Tensor, message: Message) -> list[tuple[list[slice], Tensor]]:
        # received gradients of a message's heads as (rows of the weight, [tokens, those rows])
        widths = message.widths
        if self.sp.size == 1:
            return [(message.rows, arrived.view(self.tokens, widths[0]))]
        blocks = [block.view(self.tokens, -1) for block in arrived.split([self.tokens * width for width in widths])]
        if self.sp.size <= self.few // 2:
            return [(rows, block) for rows, block in zip(message.of_rank, blocks, strict=True) if rows]
        joined, column = empty((self.tokens, sum(widths)), dtype=arrived.dtype, device=arrived.device), 0
        if len(set(widths)) == 1:
            by_rank = joined.view(self.tokens, self.sp.size, -1)
            by_rank.copy_(arrived.view(self.sp.size, self.tokens, -1).transpose(0, 1))
            return [(message.rows, joined)]
        for block, width in zip(blocks, widths, strict=True):
            joined[:, column : column + width] = block
            column += width
        return [(message.rows, joined)]

    # both

    def _counts_back(self, chunk: HeadChunk) -> tuple[list[int], list[int]]:
        # the element counts of a chunk's attention output: (from this rank to each, from each to this rank)
        counts = [self.tokens * self.plan.v_width * len(share.queries) for share in chunk.shares]
        return [counts[self.sp.rank]] * self.sp.size, counts


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
