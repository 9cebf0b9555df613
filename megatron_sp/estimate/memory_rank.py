"""Closed forms of one rank: sizes of its tensors, attention, saved activations, and parameters with ZeRO, computed from a workload.

``estimate/memory.py`` combines them to the moments of a step, ``estimate/traffic.py`` to its collectives,
``planner/work.py`` to its time.
"""

from __future__ import annotations

from copy import copy

from megatron_sp.estimate.memory_activations import ActivationForm
from megatron_sp.estimate.memory_attention import AttentionForm
from megatron_sp.estimate.memory_shape import RankShape
from megatron_sp.estimate.memory_zero import ALIGN_BYTES, PassGradients, ZeroForm
from megatron_sp.estimate.parameters import norm_widths
from megatron_sp.estimate.stages import RankShare, shares_of
from megatron_sp.estimate.workload import Workload, num_micro_batches
from megatron_sp.utils.numbers import round_up


class RankForm:
    """Closed forms of one rank, each a part of its own.

    Args:
        workload: configuration of the run, and layout.
        share: what a pipeline rank has of the model; None: all of it.

    Attributes:
        shape: tokens, widths and sizes.
        attention: a block's attention.
        activations: what blocks save for backward.
        zero: parameters and gradients.
        gradients: gradients in the course of a pass.
    """

    gradients: PassGradients

    def __init__(self, workload: Workload, share: RankShare | None = None) -> None:
        self.workload = workload
        self.shape = RankShape(workload, share)
        self.attention = AttentionForm(workload, self.shape)
        self.activations = ActivationForm(self.shape, self.attention)
        ends = self.shape.share.has_embedding and self.shape.share.has_head
        is_tied = ends and not workload.model.untie_embeddings_and_output_weights
        units, experts = self._units()
        ranks = workload.dp * self.shape.cp * self.shape.sp
        self.zero = ZeroForm(
            units, workload.parallel, ranks, self.shape.e, self.shape.wide,
            num_micro_batches=self.shape.num_micro_batches, tied=is_tied, receives=not self.shape.cuda, is_cut=self.shape.share.is_cut,
            table=self._shared_table(), experts=experts,
            expert_ranks=ranks * self.shape.parts // workload.parallel.expert_model_parallel_size,
        )  # fmt: skip
        self.gradients = self.zero

    def _units(self) -> tuple[list[int], frozenset[int]]:
        """Return the parameters of the embedding, of each block and of the head, in elements as aligned in the flat buffers.

        A block's experts are a unit behind it; the second result has the numbers of these units.
        A table that embedding and head share on two ranks is in neither (``ZeroForm.table``).
        """
        model, shape, qkv_rows = self.workload.model, self.shape, self.attention.qkv_rows
        h, norms, align = shape.h, shape.norms, ALIGN_BYTES // shape.e

        def aligned(*counts: int) -> int:
            return sum(round_up(count, align) for count in counts)

        attention = [qkv_rows * h, h * self.attention.proj_columns]
        attention += (
            [qkv_rows] * model.qkv_bias
            + [h] * model.proj_bias
            + [width for width in norm_widths(model) for _ in range(norms)]
        )
        share = shape.share

        def mlp(ffn: int, *, times: int = 1) -> list[int]:
            """Return the sizes of an MLP of this width; of stacked experts so many times as much."""
            ffn_in = ffn * (2 if model.is_gated else 1)
            return [times * size for size in [ffn_in * h, h * ffn] + [ffn_in, h] * model.mlp_bias]

        block = aligned(*attention, *mlp(shape.ffn), *[h] * (2 * norms))
        blocks, experts = [block] * shape.layers, set[int]()
        if any(share.experts):
            assert model.num_experts
            shared = mlp(model.shared_expert_size // shape.tp) if model.shared_expert_size else []
            beside = aligned(*attention, model.num_experts * h, *shared, *[h] * (2 * norms))
            own = aligned(
                *mlp(
                    model.expert_ffn_size, times=model.num_experts // self.workload.parallel.expert_model_parallel_size
                )
            )
            blocks = []
            for has in share.experts:
                blocks += [beside, own] if has else [block]
                experts |= {len(blocks)} if has else set()
        positions = [model.max_positions * h] if model.position_embedding_type == "learned_absolute" else []
        positions += [model.token_types * h] if model.token_types else []
        table = [shape.rows * h]
        before, behind = ([h] * norms, []) if shape.post else ([], [h] * norms)  # norms outside the blocks
        bert = [h * h, h, *[h] * norms, shape.rows] if model.is_bert else []
        bert += [h * h, h, 2 * h, 2] if model.has_order_head else []
        output = table if model.untie_embeddings_and_output_weights else []
        entry = [] if self._shared_table() else table
        first = aligned(*entry, *positions, *before) if share.has_embedding else 0
        return [first, *blocks, aligned(*behind, *bert, *output) if share.has_head else 0], frozenset(experts)

    def _shared_table(self) -> int:
        """Return the elements of a table that the first and the last rank of a pipeline share; 0 if there is none here."""
        share, model = self.shape.share, self.workload.model
        is_shared = share.has_embedding != share.has_head and not model.untie_embeddings_and_output_weights
        return round_up(self.shape.rows * self.shape.h, ALIGN_BYTES // self.shape.e) if is_shared else 0

    def of_stage(self, index: int, number: int = 0) -> RankForm:
        """Return the forms of one stage of a pipeline rank; ``zero`` is that of the rank.

        Args:
            index: of the stage, among the rank's.
            number: of a slice of the sequences.
        """
        made = copy(self)
        made.shape = RankShape(self.workload, self.shape.share.stage(index), number)
        if number:
            made.attention = AttentionForm(self.workload, made.shape)
        made.activations = ActivationForm(made.shape, made.attention)
        return made

    def of_passes(self) -> list[RankForm]:
        """Return the forms of each stage and slice of a pipeline rank, slices of a stage one after another; without a pipeline these."""
        share = self.shape.share
        if not share.is_cut:
            return [self]
        return [self.of_stage(index, number) for index in range(share.stages) for number in range(share.num_slices)]

    def with_gradients(self, gradients: PassGradients) -> RankForm:
        """Return these forms in a pass with such gradients."""
        made = copy(self)
        made.gradients = gradients
        return made

    def shared_gradients(self, place: int) -> int:
        """Return the number of gradient elements of a place that tp ranks share, and sum in one packed all_reduce."""
        model, shape = self.workload.model, self.shape
        h, norms = shape.h, shape.norms
        if shape.tp == 1:
            return 0
        if place == 0 and shape.parts > 1:
            rows = model.max_positions if model.position_embedding_type == "learned_absolute" else 0
            return (rows + model.token_types + norms * shape.post) * h
        if place == 0 or place > shape.layers:
            return norms * h if shape.parts > 1 and not shape.post and place > 0 else 0
        experts = bool(shape.share.experts) and shape.share.experts[place - 1]
        has_bias = model.mlp_bias and (not experts or model.shared_expert_size > 0)
        count = (2 * norms + model.proj_bias + has_bias) * h if shape.parts > 1 else 0
        count += (model.num_experts or 0) * h if experts and shape.parts > 1 else 0  # of the router
        count += norms * sum(norm_widths(model))
        if model.num_groups % shape.tp:  # every rank has room for all groups
            count += model.num_groups * 2 * shape.d * (h + model.qkv_bias)
        return count


def forms_of_ranks(workload: Workload) -> list[RankForm]:
    """Return the closed forms of the pipeline ranks; without a pipeline of the one rank."""
    shares = shares_of(workload.model, workload.kernels, workload.parallel, num_micro_batches(workload))
    return [RankForm(workload, share) for share in shares]


def largest_form(workload: Workload) -> RankForm:
    """Return the closed forms of the pipeline rank with most parameters."""
    return max(forms_of_ranks(workload), key=lambda form: form.zero.num_params)
