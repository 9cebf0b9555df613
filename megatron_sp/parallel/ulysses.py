"""Attention of a block under tensor and Ulysses sequence parallelism, as one autograd function (arXiv:2309.14509).

    x [s/sp, b, h] -> norm -> q, k, v of all heads -> exchange -> [s, b, my heads] -> attention -> exchange -> [s/sp, b, n*d] -> projection

Between the exchanges a rank has the whole sequence for its share of the heads. The projection writes directly to the send buffer, the
receive buffer is the input of the attention, and the attention's output is the send buffer of the exchange back: nothing is permuted.

The heads are processed in chunks (``parallel/heads.py``), each with one or three messages, and the schedule is the same for all modes:

    forward    project 0 | project 1  | attend 0 | project 2 | attend 1 | ...       the exchange of chunk i+1 and the exchange back
                   in 0 -----^  in 1 --------^ out 0 ...                            of chunk i-1 overlap with the attention of chunk i
    backward   the same from the last chunk to the first; dW of the output projection overlaps with the first exchange, the
               gradients of the QKV projection, message by message, with the last ones

Without overlap each exchange is waited for as soon as it has been started. One chunk's attention is an ordinary autograd graph,
which backward runs; the exchanges and projections around it are differentiated by hand. The attention itself is in a ``Core``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_to_all_async
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.comm.recorder import CallSite
from megatron_sp.ops.backward import gradients_of
from megatron_sp.ops.main_grad import MainGrad, put_grad, put_product, put_weight_grad, weight_product
from megatron_sp.ops.memory import empty
from megatron_sp.ops.norm import NormInFront
from megatron_sp.parallel.heads import HeadChunk, Message, Share, runs_of
from megatron_sp.parallel.linear import column_sum, multiply, norm_gradients, normed_by, project_back, rows_of
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

_FEW = 4  # pieces, up to which a product for each is cheaper than putting them side by side

Heads = tuple[Tensor, Tensor | None, Tensor | None]

# what a recorder calls the parts of the computation
PROJECTION, ATTENTION, OUTPUT_PROJECTION, OTHER = "projection", "attention", "output projection", "other"


class Core(Protocol):
    """Interface of the attention on the heads of one chunk, between the exchanges."""

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> Heads:
        """Return q [s, m, r, d] and k, v [s, m, 1, d], rotated and normed, from the received parts, [s, b, width] each.

        k and v are None for a chunk that uses those of an earlier one. May modify the buffers.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        """Compute attention [s, m, r, d], in the order of the share's queries."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters that ``prepare`` uses and no main_grad holds; their gradients go through autograd."""


