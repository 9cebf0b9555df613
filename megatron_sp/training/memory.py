"""Memory of one rank in closed form: what stays, and what a training step adds at its worst moment.

    resident    parameters, master weights (16-bit models), optimizer state, the micro-batches; with ZeRO ranges of them, and buffers
    forward     what every block keeps for backward, and on top the LM head: one chunk of logits, its gradient, the table's gradient
    backward    from the last block to the first: the blocks below still keep theirs, the blocks above have gradients
    update      all gradients

Gradients take memory from the first one of a step to the start of the next step (``optim/flat.py``), so backward frees activations while it
makes gradients, and the worst moment is the head, a block's backward, a reduction, or the update, whichever the shapes say: all are worked
out, tensor by tensor, as ``models/transformer.py``, ``parallel/ulysses.py``, ``parallel/linear.py`` and ``parallel/lm_head.py`` hold them;
``training/memory_zero.py`` knows how much of parameters and gradients is whole.

Counted are tensors, as an allocator counts them: not fragmentation, the buffers of NCCL, or the working memory inside a kernel. This
module does not load torch: a plan needs no devices. ``tests/dist/test_memory_form.py`` holds it against measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_sp.config import BatchConfig, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.parallel.heads import Chunk, OverlapMode, is_uniform, plan_heads
from megatron_sp.training.memory_mlp import PieceForm, piece_sizes
from megatron_sp.training.memory_zero import ALIGN_BYTES, Held, ZeroForm
from megatron_sp.utils.numbers import round_up

_MIB = 2**20
_BLOCK_BYTES = 2**20  # of ops/memory.py :: blocks on the CPU, one thread
_LM_HEAD_BYTES = {"cpu": 52 * _MIB, "cuda": 512 * _MIB}  # of parallel/lm_head.py; a test holds them together


@dataclass(frozen=True)
class Line:
    """One kind of tensors: what they are, and how many bytes."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """What exists at one moment of a step, beside what stays.

    Attributes:
        phase: forward, backward or update.
        name: where in the phase.
    """

    phase: Literal["forward", "backward", "update"]
    name: str
    lines: tuple[Line, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank.

    Attributes:
        stays: lives from start to end.
        moments: the worst one of each kind.
        host: bytes in host memory instead (--offload-activations).
    """

    stays: tuple[Line, ...]
    moments: tuple[Moment, ...]
    host: int = 0

    @property
    def resident(self) -> int:
        return sum(line.num_bytes for line in self.stays)

    @cached_property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda m: m.num_bytes)

    @property
    def peak(self) -> int:
        return self.resident + self.worst.num_bytes

    def peak_of(self, phase: str) -> int:
        """Peak within forward, backward or update."""
        return self.resident + max(m.num_bytes for m in self.moments if m.phase == phase)

    def text(self) -> str:
        """A line per kind, in MiB, at the worst moment."""
        rows = [("stays", self.stays), (f"at the peak: {self.worst.phase}, {self.worst.name}", self.worst.lines)]
        made = []
        for title, lines in rows:
            made.append(f"{title}: {sum(line.num_bytes for line in lines) / _MIB:.2f} MiB")
            made += [f"  {line.num_bytes / _MIB:10.2f}  {line.name}" for line in lines if line.num_bytes]
        return "\n".join([*made, f"peak: {self.peak / _MIB:.2f} MiB"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "resident": self.resident, "peak": self.peak, "host": self.host,
            "phases": {p: self.peak_of(p) for p in ("forward", "backward", "update")},
            "stays": {line.name: line.num_bytes for line in self.stays},
            "worst": {"phase": self.worst.phase, "name": self.worst.name, **{line.name: line.num_bytes for line in self.worst.lines}},
        }  # fmt: skip


def memory_plan(
    model: ModelConfig, parallel: ParallelConfig, kernels: KernelConfig, batch: BatchConfig, precision: PrecisionConfig,
    *, data_parallel_size: int = 1, optimizer: Literal["adam", "sgd"] = "adam", device: Literal["cpu", "cuda"] = "cpu",
    head_share: float = 1.0,
) -> MemoryPlan:  # fmt: skip
    """Memory of the rank that holds most (sp rank 0: the first ranks get the heads that are left over).

    Args:
        model, parallel, kernels, batch, precision: as the run has them, validated; the model's ``vocab_size`` is set.
        data_parallel_size: dp, for the number of micro-batches and of the ranges of ZeRO.
        optimizer: whose state is kept.
        device: decides kernels and temporaries.
        head_share: of the positions, those that BERT's head sees on a CPU: the masked ones (--mask-prob).
    """
    return Form(model, parallel, kernels, batch, precision, data_parallel_size, device, head_share).plan(optimizer)


def lm_head_chunk_tokens(vocab_rows: int, device: str = "cpu") -> int:
    """Tokens per chunk of the LM head when no flag says so."""
    return max(128, _LM_HEAD_BYTES[device] // (4 * vocab_rows) // 64 * 64)


class Form:
    """Sizes of all tensors, in bytes unless a name says otherwise."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, kernels: KernelConfig, batch: BatchConfig, precision: PrecisionConfig,
        dp: int, device: str, head_share: float = 1.0,
    ) -> None:  # fmt: skip
        assert model.num_layers and model.hidden_size and model.num_attention_heads and model.seq_length and model.vocab_size
        self.model, self.kernels, self.cuda = model, kernels, device == "cuda"
        self.tp, self.sp, b, s = (
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel_size,
            batch.micro_batch_size,
            model.seq_length,
        )
        self.is_16_bit = precision.bf16 or precision.fp16
        self.e, self.wide = (2, 4) if self.is_16_bit else (8, 8) if precision.fp64 else (4, 4)  # of an activation; of sums
        self.layers, self.h, self.d = model.num_layers, model.hidden_size, model.head_dim
        self.parts = self.tp if parallel.sequence_parallel else 1
        self.num_micro_batches = (batch.global_batch_size or b * dp) // (b * dp)
        self.length, self.padded = s, round_up(s, self.sp * self.parts)
        self.all_tokens = s * b
        self.inside = self.padded // self.sp * b  # tokens in the tensor-parallel parts of a layer
        self.between = self.inside // self.parts  # and between them
        self.rows = round_up(model.vocab_size, model.make_vocab_size_divisible_by * self.tp) // self.tp
        self.post = model.norm_placement == "post"
        picks = model.is_bert and not self.cuda
        masked = math.ceil(round(s * b / self.sp * head_share, 6))
        self.head_tokens = min(self.inside, masked) if picks else self.inside
        self.head_chunk = kernels.lm_head_chunk_tokens or lm_head_chunk_tokens(self.rows, device)
        self.ffn = model.ffn_size // self.tp
        self.ffn_in = self.ffn * (2 if model.swiglu else 1)
        # the stream between the layers, and the same with all positions of the tp group
        self.stream, self.whole_stream = self.between * self.h * self.e, self.inside * self.h * self.e
        self.gathered = self.whole_stream if self.parts > 1 else 0
        self.norm_stats = self.between * self.wide * (2 if model.normalization == "LayerNorm" else 1)
        # the gradient of the head's input, as its node keeps it through the backward pass
        self.head_stream = self.head_tokens * self.h * self.e if model.is_bert else self.stream
        self._known: dict[int, tuple[Line, ...]] = {}
        self._heads(parallel)
        self._parameters(parallel, dp * self.sp)
        self.dropout = model.hidden_dropout > 0
        self._pieces(b)
        # a reduce_scatter of the stream that is under way; without NCCL also what arrives from the other ranks
        self.scattering = self.stream + (0 if self.cuda else self.whole_stream) if self.parts > 1 else 0
        # one pass of our CPU ops that go by blocks; a GPU kernel does all at once
        self.norm_block = min(self.stream, _BLOCK_BYTES) if not self.cuda else self.stream

    def _pieces(self, b: int) -> None:
        """Of the MLP (--mlp-chunks)."""
        positions = self.between // b
        self.mlp_pieces = [size * b for size in piece_sizes(positions, self.kernels.mlp_chunks)]  # tokens of this rank
        largest = max(self.mlp_pieces)
        name = "swiglu" if self.model.swiglu else "squared_relu" if self.model.squared_relu else "gelu"
        inside = largest * self.parts * self.e
        self.piece = PieceForm(
            largest * self.h * self.e, self.parts, self.tp, inside * self.ffn_in, inside * self.ffn, name, self.dropout, not self.cuda
        )

    @property
    def chunked(self) -> bool:
        """Whether the MLP is computed over pieces, and its wide activation not kept."""
        return self.kernels.mlp_chunks > 1

    def _heads(self, parallel: ParallelConfig) -> None:
        """Elements that the attention of a block holds."""
        model, tp, d = self.model, self.tp, self.d
        assert model.num_attention_heads
        n, g = model.num_attention_heads, model.num_groups
        r = n // g
        self.queries_per_group, groups = (r, g // tp) if g % tp == 0 else (n // tp, 1)
        self.qkv_rows = groups * (self.queries_per_group + 2) * d  # of this tp rank
        self.proj_columns = n // tp * d
        mode: OverlapMode = "none" if parallel.overlap_mode == "auto" else parallel.overlap_mode  # type: ignore[assignment]
        self.chunks: Sequence[Chunk] = plan_heads(self.queries_per_group, groups, self.sp, mode, parallel.sp_head_chunks or 2)
        shares = [chunk.shares[0] for chunk in self.chunks]
        tokens = self.padded * self.all_tokens // self.length
        widths = [[len(message.rows[0]) * d for message in chunk.messages] for chunk in self.chunks]
        self.wires = [tokens * sum(of_chunk) * self.e for of_chunk in widths]  # what arrives for each chunk
        self.outs = [self.all_tokens * len(share.queries) * d * self.e for share in shares]
        self.sent = [
            self.inside * sum(len(of_rank) * d for message in chunk.messages for of_rank in message.rows) * self.e for chunk in self.chunks
        ]
        self.out_whole = self.inside * self.proj_columns * self.e
        # our CPU kernel alone writes its output as the projection reads it
        self.joins = self.sp > 1 or len(self.chunks) > 1 or self.padded > self.length or self.cuda or self.uses_reference
        self.num_queries = sum(len(share.queries) for share in shares)
        repeated = [2 * len(share.queries) for share in shares if share.keys and not is_uniform(share, self.queries_per_group)]
        normed = sum(len(share.queries) + len(share.keys) for share in shares) if model.qk_layernorm else 0
        self.made_heads = self.all_tokens * (sum(repeated) + normed) * d * self.e  # heads that are not views of what arrived
        widest = max(len(share.queries) for share in shares)
        group = self.length * self.queries_per_group * d * self.e
        passes = 2 * max(1, _BLOCK_BYTES // group) * group  # one at work, and the results of the one before
        self.attention_blocks = 0 if self.cuda else min(passes, self.all_tokens * widest * d * self.e)

    def _parameters(self, parallel: ParallelConfig, ranks: int) -> None:
        """Parameters of each unit, in elements with the alignment of the flat buffers; ``ranks`` have the same ones."""
        model, h = self.model, self.h
        align = ALIGN_BYTES // self.e
        bias, norms = not model.disable_bias_linear, 2 if model.normalization == "LayerNorm" else 1

        def total(*counts: int) -> int:
            return sum(round_up(count, align) for count in counts)

        attention = [self.qkv_rows * h, h * self.proj_columns]
        attention += [self.qkv_rows] * (bias or model.add_qkv_bias) + [h] * bias + [self.d] * (2 * norms * model.qk_layernorm)
        mlp = [self.ffn_in * h, h * self.ffn] + [self.ffn_in, h] * bias
        block = total(*attention, *mlp, *[h] * (2 * norms))
        positions = [model.max_positions * h] if model.position_embedding_type == "learned_absolute" else []
        positions += [model.token_types * h] if model.token_types else []
        tied = not model.untie_embeddings_and_output_weights
        before, behind = ([h] * norms, []) if self.post else ([], [h] * norms)  # norms outside the blocks
        bert = [h * h, h, *[h] * norms, self.rows] if model.is_bert else []
        bert += [h * h, h, 2 * h, 2] if model.has_order_head else []
        embedding, head = total(self.rows * h, *positions, *before), total(*behind, *bert, *([] if tied else [self.rows * h]))
        self.zero = ZeroForm(
            [embedding, *[block] * self.layers, head], parallel, ranks, self.e, self.wide,
            accumulates=self.num_micro_batches > 1, tied=tied, receives=not self.cuda,
        )  # fmt: skip

    def shared(self, unit: int) -> int:
        """Elements of a unit's gradients that tp ranks have in common and sum, packed together."""
        model, h, norms = self.model, self.h, 2 if self.model.normalization == "LayerNorm" else 1
        if self.tp == 1:
            return 0
        if unit == 0 and self.parts > 1:
            rows = model.max_positions if model.position_embedding_type == "learned_absolute" else 0
            return (rows + model.token_types + norms * self.post) * h
        if unit == 0 or unit > self.layers:
            return norms * h if self.parts > 1 and not self.post and unit > 0 else 0
        count = (2 * norms + 2 * (not model.disable_bias_linear)) * h if self.parts > 1 else 0
        count += 2 * norms * self.d if model.qk_layernorm else 0
        if model.num_groups % self.tp:  # each has its own place for every group
            count += model.num_groups * 2 * self.d * (h + (not model.disable_bias_linear or model.add_qkv_bias))
        return count

    # what a block keeps

    @property
    def kernel_keeps(self) -> int:
        """For the attention's backward, beside q, k, v and its output."""
        if self.kernels.recompute_granularity == "selective":
            return 0
        if self.uses_reference:
            return self._reference_keeps
        return self.num_queries * self.all_tokens * max(4, self.e)  # log of the sum of exponentials

    @property
    def _scores(self) -> int:
        """One tensor of attention scores, in fp32 or wider."""
        return self.num_queries * self.all_tokens * self.length * self.wide

    @property
    def _reference_keeps(self) -> int:
        """Probabilities, and with dropout the mask and what it leaves; the keys and values of each query where they are shared."""
        elements, shared = self._scores // self.wide, self.queries_per_group > 1
        dropped = elements * (1 + self.e) if self.model.attention_dropout > 0 else elements * self.e if self.is_16_bit else 0
        return self._scores + dropped + self.length**2 + shared * 2 * self.num_queries * self.all_tokens * self.d * self.e

    @property
    def _reference_makes(self) -> int:
        """In the forward pass, beside what is kept."""
        return (2 if self.model.attention_dropout > 0 else 1) * self._scores

    @property
    def uses_reference(self) -> bool:
        plain = self.kernels.attention_backend in ("unfused", "local")
        return plain or (self.kernels.attention_backend == "auto" and not self.cuda and self.model.attention_dropout > 0)

    @cached_property
    def attention_keeps(self) -> list[Line]:
        joined = self.out_whole if self.joins else 0
        keys = 2 * 4 * self.between if self.dropout else 0
        return [
            Line("residual stream", self.stream), Line("q, k, v", sum(self.wires) + self.made_heads),
            Line("attention output", sum(self.outs)), Line("attention output, all heads of my positions", joined),
            Line("attention kernel's own", self.kernel_keeps), Line("dropout keys", keys),
        ]  # fmt: skip

    @cached_property
    def mlp_keeps(self) -> list[Line]:
        wide = 0 if self.chunked else self.inside * self.ffn_in * self.e
        return [Line("residual stream", self.stream), Line("MLP, in front of the activation", wide)]

    @property
    def _norm_behind(self) -> Line:
        """What the norm behind attention or MLP keeps, where there is one."""
        return Line("inputs of norms", self.stream + self.norm_stats if self.post else 0)

    @property
    def block_keeps(self) -> list[Line]:
        return [*self.attention_keeps, self._norm_behind, *self.mlp_keeps, self._norm_behind]

    def kept_below(self, layer: int) -> list[Line]:
        """By all blocks below one, when backward works on that."""
        if self.offloads:
            return self._left_below(layer)
        whole = _sum(self.block_keeps)
        recomputed = {i: first for first, last in self.recomputed for i in range(first, last)}
        inputs = sum(first <= layer and first != recomputed.get(layer) for first, _ in self.recomputed)
        stored = sum(i not in recomputed for i in range(layer))
        remade = layer - recomputed[layer] if layer in recomputed else 0  # blocks of the same chunk, made again
        return [
            Line("blocks below", (stored + remade) * whole), Line("inputs of recomputed blocks", inputs * self.stream),
            Line("output of recomputed blocks", self.stream if layer in recomputed else 0), self._embedding_norm,
        ]  # fmt: skip

    # in host memory

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device; a CPU has no other memory, and keeps them beside their copies."""
        return self.kernels.offload_activations and self.empties

    @property
    def empties(self) -> bool:
        return self.cuda

    @property
    def host(self) -> int:
        """Bytes in host memory; kept from step to step."""
        return sum(map(self._moves, self.stages[:-1])) if self.kernels.offload_activations else 0

    @property
    def stages(self) -> list[tuple[int, int, bool]]:
        """What moves to the host and back as one: blocks by themselves, and runs of blocks that are recomputed."""
        found = []
        for first, last, again in recompute_plan(self.kernels, self.layers):
            found += [(first, last, True)] if again else [(layer, layer + 1, False) for layer in range(first, last)]
        return [stage for stage in found if stage[0] < stage[1]]

    @property
    def _stay_of_block(self) -> list[Line]:
        return [line for line in self.block_keeps if line.name == "dropout keys"]

    def _moves(self, stage: tuple[int, int, bool]) -> int:
        """Bytes of a stage that go to the host: numbers, not keys and masks."""
        return self.stream if stage[2] else _sum(self.block_keeps) - _sum(self._stay_of_block)

    def _left_below(self, layer: int) -> list[Line]:
        """As ``kept_below``: of the stages below the one next to come is on its way back."""
        index = next(i for i, (first, last, _) in enumerate(self.stages) if first <= layer < last)
        first, _, again = self.stages[index]
        stay = sum(not below[2] for below in self.stages[:index]) * _sum(self._stay_of_block)
        own = (layer - first) * _sum(self.block_keeps) + (self.stream if again and layer > first else 0)
        coming = self._moves(self.stages[index - 1]) if index else 0
        return [
            Line("blocks below", own + stay), Line("block below, on its way from the host", coming),
            Line("output of recomputed blocks", self.stream if again else 0), self._embedding_norm,
        ]  # fmt: skip

    def _leaving(self) -> Line:
        """While the last stage computes."""
        moves = self._moves(self.stages[-2]) if self.offloads and len(self.stages) > 1 else 0
        return Line("block before, on its way to the host", moves)

    @cached_property
    def recomputed(self) -> list[tuple[int, int]]:
        """(first, last + 1) of each chunk of blocks that keeps its input alone."""
        return [(first, last) for first, last, again in recompute_plan(self.kernels, self.layers) if again]

    # moments

    def plan(self, optimizer: str) -> MemoryPlan:
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
        """Among which the worst block is, the last one first: what grows or shrinks evenly from block to block is largest at an end."""
        chunks = {last - first for first, last in self.recomputed}
        even = not chunks or (chunks == {1} and len(self.recomputed) == self.layers)
        ends = {0, 1, self.layers - 2, self.layers - 1} if even else set(range(self.layers))
        return sorted((layer for layer in ends if 0 <= layer < self.layers), reverse=True)

    def _reductions(self) -> list[Moment]:
        """Backward leaves a unit, or all of them."""
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
        """Positions, rotary tables, dropout's token keys."""
        rotary = self.length * self.model.rotary_dim // 2 * 2 * max(4, self.wide) if self.model.position_embedding_type == "rope" else 0
        keys = 8 * (self.all_tokens + self.between) if self.dropout or self.model.attention_dropout > 0 else 0
        return 8 * self.length + rotary + keys

    def _widened(self) -> int:
        return self.inside * self.h * self.wide if self.is_16_bit else 0

    def _kept_by_blocks(self) -> list[Line]:
        recomputed = sum(last - first for first, last in self.recomputed)
        stored, inputs = self.layers - recomputed, len(self.recomputed)
        here = {line.name for line in self.block_keeps} - {line.name for line in self._stay_of_block} if self.offloads else set()
        if self.offloads:  # the last stage alone
            inputs = int(self.stages[-1][2])
        of_moved = stored if not self.offloads else 1 - inputs
        kept = [Line(line.name, (of_moved if line.name in here else stored) * line.num_bytes) for line in _merge(self.block_keeps)]
        return [*kept, Line("inputs of recomputed blocks", inputs * self.stream), self._embedding_norm]

    @property
    def _embedding_norm(self) -> Line:
        """Kept from the first operation to the last."""
        return Line("embedding norm's input", self.stream + self.norm_stats if self.post else 0)

    def _kept_by_all(self) -> list[Line]:
        """At the end of the forward pass: all blocks, and the norms outside them."""
        final = Line("final norm's input", 0 if self.post else self.stream + self.norm_stats)
        return [*self._kept_by_blocks(), final, *self._bert_head()]

    def _bert_head(self) -> list[Line]:
        """What BERT's head keeps: the inputs of its linear layer, of its activation and of its norm."""
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
            Line("labels, masks", self.inside * 16 + chunk * 20),
            Line("labels of the masked tokens", tokens * 21 if bert else 0),
        ]  # fmt: skip

    def _head_params(self) -> Line:
        return Line("buffer for the head's parameters", self.zero.head_buffer * self.e)

    def _head_buffer(self) -> int:
        """The table's gradient while the sink holds one already: at stages 2 and 3 it does not, that has been reduced."""
        return self.rows * self.h * self.wide if self.num_micro_batches > 1 and self.zero.stage < 2 else 0

    def _head(self) -> Moment:
        return Moment("forward", "LM head", tuple(self._head_lines()))

    def _head_end(self) -> Moment:
        """The reduction of the gradient of x starts while the last chunk of logits still exists."""
        gone = ("head's input of a chunk, weighted, or the last chunk's logits", "gradient of the table, one chunk")
        kept = [line for line in self._head_lines() if line.name not in gone]
        return Moment(
            "forward",
            "end of the LM head",
            (*kept, Line("gradient of the head's input, scattered", 0 if self.model.is_bert else self.scattering)),
        )

    def _head_backward(self) -> list[Moment]:
        """Before the reduction is waited for, and behind it, when the gradient is multiplied."""
        table = Line("gradient of the table", self._head_buffer())
        base = [*_gradients(self.zero.at_head()), self._head_params(), *self._kept_by_all(), table]
        if self.model.is_bert:
            return [self._bert_head_backward(base)]
        waiting = Line("gradient of the head's input", self.whole_stream + self.scattering)
        times = self.stream * self.wide // self.e + (self.stream if self.is_16_bit else 0)
        scaled = [Line("gradient of the head's input", self.stream), Line("gradient of the head's input, times what arrives", times)]
        return [Moment("backward", "LM head begins", (*base, waiting)), Moment("backward", "LM head", (*base, *scaled))]

    def _bert_head_backward(self, base: list[Line]) -> Moment:
        """From the picked positions back to all of them; those of the order's head come apart."""
        both = 2 if self.model.has_order_head else 1
        spread = Line("gradient of the head's input, at all positions", both * self.whole_stream)
        return Moment("backward", "LM head", (*base, Line("gradient of the head's input", 2 * self.head_stream), spread))

    def _attention_forward(self) -> Moment:
        """Attention of the last block."""
        mlp = 0 if self.recomputed else -_sum(self.mlp_keeps)
        kept = self._kept_by_blocks()
        keeps = _sum(self.attention_keeps) if self.recomputed else 0
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
        """Last block: behind the activation, and the block's output."""
        inside = _sum(self.mlp_keeps) if self.recomputed else 0
        lines = self._kept_by_blocks()
        made = [Line("MLP, behind the activation", self.inside * self.ffn * self.e), Line("block's output", self.whole_stream)]
        if self.chunked:
            made = [*(Line(*named) for named in self.piece.forward()), Line("block's output", self.stream)]
        return Moment(
            "forward", "last block",
            (*_gradients(self.zero.forward()), self._head_params(), *lines, Line("of a recomputed block", inside), *made, self._leaving()),
        )  # fmt: skip

    def _in_backward(self) -> list[Line]:
        """The gradient of the stream (with dropout also of the branch), gathered, and the head's, which its node keeps."""
        count = 2 if self.dropout else 1
        return [
            Line("gradient of the stream", count * self.stream), Line("gradient of the stream, gathered", self.gathered),
            Line("gradient of the head's input", self.head_stream),
        ]  # fmt: skip

    def _block(self, layer: int, name: str, *lines: Line) -> Moment:
        return Moment("backward", f"{self._place(layer)} block, {name}", (*self._around(layer), *lines))

    def _around(self, layer: int) -> tuple[Line, ...]:
        """What exists whatever backward does in a block: gradients, and what the blocks below keep."""
        if layer not in self._known:
            self._known[layer] = (*_gradients(self.zero.at(layer + 1)), *self.kept_below(layer))
        return self._known[layer]

    def _place(self, layer: int) -> str:
        return "last" if layer == self.layers - 1 else "first" if layer == 0 else f"number {layer}"

    def _from_outside(self, layer: int, attention: bool = False) -> Line:
        """The gradient that came to a chunk of recomputed blocks: apart from that of the stream, once the chunk's first op is done."""
        ends = {i: last for first, last in self.recomputed for i in range(first, last)}
        apart = layer in ends and (attention or layer + 1 < ends[layer])
        return Line("gradient of the recomputed blocks' output", self.stream if apart else 0)

    def _mlp_backward(self, layer: int) -> Moment:
        """Second linear layer: the activation computed again, then its gradient. Over pieces all of the MLP."""
        keeps = [*self.attention_keeps, self._norm_behind, *self.mlp_keeps]
        if self.chunked:
            stream = [Line("gradient of the stream", 2 * self.stream), Line("gradient of the head's input", self.head_stream)]
            pieces = [Line(*named) for named in self.piece.backward()]
            return self._block(layer, "MLP", *keeps, *stream, self._from_outside(layer), *pieces)
        one = self.inside * self.ffn * self.e
        made = 5 * one if self.model.swiglu else 2 * one if self.model.squared_relu else one
        return self._block(layer, "MLP", *keeps, *self._in_backward(), self._from_outside(layer), Line("MLP, inside", made))

    def _norm_behind_backward(self, layer: int) -> list[Moment]:
        """Of the MLP: the first that a post-norm block does."""
        if not self.post:
            return []
        stream = [line for line in self._in_backward() if line.name != "gradient of the stream, gathered"]
        return [self._block(layer, "norm behind the MLP", *self.block_keeps, *stream, *self._norm_backward())]

    def _fc1_backward(self, layer: int) -> list[Moment]:
        """First linear layer: what fc2 kept is gone."""
        if self.chunked:
            return []
        name, kept = "first linear layer", [*self.attention_keeps, self._norm_behind, Line("residual stream", self.stream)]
        stream = [line for line in self._in_backward() if line.name != "gradient of the stream, gathered"] + [self._from_outside(layer)]
        wide = Line("gradient of the MLP, inside", self.inside * self.ffn_in * self.e)
        product = [
            Line("norm's output", 0 if self.post else self.stream), Line("norm's output, gathered", self.gathered),
            Line("gradient of the norm's output", self.whole_stream + self.scattering),
        ]  # fmt: skip
        norm = [Line("gradient of the norm's output", self.stream), *self._norm_backward()]
        return [self._block(layer, name, *kept, *stream, wide, *more) for more in (product, norm)]

    def _norm_backward(self) -> list[Line]:
        """Of a norm in front or behind; a layer without one adds two gradients, which takes less."""
        return [Line("gradient of the norm's input", self.stream), Line("norm's temporaries", 2 * self.norm_block)]

    def _attention_backward(self, layer: int) -> list[Moment]:
        first, count = max(range(len(self.chunks)), key=lambda i: self.wires[i]), len(self.chunks)
        d_out = self.outs[first] * self.padded // self.length
        received = d_out if self.sp > 1 else 0
        # with several chunks the next one's gradient is on its way already, and the last one's is not yet taken
        ahead = 2 * d_out if count > 1 and self.sp > 1 else d_out if count > 1 else 0
        kernel = self._scores if self.uses_reference else 3 * self.attention_blocks
        if self.kernels.recompute_granularity == "selective":  # made again
            log_sums = self.num_queries * self.all_tokens * max(4, self.e)
            kernel += self.outs[first] + (self._reference_keeps if self.uses_reference else log_sums)
        base = [*self.attention_keeps, *self._in_backward(), self._from_outside(layer, attention=True)]
        inside = self._block(
            layer, "attention", *base, Line("gradient of the attention's output", max(d_out + ahead, received)),
            Line("gradient of q, k, v", self.wires[first]), Line("attention kernel's temporaries", kernel),
        )  # fmt: skip
        sending = self._block(
            layer, "exchange of the gradient of q, k, v", *base, Line("gradient of the attention's output", d_out + ahead),
            Line("gradient of q, k, v", self.wires[first] + (self.sent[first] if self.sp > 1 else 0)),
        )  # fmt: skip
        kept = [line for line in self.attention_keeps if line.name not in ("q, k, v", "attention output", "attention kernel's own")]
        if not self.joins:
            kept.append(Line("attention output", sum(self.outs)))
        by_token = sum(len(of_rank) for of_rank in self.chunks[0].messages[0].rows) * self.d * self.inside * self.e if self.sp > 1 else 0
        product = [
            *kept, *self._in_backward(), self._from_outside(layer, attention=True),
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
            return [inside, sending, qkv, norm]
        makes = Line("attention kernel's temporaries", self._reference_makes + self._reference_keeps - self.kernel_keeps)
        return [inside, sending, qkv, norm, self._block(layer, "attention, made again", *base, makes)]


def _gradients(held: Held) -> tuple[Line, ...]:
    return (
        Line("gradients, whole", held.whole), Line("gradients, reduced", held.ranges),
        Line("gradients, beside them in reductions", held.under_way),
    )  # fmt: skip


def _sum(lines: Sequence[Line]) -> int:
    return sum(line.num_bytes for line in lines)


def _merge(lines: Sequence[Line]) -> list[Line]:
    """One line for each name."""
    names = list(dict.fromkeys(line.name for line in lines))
    return [Line(name, sum(line.num_bytes for line in lines if line.name == name)) for name in names]
