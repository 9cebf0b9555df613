"""Stages of a pipeline in numbers: which layers a rank has, and how many passes are between their forward and their backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from megatron_sp.config.schema import ModelConfig, ParallelConfig
from megatron_sp.estimate.flops import head_in_layers
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import PipelineKind, PipelinePlan
from megatron_sp.parallel.pipeline_stages import deal_layers


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the order of the stages; the head counts as so many layers as it has FLOPs.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    assert model.num_layers
    p, v = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
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
        alive: most passes of a stage between F and B at a time.
        stages: of the rank.
        waiting: most backward passes whose weights' gradients are put off at a time.
        turns: the rank has two stages in a row, in the middle of a V.
    """

    layers: int
    has_embedding: bool = True
    has_head: bool = True
    alive: int = 1
    stages: int = 1
    waiting: int = 0
    turns: bool = False

    @property
    def others(self) -> int:
        """Passes of a stage beside those of one micro-batch through all stages of the rank."""
        return max(0, self.alive - self.stages)


def pipeline_plan(parallel: ParallelConfig, num_micro_batches: int) -> PipelinePlan:
    """Return the schedule of a configuration."""
    kind = cast("PipelineKind", parallel.pipeline_kind)
    p, v = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank
    return plan_pipeline(kind, p, v, num_micro_batches, parallel.num_pipeline_slices)


@lru_cache(maxsize=256)
def _alive_and_waiting(plan: PipelinePlan, rank: int) -> tuple[int, int]:
    alive = waiting = most = most_waiting = 0
    for action in plan.actions[rank]:
        alive += {"F": 1, "B": -1, "W": 0}[action.kind]
        waiting += {"F": 0, "B": 1, "W": -1}[action.kind]
        # a pass is alive while its B runs
        most, most_waiting = max(most, alive + (action.kind == "B")), max(most_waiting, waiting)
    return most, most_waiting if plan.splits else 0


def shares_of(model: ModelConfig, parallel: ParallelConfig, num_micro_batches: int) -> list[RankShare]:
    """Return what each pipeline rank has."""
    assert model.num_layers
    if parallel.pipeline_model_parallel_size == 1:
        return [RankShare(model.num_layers)]
    # beyond a few rounds nothing changes, and a plan of thousands of micro-batches is long
    enough = 4 * parallel.pipeline_model_parallel_size * parallel.stages_per_pipeline_rank
    plan, layers = pipeline_plan(parallel, min(num_micro_batches, enough)), layers_of_stages(model, parallel)
    found = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        alive, waiting = _alive_and_waiting(plan, rank)
        found.append(
            RankShare(
                sum(layers[stage] for stage in stages),
                stages[0] == 0,
                stages[-1] == plan.num_stages - 1,
                alive,
                len(stages),
                waiting,
                len(stages) == 2 and stages[1] == stages[0] + 1,
            )
        )
    return found
