"""Suggestions for a run with too little memory; each change is tried by the rough form before it is suggested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_sp.config.rules import normalize, violations
from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_plan import Device, Line, MemoryPlan
from megatron_sp.estimate.rough import copy_bytes, rough_memory
from megatron_sp.utils.format import format_bytes

_NUMBER = 3
_MOST_TRIED = 1 << 10  # divisors of a batch size that are tried; a larger size is a typing error


class Suggestion(NamedTuple):
    """A change of flags, and the peak with it by the rough form."""

    flags: str
    peak: int


def plan_of(config: Config, world_size: int, device: Device) -> MemoryPlan:
    """Return the memory of the fullest rank by the rough form, with the copy for background saves."""
    return with_saves(rough_memory(config, world_size, device), config, world_size, device)


def with_saves(plan: MemoryPlan, config: Config, world_size: int, device: Device) -> MemoryPlan:
    """Return a plan with the copy for background saves, and whether its steps are captured."""
    copy_of_saves = copy_bytes(config, world_size)
    if device == "cuda":
        from megatron_sp.config.rules_kernels import obstacles

        is_captured = config.kernels.cuda_graphs != "off" and not obstacles(config)
        return replace(plan, host=plan.host + copy_of_saves, is_captured=is_captured)
    return replace(plan, stays=(*plan.stays, Line("copy for saving in the background", copy_of_saves)))


def find_suggestions(config: Config, world_size: int, device: Device, available: float = 0) -> list[Suggestion]:
    """Return up to three changes that lower the peak, those that bring it below ``available`` first."""
    # Of each kind of change the smallest that suffices is taken, else the one that helps most. If none suffices alone,
    # the last suggestion combines all changes that leave layout and precision unchanged.
    peak = plan_of(config, world_size, device).peak
    found: list[Suggestion] = []
    together, combined = copy.deepcopy(config), []
    for kind in _kinds(config):
        tried = []
        for flags, change in kind:
            changed = copy.deepcopy(config)
            change(changed)
            normalize(changed)
            if not violations(changed, world_size):
                tried.append((Suggestion(flags, plan_of(changed, world_size, device).peak), change))
        helpful = [each for each in tried if each[0].peak < 0.99 * peak]
        if not helpful:
            continue
        least = min(helpful, key=lambda each: each[0].peak)
        best, change = next((each for each in helpful if each[0].peak <= available), least)
        found.append(best)
        if not best.flags.startswith(("--sequence-parallel-size", "--tensor-model-parallel-size", "--bf16")):
            combined.append(best)
            change(together)
    order = lambda one: (one.peak > available, one.peak if one.peak > available else 0)
    found.sort(key=order)
    if len(combined) > 1 and found[0].peak > available:
        normalize(together)
        if not violations(together, world_size):
            flags = " ".join(one.flags for one in sorted(combined, key=order))
            found = [*found[: _NUMBER - 1], Suggestion(flags, plan_of(together, world_size, device).peak)]
    return found[:_NUMBER]


Change = tuple[str, Callable[[Config], None]]


def _kinds(config: Config) -> Iterator[list[Change]]:
    # the changes of each kind, cheapest kind first; within a kind the smallest change is first

    def setting(section: str, **values: object) -> Callable[[Config], None]:
        def change(changed: Config) -> None:
            for name, value in values.items():
                setattr(getattr(changed, section), name, value)

        return change

    parallel, kernels, size = config.parallel, config.kernels, config.batch.micro_batch_size
    yield [(f"--zero-stage {n}", setting("parallel", zero_stage=n)) for n in range(parallel.zero_stage + 1, 4)]
    smaller = [size // by for by in range(2, min(size, _MOST_TRIED) + 1) if size % by == 0]
    smaller += [1] if size > _MOST_TRIED else []
    yield [(f"--micro-batch-size {n}", setting("batch", micro_batch_size=n)) for n in smaller]
    if kernels.recompute_granularity != "full":
        full = {"recompute_granularity": "full", "recompute_method": None, "recompute_num_layers": None}
        yield [("--recompute-granularity full", setting("kernels", recompute_activations=False, **full))]
    yield [(f"--mlp-chunks {n}", setting("kernels", mlp_chunks=n)) for n in (4, 16) if n > kernels.mlp_chunks]
    if not kernels.offload_activations:
        yield [("--offload-activations", setting("kernels", offload_activations=True))]
    yield [("--no-async-save", setting("checkpoint", async_save=False))]
    sizes = [parallel.sequence_parallel_size * 2**i for i in range(1, 11)]
    sizes = [size for size in sizes if size <= (config.model.num_attention_heads or 0)]
    yield [(f"--sequence-parallel-size {n}", setting("parallel", sequence_parallel_size=n)) for n in sizes]
    sizes = [parallel.tensor_model_parallel_size * 2**i for i in range(1, 4)]
    split = {n: setting("parallel", tensor_model_parallel_size=n, sequence_parallel=True) for n in sizes}
    yield [(f"--tensor-model-parallel-size {n} --sequence-parallel", change) for n, change in split.items()]
    if config.precision.params_dtype == "float32":
        yield [("--bf16", setting("precision", bf16=True))]


def shortage(config: Config, world_size: int, device: Device, available: int, whose: str) -> list[str]:
    """Return the lines of a warning if a rank's predicted peak exceeds the bytes available (``whose``); else none."""
    plan = plan_of(config, world_size, device)
    if plan.peak <= available:
        return []
    needs, have = format_bytes(plan.peak), format_bytes(available)
    first = f"warning: a rank is predicted to need {needs} and there are {have} {whose}: "
    return [first + breakdown(plan), *advice(config, world_size, device, available)]


def breakdown(plan: MemoryPlan) -> str:
    """Return a breakdown of the memory in one line."""
    worst = sorted((*plan.stays, *plan.worst.lines), key=lambda line: -line.num_bytes)[:4]
    parts = ", ".join(f"{line.name} {format_bytes(line.num_bytes)}" for line in worst)
    stays, more = format_bytes(plan.resident), format_bytes(plan.worst.num_bytes)
    return f"{stays} that stay + {more} in {plan.worst.phase}, {plan.worst.name} (the largest: {parts})"


def advice(config: Config, world_size: int, device: Device, available: int) -> list[str]:
    """Return a line for each suggestion: the predicted peak, and whether it fits."""
    lines = []
    for remedy in find_suggestions(config, world_size, device, available):
        fits = "fits" if remedy.peak <= available else "still too much"
        lines.append(f"  {remedy.flags}: predicted {format_bytes(remedy.peak)}, {fits}")
    return lines or ["  no change of layout, batch or precision helps: make the model or --seq-length smaller"]
