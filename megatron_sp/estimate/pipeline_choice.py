"""Choice of a pipeline's schedule (--pipeline-schedule auto) from numbers alone, the same on every rank and resume."""

# The schedules that the flags leave are replayed with the FLOPs of their stages, and the shortest is taken of those
# that take at most a fifth more memory than the first one, 1F1B, or with several stages on a rank interleaved. A
# schedule that saves less than a hundredth is not worth what it complicates, so the simpler ones come first. Slices are
# tried if --pipeline-slices asks for them: they round otherwise than the rest, of which each has the bits of 1F1B.

from __future__ import annotations

import copy
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_sp.config.rules_pipeline import pipeline_violations
from megatron_sp.config.schema import Config, KernelConfig, ModelConfig
from megatron_sp.estimate.flops import head_in_layers, layer_shares
from megatron_sp.estimate.layout import enough_micro_batches, layer_costs, layers_of_stages, pipeline_plan
from megatron_sp.estimate.memory_plan import Device
from megatron_sp.estimate.rough import rough_memory
from megatron_sp.parallel.pipeline_plan import Costs, PipelineKind, replay

_MOST_MEMORY = 1.2  # of what the first schedule takes
_WORTH = 0.99  # of the time of a simpler one
_KINDS: tuple[PipelineKind, ...] = ("1f1b", "zb1p", "interleaved", "zbv", "slices")


class Tried(NamedTuple):
    """A schedule that the flags allow."""

    kind: PipelineKind
    time: float  # of a step, in the time of a layer's forward pass
    bubble: float  # share of it in which ranks wait
    peak: int = 0  # bytes of the rank that holds most, by the rough form


def costs_of_stages(
    model: ModelConfig, kernels: KernelConfig, layers: tuple[int, ...], num_slices: int = 1
) -> list[Costs]:
    """Times of each stage's passes, in that of a layer's forward pass; of a slice those of its share."""
    # the head is computed in the backward pass of the last stage, forward and backward
    each, head, shares = layer_costs(model, kernels), head_in_layers(model), layer_shares(model)
    ends = list(accumulate(layers, initial=0))
    sizes = [sum(shares[start:stop]) / num_slices for start, stop in pairwise(ends)]
    found = [Costs(*(size * time for time in each[:3])) for size in sizes]
    found[-1] = found[-1]._replace(backward=found[-1].backward + 3 * head / num_slices)
    return found


def allowed_schedules(config: Config, num_micro_batches: int) -> list[Tried]:
    """Return the schedules that a configuration allows, the simplest first, without their memory."""
    allowed = []
    for kind in _KINDS:
        trial = _with_kind(config, kind)
        if (kind == "slices" and config.parallel.pipeline_slices is None) or any(pipeline_violations(trial)):
            continue
        # a step is seen by its first rounds; later ones are alike
        first_ones = enough_micro_batches(trial.parallel, num_micro_batches)
        plan = pipeline_plan(trial.model, trial.kernels, trial.parallel, first_ones)
        layers = layers_of_stages(trial.model, trial.parallel)
        costs = costs_of_stages(trial.model, trial.kernels, layers, plan.num_slices)
        seconds = lambda action, costs=costs: costs[action.stage].of(action.kind)
        played = replay(plan, seconds)
        times = num_micro_batches / first_ones
        time = played.time + (times - 1) * max(played.busy)
        allowed.append(Tried(kind, time, 1 - times * sum(played.busy) / (time * plan.num_ranks)))
    return allowed


def try_schedules(config: Config, world_size: int) -> list[Tried]:
    """Return the schedules that a configuration allows, with their memory."""
    samples = config.batch.micro_batch_size * config.parallel.dp_size(world_size)
    device: Device = "cpu" if config.kernels.device == "cpu" else "cuda"
    return [
        tried._replace(peak=rough_memory(_with_kind(config, tried.kind), world_size, device).peak)
        for tried in allowed_schedules(config, (config.batch.global_batch_size or samples) // samples)
    ]


def _with_kind(config: Config, kind: PipelineKind) -> Config:
    trial = copy.copy(config)
    trial.parallel = copy.copy(config.parallel)
    trial.parallel.pipeline_schedule = kind
    if kind != "slices":
        trial.parallel.pipeline_slices = None
    return trial


def choose(tried: list[Tried]) -> Tried:
    """Return the schedule to take: the shortest of those that take about as much memory as the first one."""
    best = tried[0]
    for each in tried[1:]:
        if each.peak <= _MOST_MEMORY * tried[0].peak and each.time < _WORTH * best.time:
            best = each
    return best


def settle_schedule(config: Config, world_size: int) -> str:
    """Replace --pipeline-schedule auto, of a model whose ``vocab_size`` is set; return a line about it, or ""."""
    if config.parallel.pipeline_schedule != "auto":
        return ""
    if config.parallel.pipeline_model_parallel_size == 1:
        config.parallel.pipeline_schedule = None
        return ""
    tried = try_schedules(config, world_size)
    best = choose(tried)
    config.parallel = _with_kind(config, best.kind).parallel
    gib, first = 2**30, tried[0]
    listed = ", ".join(f"{each.kind} {each.time / first.time:.2f} ({each.peak / gib:.1f} GiB)" for each in tried)
    return f"--pipeline-schedule auto: {best.kind}, bubble {best.bubble:.0%} (time by FLOPs, and memory: {listed})"
