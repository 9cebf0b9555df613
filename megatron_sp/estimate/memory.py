"""Memory of one rank in closed form: memory held throughout, and the additional memory of a training step at its peak.

    resident    parameters, master weights (16-bit models), optimizer state, the micro-batches; with ZeRO their shards, and buffers
    forward     activations of every block saved for backward, plus the LM head: one chunk of logits, its gradient, the table's gradient
    backward    from the last block to the first: activations of the blocks below, gradients of the blocks above
    update      all gradients

Gradients take memory from the first one of a step to the start of the next step (``optim/flat.py``), so backward frees activations while it
produces gradients, and the peak is at the head, at a block's backward, at a reduction, or at the update, depending on the shapes. All of
these are computed, tensor by tensor, following ``models/transformer.py``, ``parallel/ulysses.py``, ``parallel/linear.py`` and
``parallel/lm_head.py``. ``estimate/memory_sizes.py`` has the size of each, ``estimate/memory_zero.py`` the sharding of parameters and
gradients.

Only tensors are counted, as an allocator does: no fragmentation, NCCL buffers, or working memory inside a kernel. This module does not
import torch: a plan needs no devices. ``tests/dist/test_memory_form.py`` compares it with measured steps.
"""

from __future__ import annotations

from typing import Literal

from megatron_sp.config.schema import BatchConfig, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.memory_mlp import activation_backward
from megatron_sp.estimate.memory_plan import Line, MemoryPlan, Moment, merged, total
from megatron_sp.estimate.memory_sizes import Sizes
from megatron_sp.estimate.memory_zero import Held
from megatron_sp.utils.numbers import window_tile


def memory_plan(
    model: ModelConfig, parallel: ParallelConfig, kernels: KernelConfig, batch: BatchConfig, precision: PrecisionConfig,
    *, data_parallel_size: int = 1, optimizer: Literal["adam", "sgd"] = "adam", device: Literal["cpu", "cuda"] = "cpu",
    head_share: float = 1.0,
) -> MemoryPlan:  # fmt: skip
    """Return the memory of the rank that holds most (sp rank 0: the first ranks get the remainder of the heads).

    Args:
        model, parallel, kernels, batch, precision: validated configuration of the run, with the model's ``vocab_size`` set.
        data_parallel_size: dp, for the number of micro-batches and of ZeRO's shards.
        optimizer: optimizer whose state is counted.
        device: determines kernels and temporaries.
        head_share: share of the positions that BERT's head processes on a CPU: the masked ones (--mask-prob).
    """
    return Form(model, parallel, kernels, batch, precision, data_parallel_size, device, head_share).plan(optimizer)