@dataclass(frozen=True)
class SequenceParallel:
    """The sp group, and how its exchanges are run.

    Attributes:
        group: ranks over which each sequence is split.
        overlap: overlap exchanges with computation; else wait for each at once.
        recorder: records every exchange and the computation between them.
    """

    group: Group = SINGLE_RANK
    overlap: bool = False
    recorder: CallSite | None = None

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank in the sp group."""
        return self.group.rank()

    def mark(self, label: str) -> None:
        """Record that the computation named ``label`` begins, if there is a recorder."""
        if self.recorder is not None:
            self.recorder.mark(label)


NO_SP = SequenceParallel()


@dataclass(frozen=True)
class AttentionPlan:
    """Plan of one block's attention on this rank.

    Attributes:
        chunks: the exchanges of the heads.
        head_dim: d.
        seq_length: s, the real positions; exchanges include padding to a multiple of the ranks, attention does not.
        tp, sp: the groups.
        add_input: add the block's input to the result (the residual stream).
    """

    chunks: tuple[HeadChunk, ...]
    head_dim: int
    seq_length: int
    tp: TensorParallel = NO_TP
    sp: SequenceParallel = NO_SP
    add_input: bool = True


def attention_block(
    x: Tensor, norm: NormInFront | None, qkv: tuple[Tensor, Tensor | None], proj: tuple[Tensor, Tensor | None], core: Core,
    plan: AttentionPlan, *, main_grad: MainGrad | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute proj(attention(qkv(norm(x)))), plus x with ``plan.add_input``.

    Args:
        x: [s/(sp * tp parts), b, h].
        norm: norm before the QKV projection, or None.
        qkv: weight [g*(r+2)*d, h] of this tp rank in group order, bias or None.
        proj: weight [h, n*d] of this tp rank, bias [h] or None.
        core: the attention itself.
        plan: groups and heads.
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
    Returns:
        (the result, of the shape of x; x for a residual branch outside, whose gradient is added inside this op).
    """
    weight, bias, spec = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.spec)
    return _AttentionBlock.apply(x, weight, bias, *qkv, *proj, spec, core, plan, main_grad, torch.is_grad_enabled(), *core.parameters)


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, w_qkv: Tensor, b_qkv: Tensor | None, w_proj: Tensor,
        b_proj: Tensor | None, spec: Any, core: Core, plan: AttentionPlan, main_grad: MainGrad | None, train: bool, *core_params: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.plan, ctx.main_grad, ctx.core_params = spec, plan, main_grad, core_params
        plan.sp.mark(PROJECTION)
        normed, _ = normed_by(x, norm_weight, norm_bias, spec)
        a = plan.tp.enter_async(normed).wait()  # [s/sp, b, h]
        del normed
        ctx.run = run = _Run(plan, core, a, train and any(ctx.needs_input_grad))
        going = run.forward(rows_of(a), w_qkv, b_qkv)
        del a
        y, outs = _project(run.outputs(going), x, w_proj, b_proj, plan)
        ctx.columns = [columns for columns, _ in outs]
        if train:
            ctx.save_for_backward(x, norm_weight, norm_bias, w_qkv, w_proj, *(out for _, out in outs))
        plan.sp.mark(OTHER)
        ctx.params = w_qkv, b_qkv, w_proj, b_proj, norm_weight, norm_bias
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        nothing: tuple[None, ...] = (None,) * (11 + len(ctx.core_params))
        if grad is None:  # only the residual branch was used
            return passed, *nothing
        if ctx.run is None:
            raise RuntimeError("the attention block's backward ran already: its tensors are gone (retain_graph is not supported)")
        (run, ctx.run), plan, main_grad = (ctx.run, None), ctx.plan, ctx.main_grad
        x, norm_weight, norm_bias, w_qkv, w_proj, *outs = ctx.saved_tensors
        param_qkv, param_b_qkv, param_proj, param_b_proj = ctx.params[:4]
        need_x, need_norm_w, need_norm_b, need_qkv, need_b_qkv, need_proj, need_b_proj = ctx.needs_input_grad[:7]
        need_back = need_x or need_norm_w or need_norm_b
        plan.sp.mark(OUTPUT_PROJECTION)
        grad = grad.contiguous()
        # the input may get two gradients from outside: they meet at the end, so that their sum does not live through all of this
        late: Tensor | None = None
        if plan.add_input:
            passed, late = (grad, None) if passed is None else (passed, grad)
        gathered = plan.tp.enter_async(grad)
        g_b_proj = put_grad(main_grad, param_b_proj, column_sum(rows_of(grad))) if need_b_proj else None
        grad2 = rows_of(gathered.wait())

        def weight_of_proj() -> Tensor | None:
            return _grad_of_columns(main_grad, param_proj, grad2, list(zip(ctx.columns, outs, strict=True))) if need_proj else None

        needs_qkv = need_back or need_qkv or need_b_qkv or any(p.requires_grad for p in ctx.core_params)
        if not needs_qkv:
            g_proj = weight_of_proj()
            plan.sp.mark(OTHER)
            return add(passed, late) if need_x else None, None, None, None, None, g_proj, g_b_proj, *nothing[6:]
        arriving, g_proj, g_core = run.backward_to_messages(grad2, w_proj, weight_of_proj)
        del gathered
        plan.sp.mark(PROJECTION)
        normed, stats = normed_by(x, norm_weight, norm_bias, ctx.spec)
        a = plan.tp.enter_async(normed)
        reduced: Handle | None = None
        grad_a = empty((run.tokens, w_qkv.shape[1]), dtype=grad.dtype, device=grad.device) if need_back else None
        weight_grad = _RowWiseGrad(main_grad, param_qkv, run.whole_weight) if need_qkv else None
        bias_grad = _RowWiseGrad(main_grad, param_b_qkv, run.whole_weight) if need_b_qkv else None
        a2: Tensor | None = None
        first = True
        for index, (message, handle) in enumerate(arriving):
            pieces = run.by_rows(handle.wait(), message)  # of rows of the weight, [s/sp * b, rows]
            if grad_a is not None:
                for rows, d_heads in pieces:
                    torch.addmm(grad_a, d_heads, take(w_qkv, rows), beta=0.0 if first else 1.0, out=grad_a)
                    first = False
                if index == len(arriving) - 1:
                    reduced = plan.tp.leave_async(grad_a.view(-1, *x.shape[1:]))
            for rows, d_heads in pieces:
                if bias_grad is not None:
                    bias_grad.put(column_sum(d_heads), rows)
                if weight_grad is not None:
                    a2 = rows_of(a.wait()) if a2 is None else a2
                    weight_grad.put_product(d_heads, a2, rows)
        if a2 is None:
            a.wait()
        del a2, normed
        g_qkv, g_b_qkv = (None if g is None else g.result() for g in (weight_grad, bias_grad))
        if reduced is None:
            plan.sp.mark(OTHER)
            return add(passed, late) if need_x else None, None, None, g_qkv, g_b_qkv, g_proj, g_b_proj, *nothing[6:11], *g_core
        if ctx.spec is None:
            plan.sp.mark(OTHER)
            return add(add(passed, reduced.wait()), late), None, None, g_qkv, g_b_qkv, g_proj, g_b_proj, *nothing[6:11], *g_core
        grad_x, g_norm = norm_gradients(ctx, reduced.wait(), x, norm_weight, norm_bias, stats, (need_x, need_norm_w, need_norm_b), passed)
        if late is not None and grad_x is not None:
            grad_x.add_(late)
        plan.sp.mark(OTHER)
        return grad_x, *g_norm, g_qkv, g_b_qkv, g_proj, g_b_proj, None, None, None, None, None, *g_core


