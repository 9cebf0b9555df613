"""A layout in numbers: layers of a pipeline's stages, their costs and schedule; rows that cp ranks exchange."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, cast

from megatron_sp.config.schema import KernelConfig, ModelConfig, ParallelConfig
from megatron_sp.estimate.flops import forward_flops_per_token, head_in_layers, layer_shares, seen_share
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Costs, PipelineKind, PipelinePlan
from megatron_sp.parallel.pipeline_stages import deal_layers, deal_unlike_layers

if TYPE_CHECKING:
    from megatron_sp.parallel.context_plan import ContextPlan
    from megatron_sp.parallel.row_mask import RowMask


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Layers of each stage, in their order; ValueError if there are fewer layers than stages."""
    # the head counts as so many layers as it has FLOPs
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


def layer_costs(model: ModelConfig, kernels: KernelConfig) -> Costs:
    """FLOPs of a layer's passes (of unlike layers the mean) in those of its forward pass."""
    dense, scores = forward_flops_per_token(model, 0.0)
    scores *= seen_share(model)
    share = dense / (dense + scores)
    again = {"full": 1.0, "selective": 1.0 - share}.get(kernels.recompute_granularity or "", 0.0)
    if again == 1.0 and model.num_layers:
        plan = recompute_plan(kernels, model.num_layers)
        again = sum(last - first for first, last, recomputed in plan if recomputed) / model.num_layers
    # backward: gradients of products' inputs, attention's two for each of its products, and what is computed again
    return Costs(1.0, share + 2 * (1 - share) + again, share)


def pipeline_plan(
    model: ModelConfig, kernels: KernelConfig, parallel: ParallelConfig, num_micro_batches: int
) -> PipelinePlan:
    """Plan the passes of all ranks of a pipeline, with the costs of this model's layers."""
    kind = cast("PipelineKind", parallel.pipeline_kind)
    p, v = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank
    return plan_pipeline(kind, p, v, num_micro_batches, parallel.num_pipeline_slices, layer_costs(model, kernels))


def enough_micro_batches(parallel: ParallelConfig, num_micro_batches: int) -> int:
    """Micro-batches of a step that show all of it: beyond a few rounds nothing changes."""
    return min(num_micro_batches, 4 * parallel.pipeline_model_parallel_size * parallel.stages_per_pipeline_rank)


def row_mask_of(model: ModelConfig) -> RowMask:
    """Return the mask of a row as one document without padding; packed documents send less."""
    from megatron_sp.parallel.row_mask import RowMask

    assert model.seq_length
    return RowMask(model.seq_length, causal=not model.is_bert, window=None if model.is_bert else model.window_size)


def context_plan(model: ModelConfig, parallel: ParallelConfig) -> ContextPlan:
    """Return who sends which rows to whom over the cp ranks of a configuration."""
    return _context_plan(row_mask_of(model), parallel.context_parallel_size, parallel.cp_chunks)


@lru_cache(maxsize=64)
def _context_plan(mask: RowMask, cp_size: int, num_chunks: int | None) -> ContextPlan:
    from megatron_sp.parallel.context_plan import cut_row, plan_context  # not needed without cp

    return plan_context(mask, cut_row(mask, cp_size, num_chunks))