class Form(Sizes):
    """Memory at each candidate for the peak of a step."""

    def plan(self, optimizer: str) -> MemoryPlan:
        """Memory of a rank: what stays, and the moments that may be the peak."""
        zero = self.zero
        kept = zero.num_params // zero.parts * self.wide
        data = self.num_micro_batches * self.all_tokens * (8 + 8 + 4 + 8 * self.model.is_bert)
        stays = [
            Line("parameters", zero.kept_params * self.e), Line("buffers for whole parameters", zero.buffers * self.e),
            Line("master weights", kept if self.is_16_bit else 0),
            Line("optimizer state", kept * (2 if optimizer == "adam" else 1)),
            Line("micro-batches", data), Line("tables of the forward pass", self._tables()),
            Line("activations' copies in host memory", 0 if self.cuda else self.host),
        ]  # fmt: skip
        moments = [self._head(), self._head_end(), self._attention_forward(), self._last_forward(), *self._head_backward()]
        for layer in self._telling_layers():
            moments += [
                *self._norm_behind_backward(layer),
                self._mlp_backward(layer),
                *self._fc1_backward(layer),
                *self._attention_backward(layer),
            ]
        stream = self._in_backward()
        widened = Line("table's gradient, widened", self._widened())
        moments.append(Moment("backward", "embedding", (*_gradients(zero.at(0)), *stream, widened)))
        moments += self._reductions()
        moments.append(Moment("update", "optimizer", _gradients(zero.after())))
        return MemoryPlan(tuple(stays), tuple(moments), self.host)

    def _telling_layers(self) -> list[int]:
        """Return the layers, last first, that can be at the peak: memory that changes evenly from block to block is largest at an end."""
        chunks = {last - first for first, last in self.recomputed}
        even = not chunks or (chunks == {1} and len(self.recomputed) == self.layers)
        ends = {0, 1, self.layers - 2, self.layers - 1} if even else set(range(self.layers))
        return sorted((layer for layer in ends if 0 <= layer < self.layers), reverse=True)

    def _reductions(self) -> list[Moment]:
        """Moments of gradient reductions: when backward leaves a unit, and after the backward pass."""
        made, packed = [], [Line("what tp ranks sum, packed", self.shared(unit) * self.wide) for unit in range(self.layers + 2)]
        stream = [Line("gradient of the stream", self.stream), Line("gradient of the head's input", self.head_stream)]
        blocks = self._kept_by_blocks()
        for held in self.zero.reducing(self.layers + 1):
            made.append(Moment("backward", "reduction of the head", (*_gradients(held), self._head_params(), *blocks, *stream)))
        for layer in self._telling_layers():
            for held in self.zero.reducing(layer + 1):
                lines = (*_gradients(held), *self.kept_below(layer), *stream, packed[layer + 1])
                made.append(Moment("backward", f"{self._place(layer)} block, reduction", lines))
        made += [
            Moment("backward", "reductions behind the backward pass", (*_gradients(held), packed[0])) for held in self.zero.reducing(0)
        ]
        return made

    def _tables(self) -> int:
        """Return the bytes of positions, rotary tables, dropout's token keys and sliding-window masks."""
        rotary = self.length * self.model.rotary_dim // 2 * 2 * max(4, self.wide) if self.model.position_embedding_type == "rope" else 0
        keys = 8 * (self.all_tokens + self.tp_seq_tokens) if self.dropout or self.model.attention_dropout > 0 else 0
        return 8 * self.length + rotary + keys + self._window_masks()

    def _window_masks(self) -> int:
        """Return the bytes of the CPU kernel's sliding-window masks: one for all tiles but the last (``ops/packed_attention.py``)."""
        window = self.model.window_size
        if self.cuda or self.uses_reference or window is None or window == 1 or window >= self.length:
            return 0
        rest, tile = self.length - window, window_tile(window)
        sizes = {min(tile, rest), rest % tile}
        return sum(queries * (window - 1 + queries) for queries in sizes) * self.e

    def _widened(self) -> int:
        return self.sp_tokens * self.h * self.wide if self.is_16_bit else 0

    def _kept_by_blocks(self) -> list[Line]:
        recomputed = sum(last - first for first, last in self.recomputed)
        stored, inputs = self.layers - recomputed, len(self.recomputed)
        here = {line.name for line in self.block_keeps} - {line.name for line in self._stay_of_block} if self.offloads else set()
        if self.offloads:  # the last stage alone
            inputs = int(self.stages[-1][2])
        of_moved = stored if not self.offloads else 1 - inputs
        kept = [Line(line.name, (of_moved if line.name in here else stored) * line.num_bytes) for line in merged(self.block_keeps)]
        return [*kept, Line("inputs of recomputed blocks", inputs * self.stream), self._embedding_norm]

    def _kept_by_all(self) -> list[Line]:
        """Activations saved at the end of the forward pass: those of all blocks, of norms outside them, and of BERT's head."""
        final = Line("final norm's input", 0 if self.post else self.stream + self.norm_stats)
        return [*self._kept_by_blocks(), final, *self._bert_head()]

    def _bert_head(self) -> list[Line]:
        """Activations saved by BERT's head: the inputs of its linear layer, activation and norm."""
        return [Line("BERT's head", 3 * self.head_tokens * self.h * self.e)] if self.model.is_bert else []

    def _head_lines(self) -> list[Line]:
        tokens, bert = self.head_tokens, self.model.is_bert
        chunk = min(tokens, self.head_chunk)
        logits = chunk * self.rows * self.wide
        # a last chunk that is shorter gets logits of its own while the others' still exist
        rest = tokens % chunk * self.rows * self.wide
        beside = "head's input of a chunk, weighted, or the last chunk's logits"
        more = chunk * self.rows * (self.wide + self.e) if self.is_16_bit else 0  # divided, and rounded
        product = self.rows * self.h * self.e if self.is_16_bit and not self.cuda else 0  # a GPU adds it up in fp32, at its place
        buffer = self._head_buffer()
        before = self.head_stream if self.num_micro_batches > 1 else 0
        entering = tokens * self.h * self.e if bert else self.stream
        return [
            *_gradients(self.zero.at_head()), self._head_params(), *self._kept_by_all(), Line("head's input", entering),
            Line("head's input, gathered", 0 if bert else self.gathered), Line("gradient of the head's input", tokens * self.h * self.e),
            Line("one chunk of logits", logits), Line("its gradient", more), Line("gradient of the table, one chunk", product),
            Line("gradient of the table", buffer), Line(beside, max(chunk * self.h * self.e, rest)),
            Line("the last micro-batch's gradient of the head's input", before),
            Line("labels, masks", self.sp_tokens * 16 + chunk * 20),
            Line("labels of the masked tokens", tokens * 21 if bert else 0),
        ]  # fmt: skip

    def _head_params(self) -> Line:
        return Line("buffer for the head's parameters", self.zero.head_buffer * self.e)

    def _head_buffer(self) -> int:
        """Bytes of the table's gradient beside that of earlier micro-batches in the flat buffer; 0 at stages 2 and 3, which reduce that."""
        return self.rows * self.h * self.wide if self.num_micro_batches > 1 and self.zero.stage < 2 else 0

    def _head(self) -> Moment:
        return Moment("forward", "LM head", tuple(self._head_lines()))

    def _head_end(self) -> Moment:
        """Moment at the end of the LM head: the reduction of its input's gradient starts while the last chunk of logits still exists."""
        gone = ("head's input of a chunk, weighted, or the last chunk's logits", "gradient of the table, one chunk")
        kept = [line for line in self._head_lines() if line.name not in gone]
        last = self.head_tokens % min(self.head_tokens, self.head_chunk)
        if last:  # it has taken the place of the others' logits
            logits = "one chunk of logits", "its gradient"
            shorter = last / min(self.head_tokens, self.head_chunk)
            kept = [Line(line.name, round(line.num_bytes * shorter)) if line.name in logits else line for line in kept]
        return Moment(
            "forward",
            "end of the LM head",
            (*kept, Line("gradient of the head's input, scattered", 0 if self.model.is_bert else self.scattering)),
        )

    def _head_backward(self) -> list[Moment]:
        """Moments of the LM head's backward: before waiting for the reduction, and after it, when the gradient is scaled."""
        table = Line("gradient of the table", self._head_buffer())
        base = [*_gradients(self.zero.at_head()), self._head_params(), *self._kept_by_all(), table]
        if self.model.is_bert:
            return [self._bert_head_backward(base)]
        waiting = Line("gradient of the head's input", self.whole_stream + self.scattering)
        times = self.stream * self.wide // self.e + (self.stream if self.is_16_bit else 0)
        scaled = [Line("gradient of the head's input", self.stream), Line("gradient of the head's input, times what arrives", times)]
        return [Moment("backward", "LM head begins", (*base, waiting)), Moment("backward", "LM head", (*base, *scaled))]

    def _bert_head_backward(self, base: list[Line]) -> Moment:
        """Moment at which BERT's head scatters gradients from the masked positions to all; those of the order head are separate."""
        both = 2 if self.model.has_order_head else 1
        spread = Line("gradient of the head's input, at all positions", both * self.whole_stream)
        return Moment("backward", "LM head", (*base, Line("gradient of the head's input", 2 * self.head_stream), spread))

    def _attention_forward(self) -> Moment:
        """Moment of the forward pass in the attention of the last block."""
        mlp = 0 if self.recomputed else -total(self.mlp_keeps)
        kept = self._kept_by_blocks()
        keeps = total(self.attention_keeps) if self.recomputed else 0
        makes = self.attention_blocks
        if self.uses_reference:
            # without gradients the mask is gone before the last product
            mask = self._scores // self.wide if self.model.attention_dropout > 0 and self.kernels.recompute_granularity else 0
            makes = self._reference_makes + self._reference_keeps - mask - (0 if self.recomputed else self.kernel_keeps)
            keeps -= self.kernel_keeps if self.recomputed else 0
        return Moment(
            "forward", "attention of the last block",
            (
                *_gradients(self.zero.forward()), self._head_params(), *kept, Line("MLP, not there yet", mlp), self._leaving(),
                Line("of a recomputed block", keeps), Line("attention kernel's temporaries", makes),
            ),
        )  # fmt: skip

    def _last_forward(self) -> Moment:
        """Moment at the end of the last block's forward pass: the MLP's activation and the block's output."""
        inside = total(self.mlp_keeps) if self.recomputed else 0
        lines = self._kept_by_blocks()
        made = [Line("MLP, behind the activation", self.sp_tokens * self.ffn * self.e), Line("block's output", self.whole_stream)]
        if self.chunked:
            made = [*(Line(*named) for named in self.piece.forward()), Line("block's output", self.stream)]
        # with a parallel residual nobody keeps it: the MLP reads what attention read
        made.append(Line("sum behind attention", self.stream if self.parallel_residual else 0))
        return Moment(
            "forward", "last block",
            (*_gradients(self.zero.forward()), self._head_params(), *lines, Line("of a recomputed block", inside), *made, self._leaving()),
        )  # fmt: skip

    def _in_backward(self) -> list[Line]:
        """Gradients throughout backward: of the residual stream (with dropout also of the branch), gathered, and of the head's input."""
        count = 2 if self.dropout else 1
        return [
            Line("gradient of the stream", count * self.stream), Line("gradient of the stream, gathered", self.gathered),
            Line("gradient of the head's input", self.head_stream),
        ]  # fmt: skip

    def _block(self, layer: int, name: str, *lines: Line) -> Moment:
        return Moment("backward", f"{self._place(layer)} block, {name}", (*self._around(layer), *lines))

    def _around(self, layer: int) -> tuple[Line, ...]:
        """Memory held throughout a block's backward: gradients, and the activations of the blocks below."""
        if layer not in self._known:
            self._known[layer] = (*_gradients(self.zero.at(layer + 1)), *self.kept_below(layer))
        return self._known[layer]

    def _place(self, layer: int) -> str:
        return "last" if layer == self.layers - 1 else "first" if layer == 0 else f"number {layer}"

    def _from_outside(self, layer: int, attention: bool = False) -> Line:
        """Gradient of the output of a chunk of recomputed blocks, which is separate from the stream's after the chunk's first op."""
        ends = {i: last for first, last in self.recomputed for i in range(first, last)}
        apart = layer in ends and (attention or layer + 1 < ends[layer])
        return Line("gradient of the recomputed blocks' output", self.stream if apart else 0)

    def _mlp_backward(self, layer: int) -> Moment:
        """Moment in the backward of the MLP's second linear layer: activation recomputed, and its gradient. Chunked: of the whole MLP."""
        keeps = [*self.attention_keeps, self._norm_behind, *self.mlp_keeps]
        if self.chunked:
            stream = [Line("gradient of the stream", 2 * self.stream), Line("gradient of the head's input", self.head_stream)]
            pieces = [Line(*named) for named in self.piece.backward()]
            return self._block(layer, "MLP", *keeps, *stream, self._from_outside(layer), *pieces)
        one = self.sp_tokens * self.ffn * self.e
        made = Line("MLP, inside", activation_backward(self.model.activation, one, self.gate_block))
        return self._block(layer, "MLP", *keeps, *self._in_backward(), self._from_outside(layer), made)

    def _norm_behind_backward(self, layer: int) -> list[Moment]:
        """Moment in the backward of the norm behind the MLP, with which a post-norm block begins; no moment without it."""
        if not self.post:
            return []
        stream = [line for line in self._in_backward() if line.name != "gradient of the stream, gathered"]
        return [self._block(layer, "norm behind the MLP", *self.block_keeps, *stream, *self._norm_backward())]

    def _fc1_backward(self, layer: int) -> list[Moment]:
        """Moments in the backward of the MLP's first linear layer: the second one's activations are freed."""
        if self.chunked:
            return []
        name, kept = "first linear layer", [*self.attention_keeps, self._norm_behind, self.mlp_keeps[0]]
        stream = [line for line in self._in_backward() if line.name != "gradient of the stream, gathered"] + [self._from_outside(layer)]
        wide = Line("gradient of the MLP, inside", self.sp_tokens * self.ffn_in * self.e)
        product = [
            Line("norm's output", 0 if self.post else self.stream), Line("norm's output, gathered", self.gathered),
            Line("gradient of the norm's output", self.whole_stream + self.scattering),
        ]  # fmt: skip
        norm = [Line("gradient of the norm's output", self.stream), *self._norm_backward()]
        return [self._block(layer, name, *kept, *stream, wide, *more) for more in (product, norm)]

    def _norm_backward(self) -> list[Line]:
        """Memory of a norm's backward; a layer without a norm adds two gradients instead, which takes less."""
        return [Line("gradient of the norm's input", self.stream), Line("norm's temporaries", self.norm_temporaries)]

    def _at_attention(self, layer: int) -> list[Line]:
        """Gradients of streams while backward is in attention.

        With a parallel residual the gradient of the MLP's input is held beside the block's own; with dropout the two are already summed.
        """
        waits = self.parallel_residual and not self.dropout
        waiting = Line("gradient of the MLP's input", self.stream if waits else 0)
        return [*self._in_backward(), waiting, self._from_outside(layer, attention=not waits)]

    def _attention_backward(self, layer: int) -> list[Moment]:
        first, count = max(range(len(self.chunks)), key=lambda i: self.recv_buffers[i]), len(self.chunks)
        d_out = self.outs[first] * self.padded // self.length
        received = d_out if self.sp > 1 else 0
        # with several chunks the next one's gradient is on its way already, and the last one's is not yet taken
        ahead = 2 * d_out if count > 1 and self.sp > 1 else d_out if count > 1 else 0
        kernel = self._scores if self.uses_reference else self.attention_grad_blocks
        if self.kernels.recompute_granularity == "selective":  # made again
            log_sums = self.num_queries * self.all_tokens * max(4, self.e)
            kernel += self.outs[first] + (self._reference_keeps if self.uses_reference else log_sums)
        base = [*self.attention_keeps, *self._at_attention(layer)]
        # a recomputation hands over the three gradients apart, which the fused projection wants in one
        fused = self.chunks[0].messages[0].part == "qkv" and self.kernels.recompute_granularity == "selective"
        apart = Line("gradients of q, k and v, apart", self.recv_buffers[first] if fused and not self.uses_reference else 0)
        inside = self._block(
            layer, "attention", *base, Line("gradient of the attention's output", max(d_out + ahead, received)),
            Line("gradient of q, k, v", self.recv_buffers[first]), Line("attention kernel's temporaries", kernel),
        )  # fmt: skip
        turning = self._block(
            layer, "rotary embedding", *base, Line("gradient of the attention's output", d_out + ahead),
            Line("gradient of q, k, v", self.recv_buffers[first]), apart, Line("gradient of q, k, v, turned back", self.rotary_makes),
        )  # fmt: skip
        sending = self._block(
            layer, "exchange of the gradient of q, k, v", *base, Line("gradient of the attention's output", d_out + ahead),
            Line("gradient of q, k, v", self.recv_buffers[first] + (self.sent[first] if self.sp > 1 else 0)),
        )  # fmt: skip
        kept = [line for line in self.attention_keeps if line.name not in ("q, k, v", "attention output", "attention kernel's own")]
        if not self.joins:
            kept.append(Line("attention output", sum(self.outs)))
        by_token = sum(len(of_rank) for of_rank in self.chunks[0].messages[0].rows) * self.d * self.sp_tokens * self.e if self.sp > 1 else 0
        product = [
            *kept, *self._at_attention(layer),
            Line("gradient of q, k, v, as it arrives", sum(self.sent)),
            Line("gradient of q, k, v, by token", by_token),
            Line("norm's output, for all", self.gathered if self.post else self.whole_stream),
            Line("gradient of the norm's output", self.whole_stream),
        ]  # fmt: skip
        norm_output = Line("norm's output", self.stream if self.parts > 1 else 0)
        scattered = Line("gradient of the norm's output, scattered", self.scattering)
        qkv = self._block(layer, "QKV projection", *product, norm_output, scattered)
        out = Line("gradient of the norm's output, scattered", self.stream if self.parts > 1 else 0)
        norm = self._block(layer, "norm in front of QKV", *product, out, *self._norm_backward())
        if not self.uses_reference or not (self.recomputed or self.kernels.recompute_granularity):
            return [inside, turning, sending, qkv, norm]
        makes = Line("attention kernel's temporaries", self._reference_makes + self._reference_keeps - self.kernel_keeps)
        return [inside, turning, sending, qkv, norm, self._block(layer, "attention, made again", *base, makes)]


def _gradients(held: Held) -> tuple[Line, ...]:
    return (
        Line("gradients, whole", held.whole), Line("gradients, reduced", held.ranges),
        Line("gradients, beside them in reductions", held.under_way),
    )  # fmt: skip
