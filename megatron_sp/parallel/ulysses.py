"""Heads of a block under Ulysses sequence parallelism: projection, exchange, attention and exchange back (arXiv:2309.14509).

    x [s/sp, b, h] -> norm -> q, k, v of all heads -> exchange -> [s, b, my heads] -> attention -> exchange -> [s/sp, b, n*d] -> projection

Between the exchanges a rank has the whole sequence for its share of the heads. The projection writes directly to the
send buffer, the receive buffer is the input of the attention, and the attention's output is the send buffer of the
exchange back: nothing is permuted.

The heads are processed in chunks (``parallel/heads.py``), each with one or three messages, and the schedule is the same
for all modes:

    forward    project 0 | project 1  | attend 0 | project 2 | attend 1 | ...       the exchange of chunk i+1 and the exchange back
                   in 0 -----^  in 1 --------^ out 0 ...                            of chunk i-1 overlap with the attention of chunk i
    backward   the same from the last chunk to the first; dW of the output projection overlaps with the first exchange, the
               gradients of the QKV projection, message by message, with the last ones

Without overlap each exchange is waited for as soon as it has been started. The exchanges and projections are
differentiated by hand. The attention itself is in a ``Core``: where that names a kernel whose backward can be called
(``Core.kernel``), so is one chunk's attention, and else it is an ordinary autograd graph, which backward runs.

A chunk's heads are *fresh* in backward, kept since the forward pass, or *remade*: where attention's results are kept
(``ops/attention_kernels.py``), q, k and v need not be, and backward projects and sends them again, chunk by chunk, so that
only those of two chunks exist at a time. A recomputation that finds the results of its first pass does no more than the
output projection; --recompute-qkv does the same without one.

    backward   again 1 | d out 1 | again 0, attention 1 | d out 0 | attention 0 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_kernels import KeptTensors, LseKernel
from megatron_sp.ops.custom_backward import gradients_of
from megatron_sp.parallel.heads import HeadChunk, Message, Share
from megatron_sp.parallel.linear import projected, projected_by
from megatron_sp.parallel.sequence_parallel import NO_SP, SequenceParallel
from megatron_sp.parallel.split_projection import Piece, project_to_ranks, take, take_of_ranks
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

_FEW = 4  # pieces, up to which a product for each is cheaper than putting them side by side

Heads = tuple[Tensor, Tensor | None, Tensor | None]
"""q, k and v of a chunk."""

# what a recorder calls the parts of the computation
PROJECTION, ATTENTION, OUTPUT_PROJECTION, OTHER = "projection", "attention", "output projection", "other"


class Core(Protocol):
    """Interface of the attention on the heads of one chunk, between the exchanges."""

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> Heads:
        """Return q [s, m, r, d] and k, v [s, m, 1, d], rotated and normed, from the received parts, [s, b, width] each.

        k and v are None for a chunk that uses those of another one. May modify the buffers.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        """Compute attention [s, m, r, d], in the order of the share's queries; ``kept`` as in ``attention_kernels.attend_with``."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters that ``prepare`` uses and no main_grad holds; their gradients go through autograd."""

    def call(
        self, recv_buffers: dict[str, Tensor], share: Share, shared: tuple[Tensor, Tensor] | None
    ) -> tuple[LseKernel, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """Return the kernel that computes the attention and its q, k and v, prepared without a graph, for a backward by hand.

        Args:
            recv_buffers: as of ``prepare``; may be modified, unless None is returned.
            shared: keys and values that an earlier chunk has brought.
        Returns:
            None if autograd has to differentiate ``prepare`` or ``attend``.
        """

    def prepare_backward(self, grads: Heads, shapes: dict[str, torch.Size], share: Share) -> dict[str, Tensor]:
        """Return the gradients of the received parts after ``call``, from those of the heads; they may be in the same memory.

        Args:
            grads: of q, and of k and v if this chunk has brought them.
            shapes: of the parts.
        """


class GraphCore:
    """Base class of a ``Core`` that autograd differentiates."""

    def call(
        self, recv_buffers: dict[str, Tensor], share: Share, shared: tuple[Tensor, Tensor] | None
    ) -> tuple[LseKernel, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """Return None."""
        return None

    def prepare_backward(self, grads: Heads, shapes: dict[str, torch.Size], share: Share) -> dict[str, Tensor]:
        """Raise NotImplementedError: autograd does it."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionPlan:
    """Plan of one block's attention on this rank."""

    chunks: tuple[HeadChunk, ...]  # the exchanges of the heads
    head_dim: int
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
    # keep attention's results instead of q, k and v, which backward projects and exchanges again
    remakes_heads: bool = False

    @cached_property
    def whole_weight(self) -> bool:
        """Every row of the QKV weight goes to one rank; else some travel to several."""
        rows = [
            row for chunk in self.chunks for message in chunk.messages for of_rank in message.rows for row in of_rank
        ]
        return len(set(rows)) == len(rows)


class HeadGrads(NamedTuple):
    """Gradients of the heads on their way to the ranks of their positions."""

    # each message with the handle of its exchange, in the order in which they were started
    arriving: list[tuple[Message, Handle]]
    overlapped: Tensor | None  # result of the work that was overlapped with the first exchange
    of_core: list[Tensor | None]  # gradients of the core's parameters


@dataclass
class Projection:
    """Input of the heads' projection: a [tokens, h], weight and bias; ``a`` is let go as soon as all chunks are projected."""

    a: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass
class _Graph:
    """A chunk's attention as an autograd graph: received leaves, heads made from them, the attention's detached inputs, its output."""

    recv_buffers: dict[str, Tensor]
    heads: Heads
    leaves: tuple[Tensor, Tensor, Tensor]
    out: Tensor


@dataclass
class _Call:
    """A chunk's attention as a call of a kernel, without a graph: the shapes of the received parts, and the kernel's tensors."""

    shapes: dict[str, torch.Size]
    kernel: LseKernel
    tensors: tuple[Tensor, ...]  # q, k, v, output, lse

    @property
    def out(self) -> Tensor:
        return self.tensors[3]

    def release(self) -> tuple[Tensor, ...]:
        # hand out the tensors, to be saved by autograd until ``restore``
        released, self.tensors, self._count = self.tensors, (), len(self.tensors)
        return released

    def restore(self, saved: Iterator[Tensor]) -> None:
        self.tensors = tuple(islice(saved, self._count))


class HeadsPass:
    """One forward and backward pass of a block's heads through exchanges and attention.

    Both passes have three phases for each chunk: project and send, attend, send back.
    """

    def __init__(self, plan: AttentionPlan, core: Core, x: Tensor, train: bool) -> None:
        self.plan, self.core = plan, core
        positions = x.shape[0] * plan.tp.parts
        self.sp, self.batch, self.tokens = plan.sp, x.shape[1], positions * x.shape[1]
        self.padded_length = positions * plan.sp.size
        self.is_alone = plan.sp.size == 1 and positions == plan.seq_length  # what is exchanged comes back as it is
        self.is_16_bit = x.dtype in (torch.bfloat16, torch.float16)
        self.replays = plan.kept is not None and plan.kept.replays
        # what backward finds of q, k and v; "none" if there is no backward
        self.heads: Literal["none", "fresh", "remade"] = "none"
        if train:
            self.heads = "remade" if self.replays or plan.remakes_heads else "fresh"
        # saved with the op, unless they are those of a recomputation around it
        self.results = KeptTensors() if self.heads == "remade" and not self.replays else None
        # of each chunk, for backward: its attention, or the results with which that is made again; None if there is no
        # backward, or if this rank has no queries in the chunk
        self.states: list[_Graph | _Call | KeptTensors | None] = []

    # forward

    def forward(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> list[Handle]:
        """Run the forward pass on a [tokens, h]; return the handles of the exchanges back, one for each chunk."""
        chunks, projection = self.plan.chunks, Projection(a, weight, bias)
        coming = [self._project_and_send(chunks[0].messages, projection)]
        going: list[Handle] = []
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                coming.append(self._project_and_send(chunks[index + 1].messages, projection))
            self.sp.mark(ATTENTION)
            recv_buffers = [handle.wait() for handle in coming[index]]
            coming[index] = []
            out = self._attend(chunk, recv_buffers, shared)
            if index + 1 < len(chunks):
                uses = chunk.shares[self.sp.rank].uses
                if not any(later.shares[self.sp.rank].uses == uses for later in chunks[index + 1 :]):
                    shared.pop(uses.start, None)
            going.append(self._send_back(chunk, out))
        self.sp.mark(OUTPUT_PROJECTION)
        return going

    def release(self) -> list[Tensor]:
        """Hand out the tensors that backward needs and no graph has saved, until ``restore``."""
        released: list[Tensor] = []
        for state in self.states:
            if isinstance(state, _Call):  # a graph has saved what it needs
                released += state.release()
        return released if self.results is None else released + self.results.release()

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Take back what ``release`` has handed out."""
        tensors = iter(saved)
        for state in self.states:
            if isinstance(state, _Call):
                state.restore(tensors)
        if self.results is not None:
            self.results.restore(tensors)

    def results_of_first_pass(self, like: Tensor) -> list[Handle]:
        """Return what ``forward`` does, from the results that a recomputation has of its first pass; none if it has what they brought.

        Args:
            like: has the dtype and the device of the activations.
        """
        assert self.plan.kept is not None
        self.sp.mark(OUTPUT_PROJECTION)
        going: list[Handle] = []
        for chunk in self.plan.chunks:
            results = self.plan.kept.section("chunk") if chunk.shares[self.sp.rank].queries else None
            self.states.append(results)
            if not self.plan.keeps_received:
                out = _output_of(results) if results is not None else like.new_empty(self.plan.seq_length, 0)
                going.append(self._send_back(chunk, out))
        return going

    def _project_and_send(self, messages: tuple[Message, ...], projection: Projection) -> list[Handle]:
        handles = []
        self.sp.mark(PROJECTION)
        a, weight, bias = projection.a, projection.weight, projection.bias
        for message in messages:
            table = message.table(self.plan.head_dim)
            rows, widths = table.rows, table.widths
            if self.sp.size == 1 and len(rows) == 1:
                handles.append(done(projected(a, take(weight, rows), None if bias is None else take(bias, rows))))
                continue
            send = empty((self.tokens * sum(widths),), dtype=a.dtype, device=a.device)
            project_to_ranks(
                a, take_of_ranks(weight, table), None if bias is None else take_of_ranks(bias, table), widths, send
            )
            counts = [self.tokens * width for width in widths]
            handles.append(
                self.sp.exchange_async(message.part, send, counts, [self.tokens * widths[self.sp.rank]] * self.sp.size)
            )
        return handles

    def _attend(self, chunk: HeadChunk, recv_buffers: list[Tensor], shared: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        share = chunk.shares[self.sp.rank]
        if not share.queries:
            self.states.append(None)
            return recv_buffers[0].new_empty(self.plan.seq_length, 0)
        root = self.plan.kept if self.plan.kept is not None else self.results
        results = None if root is None else root.section("chunk")
        fresh = self.heads == "fresh"
        state = self._state(chunk.messages, recv_buffers, share, shared, results, train=fresh)
        if results is not None and not any(state.out is tensor for tensor in results.find("attention")):
            results.keep("output", state.out)
        self.states.append(state if fresh else results if self.heads == "remade" else None)
        return state.out.detach()

    def _state(
        self, messages: tuple[Message, ...], recv_buffers: list[Tensor], share: Share, shared: dict[int, tuple[Tensor, Tensor]],
        results: KeptTensors | None, *, train: bool,
    ) -> _Graph | _Call:  # fmt: skip
        """Compute the attention of a share from what has been received.

        Args:
            shared: keys and values of other chunks, by the group's number; those of this one are added.
        """
        s, group = self.plan.seq_length, share.uses.start
        buffers: dict[str, Tensor] = {}
        for message, buffer in zip(messages, recv_buffers, strict=True):
            if message.rows[self.sp.rank]:
                whole = buffer.view(self.padded_length, self.batch, -1)
                buffers[message.part] = whole if self.padded_length == s else whole[:s]
        found = self.core.call(buffers, share, shared.get(group)) if train else None
        if found is not None:
            kernel, *operands = found
            shared[group] = operands[1], operands[2]
            computed = kernel.forward(*operands) if results is None else results.take("attention")
            return _Call({part: buffer.shape for part, buffer in buffers.items()}, kernel, (*operands, *computed))
        if train:
            buffers = {part: buffer.detach().requires_grad_() for part, buffer in buffers.items()}
        with torch.set_grad_enabled(train):
            inside = {part: _Alias.apply(buffer) for part, buffer in buffers.items()} if train else buffers
            q, k, v = heads = self.core.prepare(dict(inside), share)
            if k is not None and v is not None:
                shared[group] = _leaf(k, train), _leaf(v, train)
            elif train and not shared[group][0].requires_grad:  # a call has brought them
                shared[group] = _leaf(shared[group][0], train), _leaf(shared[group][1], train)
            leaves = (_leaf(q, train), *shared[group])
            out = self.core.attend(*leaves, share, results)
        return _Graph(buffers, heads, leaves, out)

    def _send_back(self, chunk: HeadChunk, out: Tensor) -> Handle:
        return (
            done(out) if self.is_alone else self.sp.exchange_async("out", self._padded(out), *self._counts_back(chunk))
        )

    def _padded(self, x: Tensor) -> Tensor:
        # flatten [s, ...], with zeros after the real positions
        if self.padded_length == self.plan.seq_length:
            return x.reshape(-1)
        whole = empty((self.padded_length, x.shape[1:].numel()), dtype=x.dtype, device=x.device)
        whole[: self.plan.seq_length] = x.reshape(self.plan.seq_length, whole.shape[1])
        whole[self.plan.seq_length :].zero_()
        return whole.view(-1)

    def outputs(self, going: list[Handle]) -> Iterator[Piece]:
        """Yield (columns of [tokens, n*d], contents of those columns) of the attention's output as it arrives.

        A few pieces are yielded as they arrive, so that the product with each overlaps with the next exchange. Many are
        concatenated first, since a product for each would cost more than the copy; so are 16-bit pieces, whose sum
        would be rounded at every step. In a recomputation that has them they are yielded as they were.
        """
        d, chunks = self.plan.head_dim, self.plan.chunks
        count = self.sp.size * len(chunks)
        has_received = self.replays and self.plan.keeps_received
        if count == 1 and not has_received:
            yield slice(0, len(chunks[0].shares[0].queries) * d), going[0].wait().reshape(self.tokens, -1)
            return
        joins = count > 1 and (count > _FEW or self.is_16_bit)
        n = sum(len(share.queries) for chunk in chunks for share in chunk.shares)
        if has_received:
            assert self.plan.kept is not None
            places = [slice(0, n * d)] if joins else [columns for columns, _ in self._columns()]
            yield from zip(places, self.plan.kept.take("received"), strict=True)
            return
        pieces = self._pieces(going)
        if not joins:
            yield from pieces
            return
        whole: Tensor | None = None
        for columns, piece in pieces:
            if whole is None:
                whole = empty((self.tokens, n * d), dtype=piece.dtype, device=piece.device)
            whole[:, columns] = piece
        assert whole is not None
        yield slice(0, n * d), whole

    def _columns(self) -> Iterator[tuple[slice, HeadChunk]]:
        # the columns of [tokens, n*d] that each chunk has of each rank, with the chunk; none for a rank without queries
        d = self.plan.head_dim
        for chunk in self.plan.chunks:
            yield from ((slice(s.queries.start * d, s.queries.stop * d), chunk) for s in chunk.shares if s.queries)

    def _pieces(self, going: list[Handle]) -> Iterator[Piece]:
        waiting, current, at, arrived = iter(going), None, 0, torch.empty(0)
        for columns, chunk in self._columns():
            if chunk is not current:
                current, at, arrived = chunk, 0, next(waiting).wait().reshape(-1)
            width = columns.stop - columns.start
            yield columns, arrived[at : at + self.tokens * width].view(self.tokens, width)
            at += self.tokens * width

    # backward

    def backward_to_messages(
        self, grad: Tensor, w_proj: Tensor, under_first_exchange: Callable[[], Tensor | None], remade: Projection | None = None
    ) -> HeadGrads:  # fmt: skip
        """Compute the gradients of the heads from that of the output, and start sending them to the ranks of their positions.

        Args:
            grad: [tokens, h].
            w_proj: [h, n*d].
            under_first_exchange: independent work to overlap with the first exchange.
            remade: what the heads are made from again; None if they are there.
        """
        chunks, (last, *others) = self.plan.chunks, reversed(range(len(self.plan.chunks)))
        coming = {last: self._project_grad_and_send(chunks[last], grad, w_proj)}
        again = {last: self._project_and_send(chunks[last].again, remade)} if remade is not None else {}
        overlapped = under_first_exchange()
        arriving: list[tuple[Message, Handle]] = []
        d_shared: dict[int, list[Tensor]] = {}
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        sources: dict[int, _Graph] = {}
        of_core: list[Tensor | None] = [None] * len(self.core.parameters)
        for index, following in zip_longest([last, *others], others):
            if following is not None:
                coming[following] = self._project_grad_and_send(chunks[following], grad, w_proj)
                if remade is not None:
                    again[following] = self._project_and_send(chunks[following].again, remade)
            if remade is not None and not following:  # that was the last one
                remade.a = remade.a.new_empty(0)
            self.sp.mark(ATTENTION)
            d_out = coming.pop(index).wait()
            chunk, (state, self.states[index]) = chunks[index], (self.states[index], None)
            share, messages = chunk.shares[self.sp.rank], chunk.messages
            if remade is not None:
                messages = chunk.back
                recv_buffers = [handle.wait() for handle in again.pop(index)]
                if isinstance(state, KeptTensors):
                    state = self._state(chunk.again, recv_buffers, share, shared, state, train=True)
                    if isinstance(state, _Graph) and state.heads[1] is not None:
                        sources[share.uses.start] = state
                del recv_buffers
            d_recv_buffers: dict[str, Tensor] = {}
            if state is not None:
                assert not isinstance(state, KeptTensors), (
                    "the heads were to be made again, and nothing was given to make them from"
                )
                d_recv_buffers, of_chunk = self._attend_backward(state, sources, d_out, share, d_shared)
                of_core = [add(total, g) for total, g in zip(of_core, of_chunk, strict=True)]
            if share.keys:
                shared.pop(share.uses.start, None)
            del state
            arriving += self._send_heads_grads_back(messages, d_recv_buffers, grad)
        return HeadGrads(arriving, overlapped, of_core)

    def _project_grad_and_send(self, chunk: HeadChunk, grad: Tensor, w_proj: Tensor) -> Handle:
        self.sp.mark(OUTPUT_PROJECTION)
        d = self.plan.head_dim
        if self.sp.size == 1:
            queries = chunk.shares[0].queries
            is_whole = len(queries) * d == w_proj.shape[1]
            return done(projected_by(grad, w_proj if is_whole else w_proj[:, queries.start * d : queries.stop * d]))
        to_me, from_me = self._counts_back(chunk)  # the way back, reversed
        send, at = empty((sum(from_me),), dtype=grad.dtype, device=grad.device), 0
        starts, ranks = [share.queries.start * d for share in chunk.shares], self.sp.size
        apart, left = divmod(w_proj.shape[1], ranks)  # a chunk may be even where the heads as a whole are not
        evenly = left == 0 and len(set(from_me)) == 1 and starts == [starts[0] + r * apart for r in range(ranks)]
        if evenly and ranks > 1:  # one batched GEMM, nothing is copied for it
            blocks = send.view(ranks, self.tokens, -1)
            columns = w_proj.view(-1, ranks, apart)[:, :, starts[0] : starts[0] + blocks.shape[2]]
            torch.bmm(grad.expand(ranks, *grad.shape), columns.transpose(0, 1), out=blocks)
            return self.sp.exchange_async("d out", send, from_me, to_me)
        for share, count in zip(chunk.shares, from_me, strict=True):
            if count:
                columns = w_proj[:, share.queries.start * d : share.queries.stop * d]
                torch.mm(grad, columns, out=send[at : at + count].view(self.tokens, -1))
            at += count
        return self.sp.exchange_async("d out", send, from_me, to_me)

    def _attend_backward(
        self,
        state: _Graph | _Call,
        sources: dict[int, _Graph],
        d_out: Tensor,
        share: Share,
        d_shared: dict[int, list[Tensor]],
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Return the gradients of a chunk's receive buffers, flat and padded, and those of the core's parameters.

        Args:
            sources: of heads that are made again, the states with the groups' keys and values.
            d_shared: gradients of keys and values from a group's later chunks, whose backward ran first.
        """
        s, group = self.plan.seq_length, share.uses.start
        d_out = (d_out if self.padded_length == s else d_out.view(self.padded_length, -1)[:s]).view(state.out.shape)
        if isinstance(state, _Call):
            d_q, *d_kv = state.kernel.backward(d_out, *state.tensors)
        else:
            d_q, *d_kv = gradients_of(state.leaves, [state.out], [d_out])
        if group in d_shared:
            d_kv = [a + b for a, b in zip(d_kv, d_shared.pop(group), strict=True)]
        if isinstance(state, _Call):
            if not share.keys:
                d_shared[group] = d_kv
            heads = (d_q, d_kv[0], d_kv[1]) if share.keys else (d_q, None, None)
            found = self.core.prepare_backward(heads, state.shapes, share)
            return {part: self._padded(grad) for part, grad in found.items()}, [None] * len(self.core.parameters)
        outputs, gradients, buffers = (
            [state.heads[0]],
            [d_q],
            {part: b for part, b in state.recv_buffers.items() if part != "kv"},
        )
        if share.keys:
            source = sources.pop(group, state)
            outputs += [h for h in source.heads[1:] if h is not None]
            gradients += d_kv
            buffers |= {part: b for part, b in source.recv_buffers.items() if part == "kv"}
        else:
            d_shared[group] = d_kv
        trained = [p for p in self.core.parameters if p.requires_grad]  # autograd refuses a frozen one
        made = gradients_of([*buffers.values(), *trained], outputs, gradients, allow_unused=True)
        d_recv_buffers = {
            part: self._padded(torch.zeros_like(w) if g is None else g)
            for (part, w), g in zip(buffers.items(), made, strict=False)
        }
        of_trained = iter(made[len(buffers) :])
        return d_recv_buffers, [next(of_trained) if p.requires_grad else None for p in self.core.parameters]

    def _send_heads_grads_back(
        self, messages: tuple[Message, ...], d_recv_buffers: dict[str, Tensor], like: Tensor
    ) -> list[tuple[Message, Handle]]:
        if self.sp.size == 1:
            return [(message, done(d_recv_buffers[message.part])) for message in reversed(messages)]
        started = []
        for message in reversed(
            messages
        ):  # v first: its gradient needs no rotation; the receiver waits for the messages in this order
            widths = message.table(self.plan.head_dim).widths
            mine, theirs = (
                [self.tokens * widths[self.sp.rank]] * self.sp.size,
                [self.tokens * width for width in widths],
            )
            d_buffer = d_recv_buffers[message.part] if widths[self.sp.rank] else like.new_empty(0)
            started.append((message, self.sp.exchange_async(f"d {message.part}", d_buffer, mine, theirs)))
        return started

    def is_whole(self, message: Message) -> bool:
        """Return whether a message carries all heads, in the order of the weight, from and to this rank alone."""
        return self.sp.size == 1 and len(self.plan.chunks) == 1 and len(message.table(self.plan.head_dim).rows) == 1

    def by_rows(self, arrived: Tensor, message: Message) -> list[tuple[list[slice], Tensor]]:
        """Split the received gradients of a message's heads into (rows of the weight, [tokens, those rows]), for each rank or in one piece.

        The choice is made as in ``outputs``.
        """
        every, of_rank, widths, _ = message.table(self.plan.head_dim)
        at = 0
        if self.sp.size == 1:
            return [(every, arrived.view(self.tokens, widths[0]))]
        blocks = []
        for width in widths:
            blocks.append(arrived[at : at + self.tokens * width].view(self.tokens, width))
            at += self.tokens * width
        if self.sp.size <= _FEW // 2 and not self.is_16_bit:
            return [(rows, block) for rows, block in zip(of_rank, blocks, strict=True) if rows]
        whole, column = empty((self.tokens, sum(widths)), dtype=arrived.dtype, device=arrived.device), 0
        if len(set(widths)) == 1:
            whole.view(self.tokens, self.sp.size, -1).copy_(arrived.view(self.sp.size, self.tokens, -1).transpose(0, 1))
            return [(every, whole)]
        for block in blocks:
            whole[:, column : column + block.shape[1]] = block
            column += block.shape[1]
        return [(every, whole)]

    # both

    def _counts_back(self, chunk: HeadChunk) -> tuple[list[int], list[int]]:
        # the element counts of a chunk's attention output: (from this rank to each, from each to this rank)
        per_head = self.tokens * self.plan.head_dim
        mine = len(chunk.shares[self.sp.rank].queries) * per_head
        return [mine] * self.sp.size, [len(share.queries) * per_head for share in chunk.shares]


def _leaf(x: Tensor, train: bool) -> Tensor:
    return x.detach().requires_grad_() if train else x


def _output_of(results: KeptTensors) -> Tensor:
    # a chunk's output [s, m, r, d]: an entry of its own where the kernel's is another tensor
    return (results.find("output") or results.find("attention"))[0]


class _Alias(torch.autograd.Function):
    """Alias of the same memory that is neither a leaf nor a view, so that it can be rotated in place and still have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be None."""
    return a if b is None else b if a is None else a + b
