"""Stages of a pipeline in numbers: which layers a rank has, and how many passes are between their forward and their backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, cast

from megatron_sp.config.schema import KernelConfig, ModelConfig, ParallelConfig
from megatron_sp.estimate.flops import forward_flops_per_token, head_in_layers, layer_shares, seen_share
from megatron_sp.estimate.pipeline_states import PassState, states_of
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Costs, PipelineKind, PipelinePlan
from megatron_sp.parallel.pipeline_stages import deal_layers, deal_unlike_layers


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the order of the stages; the head counts as so many layers as it has FLOPs.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    assert model.num_layers
    p, v = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank
    if parallel.pipeline_model_parallel_layout is not None:
        from megatron_sp.config.rules_pipeline import layers_of_layout

        return layers_of_layout(parallel.pipeline_model_parallel_layout)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        shares = layer_shares(model)
        if len(set(shares)) > 1:
            return deal_unlike_layers(shares, p * v, head=head_in_layers(model))
        return deal_layers(model.num_layers, p * v, head=head_in_layers(model))
    left = model.num_layers - (first or 0) - (last or 0)
    ranks = deal_layers(left, p - (first is not None) - (last is not None)) if left else ()
    of_ranks = (*([] if first is None else [first]), *ranks, *([] if last is None else [last]))
    each = [deal_layers(count, v) for count in of_ranks]
    return tuple(each[stage % p][stage // p] for stage in range(p * v))


@dataclass(frozen=True)
class RankShare:
    """Part of the model and of a step that a pipeline rank has; without a pipeline all of it.

    Attributes:
        layers: of all its stages.
        has_embedding, has_head: what its stages have beside layers.
        of_stages: layers of each of its stages; empty without a pipeline.
        is_stage: it is one stage alone.
        turns: the rank has two stages in a row, in the middle of a V; of one stage: on which side the other one is.
        puts_off: gradients of its blocks are put off.
        num_slices: of a sequence.
        states: what it holds at each action of a step, as far as that can be the most.
        experts: for each of its layers, in order, whether it has experts; empty: none has.
    """

    layers: int
    has_embedding: bool = True
    has_head: bool = True
    of_stages: tuple[int, ...] = ()
    is_stage: bool = False
    turns: Literal["", "both", "below", "above"] = ""
    puts_off: bool = False
    num_slices: int = 1
    states: tuple[PassState, ...] = ()
    experts: tuple[bool, ...] = ()

    @classmethod
    def whole(cls, model: ModelConfig) -> RankShare:
        """Return the share of a rank that has all of a model."""
        assert model.num_layers
        return cls(model.num_layers, experts=_which_have_experts(model))

    @property
    def is_cut(self) -> bool:
        """True with a pipeline."""
        return self.is_stage or bool(self.of_stages)

    @property
    def stages(self) -> int:
        """Number of stages of the rank."""
        return max(1, len(self.of_stages))

    def stage(self, index: int) -> RankShare:
        """Return the share of one of its stages."""
        has_embedding, has_head = self.has_embedding and index == 0, self.has_head and index == self.stages - 1
        side: Literal["below", "above"] = "above" if index else "below"
        turns = side if self.turns else ""
        first = sum(self.of_stages[:index])
        experts = self.experts[first : first + self.of_stages[index]]
        return RankShare(
            self.of_stages[index],
            has_embedding,
            has_head,
            is_stage=True,
            turns=turns,
            puts_off=self.puts_off,
            experts=experts,
        )


def _which_have_experts(model: ModelConfig) -> tuple[bool, ...]:
    """Return for each layer whether it has experts; empty: none has."""
    assert model.num_layers
    which = model.expert_layers(model.num_layers)
    return tuple(layer in which for layer in range(model.num_layers)) if which else ()


def layer_costs(model: ModelConfig, kernels: KernelConfig) -> Costs:
    """Return the time of a layer's passes by their FLOPs, in that of its forward pass; of unlike layers that of a layer on average."""
    dense, scores = forward_flops_per_token(model, 0.0)
    scores *= seen_share(model)
    share = dense / (dense + scores)
    # the gradients of products' inputs, attention's two for each of its products, and what is computed again
    again = (
        1.0
        if kernels.recompute_granularity == "full"
        else 1.0 - share
        if kernels.recompute_granularity == "selective"
        else 0.0
    )
    if again == 1.0 and model.num_layers:
        again = (
            sum(last - first for first, last, recomputed in recompute_plan(kernels, model.num_layers) if recomputed)
            / model.num_layers
        )
    return Costs(1.0, share + 2 * (1 - share) + again, share)


def pipeline_plan(
    model: ModelConfig, kernels: KernelConfig, parallel: ParallelConfig, num_micro_batches: int
) -> PipelinePlan:
    """Return the schedule of a configuration."""
    kind = cast("PipelineKind", parallel.pipeline_kind)
    p, v = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank
    return plan_pipeline(kind, p, v, num_micro_batches, parallel.num_pipeline_slices, layer_costs(model, kernels))


def enough_micro_batches(parallel: ParallelConfig, num_micro_batches: int) -> int:
    """Return how many micro-batches of a step show all of it: beyond a few rounds nothing changes, and the plan of thousands is long."""
    return min(num_micro_batches, 4 * parallel.pipeline_model_parallel_size * parallel.stages_per_pipeline_rank)


def shares_of(
    model: ModelConfig, kernels: KernelConfig, parallel: ParallelConfig, num_micro_batches: int
) -> list[RankShare]:
    """Return what each pipeline rank has."""
    assert model.num_layers
    if parallel.pipeline_model_parallel_size == 1:
        return [RankShare.whole(model)]
    plan = pipeline_plan(model, kernels, parallel, enough_micro_batches(parallel, num_micro_batches))
    layers, experts = layers_of_stages(model, parallel), _which_have_experts(model)
    starts = list(accumulate(layers, initial=0))
    zero_stage = max(parallel.zero_stage, int(parallel.grad_reduce_in_bf16))  # what is rounded is kept, too
    found = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        of_stages = tuple(layers[stage] for stage in stages)
        has_embedding, has_head = stages[0] == 0, stages[-1] == plan.num_stages - 1
        turns: Literal["", "both"] = "both" if len(stages) == 2 and stages[1] == stages[0] + 1 else ""
        share = RankShare(
            sum(of_stages), has_embedding, has_head, of_stages, turns=turns, puts_off=plan.splits, num_slices=plan.num_slices,
            states=states_of(plan, rank, zero_stage),
            experts=tuple(has for stage in stages for has in experts[starts[stage] : starts[stage + 1]]),
        )  # fmt: skip
        found.append(share)
    return found
