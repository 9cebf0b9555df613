"""Tokens, widths and sizes of the tensors that a rank works with, from which all closed forms are computed."""

from __future__ import annotations

import math
from functools import cached_property

from megatron_sp.estimate.context_form import ContextForm, context_form, slice_forms
from megatron_sp.estimate.memory_experts import ExpertShape
from megatron_sp.estimate.memory_mlp import piece_sizes
from megatron_sp.estimate.stages import RankShare
from megatron_sp.estimate.workload import Device, Workload, num_micro_batches
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.utils.numbers import round_up

BLOCK_BYTES = 2**20  # block size of ops/allocator.py :: blocks on the CPU, one thread
_MIB = 2**20
_LM_HEAD_BYTES = {"cpu": 52 * _MIB, "cuda": 512 * _MIB}  # defaults of the LM head in parallel/; a test compares the two
_NORM_PROGRAMS = 264  # as in ops/kernels/norms.py
_LM_HEAD_TOKENS = {"cpu": 512, "cuda": 2**20}


def lm_head_chunk_tokens(vocab_rows: int, device: Device = "cpu") -> int:
    """Return the default number of tokens per chunk of the LM head."""
    return min(_LM_HEAD_TOKENS[device], max(128, _LM_HEAD_BYTES[device] // (4 * vocab_rows) // 64 * 64))


class RankShape:
    """Numbers of one rank; tensors in bytes, everything else as its name says.

    Attributes:
        e, wide: bytes of an element of parameters and activations, and of gradients and sums.
        h, d, ffn, ffn_in: hidden size, head width, and the MLP's width on this tp rank after and before the
            activation.
        micro_batch: sequences of a micro-batch.
        parts: number of ranks that shard the stream between the layers with tp_seq; 1 without it.
        context: what the cp ranks exchange, and which keys are there; None with one and without slices of a sequence.
        num_slices, slice: of a sequence in a pipeline; ``all_tokens`` are those of this slice.
        whole_length: tokens of a sequence.
        length, padded: those of the cp rank that has most, and with the padding that makes them divisible.
        all_tokens: tokens of a micro-batch, with cp of that rank's share; this rank has ``sp_tokens`` of them in
            tensor-parallel layers, ``tp_seq_tokens`` between them.
        rows: rows of the vocabulary on this tp rank.
        head_tokens, head_chunk: positions that the head processes, and how many at a time.
        stream, whole_stream: the residual stream between the layers, and inside them, with the positions of the whole
            tp group.
        gathered: ``whole_stream`` if it has to be gathered; 0 without tp_seq.
        head_stream: gradient of the head's input, as its node keeps it through the backward pass.
        scattering: a reduce_scatter of the stream that is under way.
        norm_stats, norm_temporaries: what a norm saves beside its input, and what its backward takes.
        gate_block: what a gated activation computes at a time.
        delays: gradients of the MLP's weights wait for attention's last exchange (--delay-wgrad).
        fused: Triton's kernels compute norms and elementwise operations.
        share: what a pipeline rank has of the model; ``layers``: its layers.
        experts: sizes of the layers with experts; None: this rank has none.
        mlp_pieces: tokens of this rank in each piece of a chunked MLP (--mlp-chunks).
    """

    def __init__(self, workload: Workload, share: RankShare | None = None, number: int = 0) -> None:
        model, parallel, kernels, batch, precision = (
            workload.model, workload.parallel, workload.kernels, workload.batch, workload.precision,
        )  # fmt: skip
        assert (
            model.num_layers
            and model.hidden_size
            and model.num_attention_heads
            and model.seq_length
            and model.vocab_size
        )
        self.cuda = workload.device == "cuda"
        self.kernels = kernels
        self.tp, self.sp, self.cp = (
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel_size,
            parallel.context_parallel_size,
        )
        self.delays = parallel.delay_wgrad and (self.sp > 1 or self.cp > 1)
        self.parts = self.tp if parallel.sequence_parallel else 1
        self.is_16_bit = precision.bf16 or precision.fp16
        self.e, self.wide = (2, 4) if self.is_16_bit else (8, 8) if precision.fp64 else (4, 4)
        self.share = share or RankShare.whole(model)
        self.layers, self.h, self.d = self.share.layers, model.hidden_size, model.head_dim
        self.ffn = model.ffn_size // self.tp
        self.ffn_in = self.ffn * (2 if model.is_gated else 1)
        self.post, self.parallel_residual = model.norm_placement == "post", model.use_parallel_residual
        self.dropout = model.hidden_dropout > 0

        self.num_slices, self.slice = parallel.num_pipeline_slices if self.share.is_cut else 1, number
        if self.num_slices > 1:
            self.context: ContextForm | None = slice_forms(model, parallel)[number]
        else:
            self.context = context_form(model, parallel) if self.cp > 1 else None
        self.whole_length = model.seq_length
        b, s = batch.micro_batch_size, self.whole_length if self.context is None else self.context.longest
        self.micro_batch, self.num_micro_batches = b, num_micro_batches(workload)
        self.length, self.padded = s, round_up(s, self.sp * self.parts)
        self.all_tokens = s * b
        self.sp_tokens = self.sp_positions(s) * b
        self.tp_seq_tokens = self.sp_tokens // self.parts
        self.experts = (
            ExpertShape(workload, self.tp_seq_tokens, self.sp_tokens, self.e) if any(self.share.experts) else None
        )
        self.mlp_pieces = [size * b for size in piece_sizes(self.tp_seq_tokens // b, kernels.mlp_chunks)]

        self.rows = round_up(model.vocab_size, model.make_vocab_size_divisible_by * self.tp) // self.tp
        masked = math.ceil(round(s * b / self.sp * workload.head_share, 6))
        self.head_tokens = min(self.sp_tokens, masked) if model.is_bert and not self.cuda else self.sp_tokens
        self.head_chunk = kernels.lm_head_chunk_tokens or lm_head_chunk_tokens(self.rows, workload.device)

        self.stream, self.whole_stream = self.tp_seq_tokens * self.h * self.e, self.sp_tokens * self.h * self.e
        self.gathered = self.whole_stream if self.parts > 1 else 0
        self.head_stream = self.head_tokens * self.h * self.e if model.is_bert else self.stream
        if not self.share.has_head:
            self.head_stream = 0
        # without NCCL a reduce_scatter holds what arrives from the other ranks, too
        self.scattering = self.stream + (0 if self.cuda else self.whole_stream) if self.parts > 1 else 0

        self.norms = 2 if model.normalization == "LayerNorm" else 1  # tensors of a norm, of weights and of statistics
        self.norm_stats = self.tp_seq_tokens * self.wide * self.norms
        # one pass of our CPU ops that go by blocks; a GPU kernel does all at once
        norm_block = min(self.stream, BLOCK_BYTES) if not self.cuda else self.stream
        # what fits into one block is computed as it is, and the result is the gradient
        is_whole = self.e >= 4 and (self.cuda or self.stream <= BLOCK_BYTES)
        self.norm_temporaries = (2 if self.norms == 2 else 3) * norm_block
        if is_whole:
            self.norm_temporaries = 0 if self.norms == 2 else 2 * norm_block
        self.gate_block = BLOCK_BYTES if not self.cuda else self.sp_tokens * self.ffn * self.e
        # Triton's kernels, which come with torch's CUDA wheels, have no temporaries but partial sums of a norm's gradients
        self.fused = self.cuda and not precision.fp64 and kernels.fused_kernels != "torch"
        if self.fused:
            self.norm_temporaries, self.gate_block = _NORM_PROGRAMS * self.norms * self.h * 4, 0

    def sp_positions(self, length: int) -> int:
        """Return the positions of an sp rank, of the ``length`` that its cp rank has."""
        return round_up(max(1, length), self.sp * self.parts) // self.sp

    def experts_of(self, layer: int) -> ExpertShape | None:
        """Return the sizes of a layer's experts; None: it has none."""
        return self.experts if self.share.experts and self.share.experts[layer] else None

    @property
    def chunked(self) -> bool:
        """True if the MLP is computed in pieces, without saving its wide activation."""
        return self.kernels.mlp_chunks > 1

    @cached_property
    def recomputed(self) -> list[tuple[int, int]]:
        """Chunks of recomputed blocks, (first, last + 1), which save only their input."""
        return [(first, last) for first, last, again in recompute_plan(self.kernels, self.layers) if again]

    @cached_property
    def made_again(self) -> frozenset[int]:
        """All recomputed blocks."""
        return frozenset(layer for first, last in self.recomputed for layer in range(first, last))
