"""Sizes of everything that a rank holds: parameters of each unit, activations of a block saved for backward, memory on the host.

All are numbers computed from the configuration; ``estimate/memory.py`` combines them, moment by moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from megatron_sp.config.schema import BatchConfig, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.memory_mlp import PieceForm, piece_sizes
from megatron_sp.estimate.memory_plan import Line, total
from megatron_sp.estimate.memory_zero import ALIGN_BYTES, ZeroForm
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.parallel.heads import HeadChunk, OverlapMode, is_uniform, plan_heads
from megatron_sp.utils.numbers import round_up, window_tile

_MIB = 2**20
_BLOCK_BYTES = 2**20  # of ops/memory.py :: blocks on the CPU, one thread
_LM_HEAD_BYTES = {"cpu": 52 * _MIB, "cuda": 512 * _MIB}  # of parallel/lm_head.py; a test holds them together
_LM_HEAD_TOKENS = {"cpu": 512, "cuda": 2**20}


def lm_head_chunk_tokens(vocab_rows: int, device: str = "cpu") -> int:
    """Return the default number of tokens per chunk of the LM head."""
    return min(_LM_HEAD_TOKENS[device], max(128, _LM_HEAD_BYTES[device] // (4 * vocab_rows) // 64 * 64))


class Sizes:
    """Sizes of all tensors, in bytes unless the name of an attribute indicates otherwise."""

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
        self.sp_tokens = self.padded // self.sp * b  # tokens in the tensor-parallel parts of a layer
        self.tp_seq_tokens = self.sp_tokens // self.parts  # and between them
        self.rows = round_up(model.vocab_size, model.make_vocab_size_divisible_by * self.tp) // self.tp
        self.post, self.parallel_residual = model.norm_placement == "post", model.use_parallel_residual
        picks = model.is_bert and not self.cuda
        masked = math.ceil(round(s * b / self.sp * head_share, 6))
        self.head_tokens = min(self.sp_tokens, masked) if picks else self.sp_tokens
        self.head_chunk = kernels.lm_head_chunk_tokens or lm_head_chunk_tokens(self.rows, device)
        self.ffn = model.ffn_size // self.tp
        self.ffn_in = self.ffn * (2 if model.is_gated else 1)
        # the stream between the layers, and the same with all positions of the tp group
        self.stream, self.whole_stream = self.tp_seq_tokens * self.h * self.e, self.sp_tokens * self.h * self.e
        self.gathered = self.whole_stream if self.parts > 1 else 0
        self.norm_stats = self.tp_seq_tokens * self.wide * (2 if model.normalization == "LayerNorm" else 1)
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
        norm_block = min(self.stream, _BLOCK_BYTES) if not self.cuda else self.stream
        self.norm_temporaries = (2 if model.normalization == "LayerNorm" else 3) * norm_block
        self.gate_block = _BLOCK_BYTES if not self.cuda else self.sp_tokens * self.ffn * self.e

    def _pieces(self, b: int) -> None:
        """Compute the sizes of the pieces of a chunked MLP (--mlp-chunks)."""
        positions = self.tp_seq_tokens // b
        self.mlp_pieces = [size * b for size in piece_sizes(positions, self.kernels.mlp_chunks)]  # tokens of this rank
        largest = max(self.mlp_pieces)
        inside = largest * self.parts * self.e
        self.piece = PieceForm(
            largest * self.h * self.e, self.parts, self.tp, inside * self.ffn_in, inside * self.ffn, self.model.activation, self.dropout,
            not self.cuda, _BLOCK_BYTES if not self.cuda else inside * self.ffn,
        )  # fmt: skip

    @property
    def chunked(self) -> bool:
        """True if the MLP is computed in pieces, without saving its wide activation."""
        return self.kernels.mlp_chunks > 1

    def _heads(self, parallel: ParallelConfig) -> None:
        """Compute the sizes of the tensors of a block's attention."""
        model, tp, d = self.model, self.tp, self.d
        assert model.num_attention_heads
        n, g = model.num_attention_heads, model.num_groups
        r = n // g
        self.queries_per_group, groups = (r, g // tp) if g % tp == 0 else (n // tp, 1)
        self.qkv_rows = groups * (self.queries_per_group + 2) * d  # of this tp rank
        self.proj_columns = n // tp * d
        mode: OverlapMode = "none" if parallel.overlap_mode == "auto" else parallel.overlap_mode  # type: ignore[assignment]
        self.chunks: Sequence[HeadChunk] = plan_heads(self.queries_per_group, groups, self.sp, mode, parallel.sp_head_chunks or 2)
        shares = [chunk.shares[0] for chunk in self.chunks]
        tokens = self.padded * self.all_tokens // self.length
        widths = [[len(message.rows[0]) * d for message in chunk.messages] for chunk in self.chunks]
        self.recv_buffers = [tokens * sum(of_chunk) * self.e for of_chunk in widths]  # what arrives for each chunk
        self.outs = [self.all_tokens * len(share.queries) * d * self.e for share in shares]
        self.sent = [
            self.sp_tokens * sum(len(of_rank) * d for message in chunk.messages for of_rank in message.rows) * self.e
            for chunk in self.chunks
        ]
        self.out_whole = self.sp_tokens * self.proj_columns * self.e
        # our CPU kernel alone writes its output as the projection reads it
        self.joins = self.sp > 1 or len(self.chunks) > 1 or self.padded > self.length or self.cuda or self.uses_reference
        self.num_queries = sum(len(share.queries) for share in shares)
        repeated = [2 * len(share.queries) for share in shares if share.keys and not is_uniform(share, self.queries_per_group)]
        normed = sum(len(share.queries) + len(share.keys) for share in shares) if model.qk_layernorm else 0
        self.made_heads = self.all_tokens * (sum(repeated) + normed) * d * self.e  # heads that are not views of what arrived
        self._attention_blocks(max(len(share.queries) for share in shares))
        self.rotary_makes = max(self._rotary_makes(chunk, tokens * d) for chunk in self.chunks)

    def _rotary_makes(self, chunk: HeadChunk, channels: int) -> int:
        """Return the bytes of the rotary embedding's backward for a chunk of heads: products of half the width, and copies unless packed.

        Args:
            channels: elements of one head at all positions.
        """
        if self.model.position_embedding_type != "rope":
            return 0
        keys = len(chunk.shares[0].keys)
        widths = {message.part: len(message.rows[0]) for message in chunk.messages if message.part != "v"}
        packed = "qkv" in widths and keys and is_uniform(chunk.shares[0], self.queries_per_group) and not self.model.qk_layernorm
        turned = widths["qkv"] - keys if "qkv" in widths else max(widths.values())
        # four products in fp32 by promotion, or the first half of the heads as they were
        products = 4 * max(4, self.wide) if self.is_16_bit else self.e
        return channels * ((0 if packed else sum(widths.values()) * self.e) + turned * products // 2)

    def _attention_blocks(self, widest: int) -> None:
        """Compute the bytes that calls of the CPU kernel return, forward and backward; ``widest``: query heads of the largest chunk."""
        row = self.queries_per_group * self.d * self.e  # of a position, in the columns of one group
        most = self.all_tokens * widest * self.d * self.e  # of all positions

        def calls(queries: int, keys: int) -> int:
            return 2 * max(1, _BLOCK_BYTES // (keys * row)) * row * queries  # one at work, and the results of the one before

        window = self.model.window_size
        if self.cuda:
            self.attention_blocks = self.attention_grad_blocks = 0
        elif window is None or window >= self.length:
            self.attention_blocks = min(calls(self.length, self.length), most)
            summed = 2 * self.attention_blocks // self.queries_per_group  # gradients of a key and a value that served several queries
            self.attention_grad_blocks = 3 * self.attention_blocks + (summed if self.queries_per_group > 1 else 0)
        else:  # the first tile sees as many keys as it has queries; the others have fewer queries than keys
            tile = window_tile(window)
            reach = window - 1 + tile
            self.attention_blocks = min(calls(window, window), 2 * most * window // self.length)
            others = [min(calls(n, reach), 2 * most * n // self.length) for n in (tile, reach)]
            self.attention_grad_blocks = max(3 * self.attention_blocks, others[0] + 2 * others[1])

    def _parameters(self, parallel: ParallelConfig, ranks: int) -> None:
        """Compute the parameters of each unit, in elements as aligned in the flat buffers; ``ranks``: number of ranks that share them."""
        model, h = self.model, self.h
        align = ALIGN_BYTES // self.e
        norms = 2 if model.normalization == "LayerNorm" else 1

        def aligned(*counts: int) -> int:
            return sum(round_up(count, align) for count in counts)

        attention = [self.qkv_rows * h, h * self.proj_columns]
        attention += [self.qkv_rows] * model.qkv_bias + [h] * model.proj_bias + [self.d] * (2 * norms * model.qk_layernorm)
        mlp = [self.ffn_in * h, h * self.ffn] + [self.ffn_in, h] * model.mlp_bias
        block = aligned(*attention, *mlp, *[h] * (2 * norms))
        positions = [model.max_positions * h] if model.position_embedding_type == "learned_absolute" else []
        positions += [model.token_types * h] if model.token_types else []
        tied = not model.untie_embeddings_and_output_weights
        before, behind = ([h] * norms, []) if self.post else ([], [h] * norms)  # norms outside the blocks
        bert = [h * h, h, *[h] * norms, self.rows] if model.is_bert else []
        bert += [h * h, h, 2 * h, 2] if model.has_order_head else []
        embedding, head = aligned(self.rows * h, *positions, *before), aligned(*behind, *bert, *([] if tied else [self.rows * h]))
        self.zero = ZeroForm(
            [embedding, *[block] * self.layers, head], parallel, ranks, self.e, self.wide,
            accumulates=self.num_micro_batches > 1, tied=tied, receives=not self.cuda,
        )  # fmt: skip

    def shared(self, unit: int) -> int:
        """Return the number of a unit's gradient elements that tp ranks share, and sum in one packed all_reduce."""
        model, h, norms = self.model, self.h, 2 if self.model.normalization == "LayerNorm" else 1
        if self.tp == 1:
            return 0
        if unit == 0 and self.parts > 1:
            rows = model.max_positions if model.position_embedding_type == "learned_absolute" else 0
            return (rows + model.token_types + norms * self.post) * h
        if unit == 0 or unit > self.layers:
            return norms * h if self.parts > 1 and not self.post and unit > 0 else 0
        count = (2 * norms + model.proj_bias + model.mlp_bias) * h if self.parts > 1 else 0
        count += 2 * norms * self.d if model.qk_layernorm else 0
        if model.num_groups % self.tp:  # each has its own place for every group
            count += model.num_groups * 2 * self.d * (h + model.qkv_bias)
        return count

    # what a block keeps

    @property
    def kernel_keeps(self) -> int:
        """Bytes that the attention kernel saves for backward beside q, k, v and its output."""
        if self.kernels.recompute_granularity == "selective":
            return 0
        if self.uses_reference:
            return self._reference_keeps
        return self.num_queries * self.all_tokens * max(4, self.e)  # log of the sum of exponentials

    @property
    def _scores(self) -> int:
        """Bytes of one tensor of attention scores, in fp32 or wider."""
        return self.num_queries * self.all_tokens * self.length * self.wide

    @property
    def _reference_keeps(self) -> int:
        """Bytes saved by reference attention: probabilities, dropout's mask and output, keys and values expanded to all queries."""
        elements, shared = self._scores // self.wide, self.queries_per_group > 1
        dropped = elements * (1 + self.e) if self.model.attention_dropout > 0 else elements * self.e if self.is_16_bit else 0
        return self._scores + dropped + self.length**2 + shared * 2 * self.num_queries * self.all_tokens * self.d * self.e

    @property
    def _reference_makes(self) -> int:
        """Bytes of reference attention's temporaries in the forward pass."""
        return (2 if self.model.attention_dropout > 0 else 1) * self._scores

    @property
    def uses_reference(self) -> bool:
        """True if attention is computed by the plain form, with its matrix of scores."""
        plain = self.kernels.attention_backend in ("unfused", "local")
        return plain or (self.kernels.attention_backend == "auto" and not self.cuda and self.model.attention_dropout > 0)

    @cached_property
    def attention_keeps(self) -> list[Line]:
        """Activations that the attention of a block saves."""
        joined = self.out_whole if self.joins else 0
        keys = 2 * 4 * self.tp_seq_tokens if self.dropout else 0
        return [
            Line("residual stream", self.stream), Line("q, k, v", sum(self.recv_buffers) + self.made_heads),
            Line("attention output", sum(self.outs)), Line("attention output, all heads of my positions", joined),
            Line("attention kernel's own", self.kernel_keeps), Line("dropout keys", keys),
        ]  # fmt: skip

    @cached_property
    def mlp_keeps(self) -> list[Line]:
        """Activations that the MLP of a block saves."""
        wide = 0 if self.chunked else self.sp_tokens * self.ffn_in * self.e
        return [Line("residual stream", 0 if self.parallel_residual else self.stream), Line("MLP, in front of the activation", wide)]

    @property
    def _norm_behind(self) -> Line:
        """Activations saved by the norm behind attention or MLP; 0 bytes without one."""
        return Line("inputs of norms", self.stream + self.norm_stats if self.post else 0)

    @property
    def block_keeps(self) -> list[Line]:
        """Activations that a block saves."""
        return [*self.attention_keeps, self._norm_behind, *self.mlp_keeps, self._norm_behind]

    @property
    def _embedding_norm(self) -> Line:
        """Activations saved by the embedding norm of a post-norm model, held throughout forward and backward."""
        return Line("embedding norm's input", self.stream + self.norm_stats if self.post else 0)

    def kept_below(self, layer: int) -> list[Line]:
        """Return the activations of all blocks below one while backward is in that block."""
        if self.offloads:
            return self._left_below(layer)
        whole = total(self.block_keeps)
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
        """True if offloaded activations leave the device; a CPU has no other memory, and holds them beside their copies."""
        return self.kernels.offload_activations and self.empties

    @property
    def empties(self) -> bool:
        """True if storages can be emptied while their tensors live on: on GPUs."""
        return self.cuda

    @property
    def host(self) -> int:
        """Bytes of offloaded activations in host memory, allocated for the whole run."""
        return sum(map(self._moves, self.stages[:-1])) if self.kernels.offload_activations else 0

    @property
    def stages(self) -> list[tuple[int, int, bool]]:
        """Stages that are offloaded as one, (first, last + 1, recomputed): single blocks, and chunks of recomputed blocks."""
        found = []
        for first, last, again in recompute_plan(self.kernels, self.layers):
            found += [(first, last, True)] if again else [(layer, layer + 1, False) for layer in range(first, last)]
        return [stage for stage in found if stage[0] < stage[1]]

    @property
    def _stay_of_block(self) -> list[Line]:
        return [line for line in self.block_keeps if line.name == "dropout keys"]

    def _moves(self, stage: tuple[int, int, bool]) -> int:
        """Return the bytes of a stage that are offloaded: activations, but not dropout keys."""
        return self.stream if stage[2] else total(self.block_keeps) - total(self._stay_of_block)

    def _left_below(self, layer: int) -> list[Line]:
        """Return the result of ``kept_below`` with offloading: of the stages below, only the next one is on its way back."""
        index = next(i for i, (first, last, _) in enumerate(self.stages) if first <= layer < last)
        first, _, again = self.stages[index]
        stay = sum(not below[2] for below in self.stages[:index]) * total(self._stay_of_block)
        own = (layer - first) * total(self.block_keeps) + (self.stream if again and layer > first else 0)
        coming = self._moves(self.stages[index - 1]) if index else 0
        return [
            Line("blocks below", own + stay), Line("block below, on its way from the host", coming),
            Line("output of recomputed blocks", self.stream if again else 0), self._embedding_norm,
        ]  # fmt: skip

    def _leaving(self) -> Line:
        """Activations of the stage before, which are being offloaded while the last stage computes."""
        moves = self._moves(self.stages[-2]) if self.offloads and len(self.stages) > 1 else 0
        return Line("block before, on its way to the host", moves)

    @cached_property
    def recomputed(self) -> list[tuple[int, int]]:
        """Chunks of recomputed blocks, (first, last + 1), which save only their input."""
        return [(first, last) for first, last, again in recompute_plan(self.kernels, self.layers) if again]
