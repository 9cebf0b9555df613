"""Forward and backward passes of a step through a pipeline: what the actions of ``parallel/pipeline.py`` compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups, pipes
from megatron_sp.comm.recorder import Direction, Recorder
from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import pairs_per_position
from megatron_sp.estimate.layout import layer_costs, layers_of_stages
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, StageInput, UnitEvents, row_mask
from megatron_sp.parallel.pipeline import Channels, Timeline, run_pipeline
from megatron_sp.parallel.pipeline_orders import forward_plan, plan_pipeline
from megatron_sp.parallel.pipeline_plan import SAME_COSTS, Action, Costs, PipelineKind, PipelinePlan, check_plan
from megatron_sp.parallel.pipeline_stages import Stage, cut_model
from megatron_sp.parallel.sequence_slices import KeysOfSlices, RowSlice, cut_into_slices

if TYPE_CHECKING:
    from megatron_sp.training.step import Losses, ModelPass, TrainStep


class Pipeline:
    """The pipeline of a run: its stages, its schedules, and the groups between neighbours. Collective."""

    # costs: times of a layer's passes, from which the order of zbv and of zb1p with several stages on a rank follows

    def __init__(
        self, groups: ParallelGroups, kind: PipelineKind, layers: Sequence[int], num_slices: int = 1,
        costs: Costs = SAME_COSTS,
    ) -> None:  # fmt: skip
        self.kind, self.rank, self.size, self.num_slices = kind, groups.pp_rank, groups.pp.size(), num_slices
        self._costs = costs
        self._world_size = groups.world_size
        self.stages = cut_model(tuple(layers))
        self.stages_per_rank = len(layers) // self.size
        self.rank_of = self.plan(1).rank_of
        neighbours = [(a, b) for a, b in zip(self.rank_of, self.rank_of[1:], strict=False) if a != b]
        pairs = {*neighbours, *((b, a) for a, b in neighbours)}
        self.channels = Channels(pipes(groups.mesh, pairs, groups.device), groups.pp_ranks, self.rank)

    @property
    def own_stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stage, owner in zip(self.stages, self.rank_of, strict=True) if owner == self.rank)

    @property
    def parts(self) -> list[str]:
        """Stages of each rank of the world, in words."""
        stages_of = [[stage for stage, owner in enumerate(self.rank_of) if owner == pp] for pp in range(self.size)]
        per_stage = self._world_size // self.size
        return [_of_stages(stages_of[rank // per_stage]) for rank in range(self._world_size)]

    def locate(self) -> tuple[str, str]:
        """Return the stage and the action that this rank is at, for messages; outside of a schedule all its stages."""
        position = self.channels.position
        action, where = position.action, str(position)
        return _of_stages([stage.number for stage in self.own_stages] if action is None else [action.stage]), where

    def plan(self, num_micro_batches: int) -> PipelinePlan:
        """Return the schedule of a step of so many micro-batches, checked."""
        return _checked(self.kind, self.size, self.stages_per_rank, num_micro_batches, self.num_slices, self._costs)


def _of_stages(stages: Sequence[int]) -> str:
    return f"pipeline stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


@lru_cache(maxsize=64)
def _checked(
    kind: PipelineKind, size: int, stages_per_rank: int, num_micro_batches: int, num_slices: int, costs: Costs
) -> PipelinePlan:
    plan = plan_pipeline(kind, size, stages_per_rank, num_micro_batches, num_slices, costs)
    check_plan(plan)
    return plan


def build_pipeline(config: Config, groups: ParallelGroups) -> Pipeline | None:
    """Return the pipeline of a configuration; None if the model is not cut. Collective."""
    parallel, num_layers = config.parallel, config.model.num_layers
    if parallel.pipeline_model_parallel_size == 1:
        return None
    assert num_layers
    kind, layers = cast("PipelineKind", parallel.pipeline_kind), layers_of_stages(config.model, config.parallel)
    return Pipeline(groups, kind, layers, parallel.num_pipeline_slices, layer_costs(config.model, config.kernels))


def fault_point(action: Action) -> str:
    # the name of an action as a place of injected faults (``utils/faults.py``)
    of_slice = f".{action.slice}" if action.slice else ""
    return f"pipeline.{action.kind}{action.stage}.{action.micro_batch}{of_slice}"


class PipelinedPasses:
    """Passes of a step's micro-batches through this rank's stages (a ``pipeline.StageWork``)."""

    # gradients None: forward passes alone; faults: called with the name of a place

    def __init__(
        self, pipeline: Pipeline, model: nn.Module, micro_batches: Sequence[MicroBatch], *,
        context_of: Callable[[int], ForwardContext], hidden: ModelPass, loss: Callable[[int, ForwardContext], Tensor],
        events: UnitEvents, weights: WholeWeights, gradients: FlatGradients | None,
        faults: Callable[[str], None] | None = None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.pipeline, self.model, self.micro_batches, self.gradients = pipeline, model, micro_batches, gradients
        self._context_of, self._hidden, self._loss, self._events = context_of, hidden, loss, events
        self._fault: Callable[[str], None] = (lambda _: None) if faults is None else faults
        self._has_faults = faults is not None
        self._enter: Callable[[Direction], None] = (lambda _: None) if recorder is None else recorder.enter
        self._model = cast("Any", model)
        count = len(micro_batches)
        forward_only = gradients is None
        self.plan = forward_plan(pipeline.rank_of, pipeline.size, count) if forward_only else pipeline.plan(count)
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._contexts: dict[int, tuple[ForwardContext, KeysOfSlices]] = {}
        last = "F" if gradients is None else "B"
        self._to_come = Counter(
            action.micro_batch for action in self.plan.actions[pipeline.rank] if action.kind == last
        )
        units = self._model.units()
        self._blocks = [index for index, unit in enumerate(units) if unit.alike]
        self._shared = [index for index, unit in enumerate(units) if not unit.alike]
        order: list[int] = []
        for action in self.plan.actions[pipeline.rank]:
            if action.kind != "W":
                backward = action.kind == "B"
                order += self._model.stage_order(
                    pipeline.stages[action.stage], backward=backward, trained=gradients is not None
                )
        weights.start_step(1, order)

    def run(self, timeline: Timeline | None = None) -> None:
        """Run all passes of the step. Collective over the pipeline.

        Args:
            timeline: records when each action was computed.
        """
        before = None if not self._has_faults else lambda action: self._fault(fault_point(action))
        run_pipeline(self.plan, self.pipeline.channels, self, timeline, before)

    def shape(self, action: Action) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        part, tokens = (action.micro_batch, action.slice), self.micro_batches[action.micro_batch]["tokens"]
        if part not in self._shapes:
            rows = self._model.cut(tokens, self._context(*part)).tp_seq_slice
            self._shapes[part] = rows.stop - rows.start, tokens.shape[0], self._model.config.hidden_size
        return self._shapes[part], self._model.params_dtype, tokens.device

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        self._enter("forward")
        stage, index, trained = self.pipeline.stages[action.stage], action.micro_batch, self.gradients is not None
        context = replace(
            self._context(index, action.slice), stage=StageInput(stage, x, "blocks" if trained else "all")
        )
        if not trained:
            self._forget(index)
        if stage.is_last and not trained:
            return self._loss(index, context)
        x = self._hidden(self.model, self.micro_batches[index], context, self._events)
        if not stage.is_last:
            self._fault("step.forward")
        return x

    def loss(self, action: Action, y: Tensor) -> Tensor:
        self._enter("forward")
        stage, index = self.pipeline.stages[action.stage], action.micro_batch
        context = replace(self._context(index, action.slice), stage=StageInput(stage, y, "head"))
        loss = self._loss(index, context)
        self._enter("backward")
        return loss

    def _context(self, index: int, number: int) -> ForwardContext:
        if index not in self._contexts:
            self._contexts[index] = self._context_of(index), KeysOfSlices()
        context, keys = self._contexts[index]
        if self.plan.num_slices == 1:
            return context
        config, length = self._model.config, self.micro_batches[index]["tokens"].shape[1]
        mask = row_mask(context.mask, length, config.window_size)
        runs = cut_into_slices(mask, self.plan.num_slices, pairs_per_position(config))
        return replace(context, row_slice=RowSlice(number, runs, keys))

    def _forget(self, index: int) -> None:
        # count a pass of a micro-batch, and let go of its context after the last one
        self._to_come[index] -= 1
        if not self._to_come[index]:
            context, _ = self._contexts.pop(index)
            if context.routers is not None:
                context.routers.finish()

    def _units(self, stage: Stage) -> tuple[list[int], list[int]]:
        # the units of a stage: its blocks, and the others, whose gradients are never put off
        order = self._model.stage_order(stage, backward=False, trained=False)
        units = self._model.units()
        # a table that the first and the last stage of a rank use is complete when the first one is
        is_complete = {"embedding": stage.is_first, "head": stage.is_last}
        others = {index for index in order if index in self._shared and is_complete.get(units[index].name, True)}
        return [index for index in order if index in self._blocks], sorted(others)

    def before_backward(self, action: Action, put_off: Action | None) -> None:
        assert self.gradients is not None
        self._enter("backward")
        stage = self.pipeline.stages[action.stage]
        blocks, others = self._units(stage)
        if action.micro_batch == self.plan.num_micro_batches - 1:
            self.gradients.last_micro_batch(others if put_off is not None else [*blocks, *others])
        self.gradients.more_follows = action.slice > 0
        self._model.before_backward(stage, self._events)
        self.gradients.put_off(put_off, blocks)

    def after_backward(self, action: Action) -> None:
        assert self.gradients is not None
        self.gradients.put_off(None)
        if action.slice == 0:
            _, others = self._units(self.pipeline.stages[action.stage])
            self.gradients.finish_micro_batch(others)
        self._forget(action.micro_batch)
        self._fault("step.backward")

    def weights(self, action: Action) -> None:
        assert self.gradients is not None
        blocks, _ = self._units(self.pipeline.stages[action.stage])
        if self.plan.splits:
            self._enter("backward")
            if action.micro_batch == self.plan.num_micro_batches - 1:
                self.gradients.last_micro_batch(blocks)
            self.gradients.more_follows = action.slice > 0
            self.gradients.catch_up(action)
        if action.slice == 0:  # the last of a micro-batch
            self.gradients.finish_micro_batch(blocks)


def run_pipelined_step(
    step: TrainStep, pipeline: Pipeline, micro_batches: list[MicroBatch], key: int | Tensor, losses: Losses, number: int
) -> None:
    """Run forward and backward of a step's micro-batches through this rank's stages. Collective over the pipeline.

    Args:
        key: as of ``TrainStep.micro_batch``.
    """
    recorder = step.recorder if step.recorder is not None and step.recorder.recording else None
    timeline = None if recorder is None else Timeline(recorder.clock)
    hidden, model, weights = step.loss.hidden, step.model, step.weights
    assert hidden is not None, "a task without stages, which the flags refuse"

    context_of = lambda index: step.context_of(micro_batches[index], key)
    if step.routers is not None and step.routers.counts_first:
        events = UnitWork(weights, None)
        head = lambda index, context: hidden(model, micro_batches[index], context, events)
        with step.routers.counting(), torch.no_grad():
            PipelinedPasses(
                pipeline, model, micro_batches, context_of=context_of, hidden=hidden, loss=head, events=events,
                weights=weights, gradients=None,
            ).run()  # fmt: skip
        step.seed(number)  # the passes that follow drop the same

    loss_of = lambda index, context: step.loss_of(micro_batches[index], context, losses, number)
    PipelinedPasses(
        pipeline, model, micro_batches, context_of=context_of, hidden=hidden, loss=loss_of, events=step.events,
        weights=weights, gradients=step.gradients,
        faults=(lambda place: step.faults.at(place, number)) if step.faults.faults else None, recorder=recorder,
    ).run(timeline)  # fmt: skip
    if recorder is not None and timeline is not None:
        recorder.actions = timeline.spans