@dataclass
class _ChunkState:
    """Tensors saved for a chunk's backward: received leaves, heads made from them, the attention's detached inputs, its output."""

    recv_buffers: list[Tensor]
    heads: Heads
    leaves: tuple[Tensor, Tensor, Tensor]
    out: Tensor


class _Run:
    """One forward and backward pass of a block's heads through exchanges and attention."""

    def __init__(self, plan: AttentionPlan, core: Core, a: Tensor, train: bool) -> None:
        self.plan, self.core, self.train = plan, core, train
        self.sp, self.batch, self.tokens = plan.sp, a.shape[1], a.shape[0] * a.shape[1]
        self.padded_length = a.shape[0] * plan.sp.size
        self.is_16_bit = a.dtype in (torch.bfloat16, torch.float16)
        self.states: list[_ChunkState | None] = []
        rows = [row for chunk in plan.chunks for message in chunk.messages for of_rank in message.rows for row in of_rank]
        self.whole_weight = len(set(rows)) == len(rows)  # else some rows travel to several ranks

    # forward

    def forward(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> list[Handle]:
        """Run the forward pass on a [tokens, h]; return the handles of the exchanges back, one for each chunk."""
        chunks = self.plan.chunks
        coming = [self._send_heads(chunks[0], a, weight, bias)]
        going: list[Handle] = []
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                coming.append(self._send_heads(chunks[index + 1], a, weight, bias))
            self.sp.mark(ATTENTION)
            recv_buffers = [handle.wait() for handle in coming[index]]
            coming[index] = []
            out = self._attend(chunk, recv_buffers, shared)
            going.append(self._exchange("out", out, *self._counts_back(chunk)))
        self.sp.mark(OUTPUT_PROJECTION)
        return going

    def _send_heads(self, chunk: HeadChunk, a: Tensor, weight: Tensor, bias: Tensor | None) -> list[Handle]:
        """Project a chunk's heads, message by message, and start their exchange."""
        handles = []
        self.sp.mark(PROJECTION)
        for message in chunk.messages:
            rows, widths = self.rows(message), self._widths(message)
            send = empty((self.tokens * sum(widths),), dtype=a.dtype, device=a.device)
            project_to_ranks(a, take(weight, rows), None if bias is None else take(bias, rows), widths, send)
            counts = [self.tokens * width for width in widths]
            handles.append(self._exchange(message.part, send, counts, [self.tokens * widths[self.sp.rank]] * self.sp.size))
        return handles

    def _attend(self, chunk: HeadChunk, recv_buffers: list[Tensor], shared: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Return the attention of this rank's share, flat, with padding after the real positions."""
        share = chunk.shares[self.sp.rank]
        if not share.queries:
            self.states.append(None)
            return recv_buffers[0].new_empty(0)
        s = self.plan.seq_length
        recv_buffers = [buffer.view(self.padded_length, self.batch, -1)[:s] for buffer in recv_buffers]
        if self.train:
            recv_buffers = [buffer.detach().requires_grad_() for buffer in recv_buffers]
        with torch.set_grad_enabled(self.train):
            inside = [_Alias.apply(buffer) for buffer in recv_buffers] if self.train else recv_buffers
            q, k, v = heads = self.core.prepare({m.part: w for m, w in zip(chunk.messages, inside, strict=True)}, share)
            if k is not None and v is not None:
                shared[share.uses.start] = self._leaf(k), self._leaf(v)
            leaves = (self._leaf(q), *shared[share.uses.start])
            out = self.core.attend(*leaves, share)
        self.states.append(_ChunkState(recv_buffers, heads, leaves, out) if self.train else None)
        return self._padded(out.detach())

    def _leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if self.train else x

    def _padded(self, x: Tensor) -> Tensor:
        """Flatten [s, ...], with zeros after the real positions."""
        missing = self.padded_length - self.plan.seq_length
        if missing == 0:
            return x.reshape(-1)
        whole = empty((self.padded_length, x[0].numel()), dtype=x.dtype, device=x.device)
        whole[: self.plan.seq_length] = x.reshape(self.plan.seq_length, -1)
        whole[self.plan.seq_length :].zero_()
        return whole.view(-1)

    def outputs(self, going: list[Handle]) -> Iterator[tuple[slice, Tensor]]:
        """Yield (columns of [tokens, n*d], contents of those columns) of the attention's output as it arrives.

        A few pieces are yielded as they arrive, so that the product with each overlaps with the next exchange. Many are concatenated
        first, since a product for each would cost more than the copy; so are 16-bit pieces, whose sum would be rounded at every step.
        """
        d, chunks = self.plan.head_dim, self.plan.chunks
        pieces = self._pieces(going)
        if self.sp.size * len(chunks) <= _FEW and not self.is_16_bit:
            yield from pieces
            return
        n = sum(len(share.queries) for chunk in chunks for share in chunk.shares)
        whole: Tensor | None = None
        for columns, piece in pieces:
            if whole is None:
                whole = empty((self.tokens, n * d), dtype=piece.dtype, device=piece.device)
            whole[:, columns] = piece
        assert whole is not None
        yield slice(0, n * d), whole

    def _pieces(self, going: list[Handle]) -> Iterator[tuple[slice, Tensor]]:
        d = self.plan.head_dim
        for chunk, handle in zip(self.plan.chunks, going, strict=True):
            arrived, at = handle.wait(), 0
            for share in chunk.shares:
                width = len(share.queries) * d
                if width:
                    block = arrived[at : at + self.tokens * width].view(self.tokens, width)
                    yield slice(share.queries.start * d, share.queries.stop * d), block
                at += self.tokens * width

    # backward

    def backward_to_messages(
        self, grad: Tensor, w_proj: Tensor, under_first_exchange: Callable[[], Tensor | None]
    ) -> tuple[list[tuple[Message, Handle]], Tensor | None, list[Tensor | None]]:
        """Compute the gradients of the heads from that of the output, and start sending them to the ranks of their positions.

        Args:
            grad: [tokens, h].
            w_proj: [h, n*d].
            under_first_exchange: independent work to overlap with the first exchange.
        Returns:
            ([(message, handle)] in the order in which they were started; the result of that work; gradients of the core's parameters).
        """
        chunks = self.plan.chunks
        order = list(reversed(range(len(chunks))))
        coming = {order[0]: self._send_grad(chunks[order[0]], grad, w_proj)}
        found = under_first_exchange()
        arriving: list[tuple[Message, Handle]] = []
        d_shared: dict[int, list[Tensor]] = {}
        of_params: list[Tensor | None] = [None] * len(self.core.parameters)
        for place, index in enumerate(order):
            if place + 1 < len(order):
                coming[order[place + 1]] = self._send_grad(chunks[order[place + 1]], grad, w_proj)
            self.sp.mark(ATTENTION)
            d_out = coming.pop(index).wait()
            chunk, (state, self.states[index]) = chunks[index], (self.states[index], None)
            d_recv_buffers: list[Tensor] = [grad.new_empty(0) for _ in chunk.messages]
            if state is not None:
                d_recv_buffers, more = self._attend_backward(state, d_out, chunk.shares[self.sp.rank], d_shared)
                of_params = [add(total, g) for total, g in zip(of_params, more, strict=True)]
            # v first: its gradient needs no rotation, and whoever waits takes them in this order
            for message, d_wire in reversed(list(zip(chunk.messages, d_recv_buffers, strict=True))):
                widths = self._widths(message)
                mine = [self.tokens * widths[self.sp.rank]] * self.sp.size
                arriving.append((message, self._exchange(f"d {message.part}", d_wire, mine, [self.tokens * width for width in widths])))
        return arriving, found, of_params

    def _send_grad(self, chunk: HeadChunk, grad: Tensor, w_proj: Tensor) -> Handle:
        """Start sending the gradient of a chunk's attention output to the ranks of its heads."""
        self.sp.mark(OUTPUT_PROJECTION)
        d = self.plan.head_dim
        to_me, from_me = self._counts_back(chunk)  # the way back, reversed
        send, at = empty((sum(from_me),), dtype=grad.dtype, device=grad.device), 0
        starts, ranks = [share.queries.start * d for share in chunk.shares], self.sp.size
        apart, left = divmod(w_proj.shape[1], ranks)  # a chunk may be even where the heads as a whole are not
        evenly = left == 0 and len(set(from_me)) == 1 and starts == [starts[0] + r * apart for r in range(ranks)]
        if evenly and ranks > 1:  # one batched GEMM, nothing is copied for it
            blocks = send.view(ranks, self.tokens, -1)
            columns = w_proj.view(-1, ranks, apart)[:, :, starts[0] : starts[0] + blocks.shape[2]]
            torch.bmm(grad.expand(ranks, *grad.shape), columns.transpose(0, 1), out=blocks)
            return self._exchange("d out", send, from_me, to_me)
        for share, count in zip(chunk.shares, from_me, strict=True):
            if count:
                columns = w_proj[:, share.queries.start * d : share.queries.stop * d]
                torch.mm(grad, columns, out=send[at : at + count].view(self.tokens, -1))
            at += count
        return self._exchange("d out", send, from_me, to_me)

    def _attend_backward(
        self, state: _ChunkState, d_out: Tensor, share: Share, d_shared: dict[int, list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of a chunk's receive buffers, flat and padded, and those of the core's parameters."""
        s, group = self.plan.seq_length, share.uses.start
        d_out = d_out.view(self.padded_length, -1)[:s].view(state.out.shape)
        d_q, *d_kv = gradients_of(state.leaves, [state.out], [d_out])
        outputs, gradients = [state.heads[0]], [d_q]
        if share.keys:
            if group in d_shared:  # what the group's other chunks, behind this one, have found
                d_kv = [a + b for a, b in zip(d_kv, d_shared.pop(group), strict=True)]
            outputs += [h for h in state.heads[1:] if h is not None]
            gradients += d_kv
        else:
            d_shared[group] = [a + b for a, b in zip(d_kv, d_shared[group], strict=True)] if group in d_shared else d_kv
        parameters = self.core.parameters
        found = gradients_of([*state.recv_buffers, *parameters], outputs, gradients, allow_unused=True)
        d_recv_buffers = [torch.zeros_like(w) if g is None else g for g, w in zip(found, state.recv_buffers, strict=False)]
        return [self._padded(g) for g in d_recv_buffers], list(found[len(state.recv_buffers) :])

    def by_rows(self, arrived: Tensor, message: Message) -> list[tuple[list[slice], Tensor]]:
        """Split the received gradients of a message's heads into (rows of the weight, [tokens, those rows]), for each rank or in one piece.

        The choice is made as in ``outputs``.
        """
        widths, at = self._widths(message), 0
        blocks = []
        for width in widths:
            blocks.append(arrived[at : at + self.tokens * width].view(self.tokens, width))
            at += self.tokens * width
        if self.sp.size <= _FEW // 2 and not self.is_16_bit:
            found = [(self._runs(rows), block) for rows, block in zip(message.rows, blocks, strict=True)]
            return [(rows, block) for rows, block in found if rows]
        if self.sp.size == 1:
            return [(self.rows(message), blocks[0])]
        whole, column = empty((self.tokens, sum(widths)), dtype=arrived.dtype, device=arrived.device), 0
        if len(set(widths)) == 1:
            whole.view(self.tokens, self.sp.size, -1).copy_(arrived.view(self.sp.size, self.tokens, -1).transpose(0, 1))
            return [(self.rows(message), whole)]
        for block in blocks:
            whole[:, column : column + block.shape[1]] = block
            column += block.shape[1]
        return [(self.rows(message), whole)]

    # both

    def rows(self, message: Message) -> list[slice]:
        """Return the weight rows of a message, for all destinations one after another."""
        return self._runs(tuple(row for of_rank in message.rows for row in of_rank))

    def _runs(self, heads: tuple[int, ...]) -> list[slice]:
        d = self.plan.head_dim
        return [slice(run.start * d, run.stop * d) for run in runs_of(heads)]

    def _widths(self, message: Message) -> list[int]:
        return [len(rows) * self.plan.head_dim for rows in message.rows]

    def _counts_back(self, chunk: HeadChunk) -> tuple[list[int], list[int]]:
        """Return the element counts of a chunk's attention output: (from this rank to each, from each to this rank)."""
        per_head = self.tokens * self.plan.head_dim
        mine = len(chunk.shares[self.sp.rank].queries) * per_head
        return [mine] * self.sp.size, [len(share.queries) * per_head for share in chunk.shares]

    def _exchange(self, name: str, send: Tensor, send_counts: list[int], receive_counts: list[int]) -> Handle:
        receive = send if self.sp.size == 1 else empty((sum(receive_counts),), dtype=send.dtype, device=send.device)
        flight = None
        if self.sp.recorder is not None and self.sp.size > 1:
            flight = self.sp.recorder.start("all_to_all", tuple(send_counts), tuple(receive_counts), send.dtype, name)
        handle = all_to_all_async(send, send_counts, receive, receive_counts, self.sp.group).recorded(flight)
        if self.sp.overlap or self.sp.size == 1:
            return handle
        return Handle(None, handle.wait(), "all_to_all")


def _project(
    pieces: Iterator[tuple[slice, Tensor]], x: Tensor, weight: Tensor, bias: Tensor | None, plan: AttentionPlan
) -> tuple[Tensor, list[tuple[slice, Tensor]]]:
    """Return (leave(sum of piece @ weight[:, columns].T) + bias, plus x with ``plan.add_input``; the pieces)."""
    columns, out = next(pieces)
    rest = iter(pieces)
    second = next(rest, None)
    residual = x if plan.add_input else None
    if second is None:
        return project_back(out.view(-1, x.shape[1], out.shape[1]), weight, bias, residual, plan.tp), [(columns, out)]
    y = empty((out.shape[0] // x.shape[1], x.shape[1], weight.shape[0]), dtype=out.dtype, device=out.device)
    kept = [(columns, out), second]
    torch.mm(out, weight[:, columns].t(), out=rows_of(y))
    torch.addmm(rows_of(y), second[1], weight[:, second[0]].t(), out=rows_of(y))
    for columns, out in rest:
        torch.addmm(rows_of(y), out, weight[:, columns].t(), out=rows_of(y))
        kept.append((columns, out))
    y = plan.tp.leave_async(y).wait()
    if residual is not None:
        y.add_(residual)
    return (y if bias is None else y.add_(bias)), kept


def _grad_of_columns(main_grad: MainGrad | None, weight: Tensor, grad: Tensor, pieces: list[tuple[slice, Tensor]]) -> Tensor | None:
    """Compute the weight gradient of ``_project``, grad.T @ piece in each piece's columns; None if it is in the main_grad."""
    if len(pieces) == 1:
        return put_weight_grad(main_grad, weight, grad, pieces[0][1])
    reserved = main_grad.reserve(weight) if main_grad is not None else None
    view, fresh = (torch.zeros_like(weight), False) if reserved is None else reserved
    for columns, piece in pieces:
        torch.addmm(view[:, columns], grad.t(), piece, beta=0.0 if fresh else 1.0, out=view[:, columns])
    return view if reserved is None else None


class _RowWiseGrad:
    """Gradient of a parameter computed message by message, each for some of its rows."""

    def __init__(self, main_grad: MainGrad | None, param: Tensor, rows_differ: bool) -> None:
        reserved = main_grad.reserve(param) if main_grad is not None else None
        self._held = reserved is not None
        self._view, fresh = reserved if reserved is not None else (torch.zeros_like(param), False)
        if fresh and not rows_differ:
            self._view.zero_()
        self._overwrite = fresh and rows_differ  # every row comes exactly once

    def put_product(self, grad_out: Tensor, x: Tensor, rows: list[slice]) -> None:
        """Add (or write first) grad_out.T @ x, whose rows go to ``rows`` in order."""
        if len(rows) == 1:
            put_product(self._view[rows[0]], grad_out, x, fresh=self._overwrite)
        else:
            self.put(weight_product(grad_out, x, self._view.dtype), rows)

    def put(self, grad: Tensor, rows: list[slice]) -> None:
        at = 0
        for run in rows:
            part = grad[at : at + run.stop - run.start]
            self._view[run].copy_(part) if self._overwrite else self._view[run].add_(part)
            at += run.stop - run.start

    def result(self) -> Tensor | None:
        """Return the gradient for autograd; None if it is in the main_grad."""
        return None if self._held else self._view


class _Alias(torch.autograd.Function):
    """Alias of the same memory that is neither a leaf nor a view, so that it can be rotated in place and still have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def project_to_ranks(a: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], out: Tensor) -> None:
    """Compute a @ weight.T + bias, with the columns for rank r as the r-th block of ``out``.

    Args:
        a: [tokens, h].
        weight: [sum(widths), h].
        out: flat; receives [tokens, width] for each rank, one after another.
    """
    tokens, ranks = a.shape[0], len(widths)
    if len(set(widths)) == 1 and ranks > 1:  # one batched GEMM; ``a`` is not copied for it
        blocks, by_rank = out.view(ranks, tokens, widths[0]), weight.view(ranks, widths[0], -1).transpose(1, 2)
        torch.bmm(a.expand(ranks, *a.shape), by_rank, out=blocks)
        if bias is not None:
            blocks.add_(bias.view(ranks, 1, -1))
        return
    at = column = 0
    for width in widths:
        columns = slice(column, column + width)
        if width:
            multiply(a, weight[columns], None if bias is None else bias[columns], out=out[at : at + tokens * width].view(tokens, width))
        at, column = at + tokens * width, column + width


def take(weight: Tensor, rows: list[slice]) -> Tensor:
    """Return rows of a tensor, in order; a view if they are one run."""
    return weight[rows[0]] if len(rows) == 1 else torch.cat([weight[run] for run in rows]) if rows else weight[:0]


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be None."""
    return a if b is None else b if a is None else a + b
