"""Advice if no layout fits: the memory that is missing, and changes that help, each tried before it is suggested."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_sp.config.rules import violations
from megatron_sp.config.schema import Config
from megatron_sp.estimate.suggestions import plan_of
from megatron_sp.planner import parallel_plans as plans
from megatron_sp.planner.hardware import GPUS
from megatron_sp.planner.machine import Machine, reserve
from megatron_sp.planner.parallel_plans import Given, ParallelPlan
from megatron_sp.planner.search import num_groups

_NUMBER = 3
_MOST_GPUS = 8  # times the number of GPUs is doubled
_TOGETHER = 3  # most changes that are combined
_HARSH = ("--gpus", "--gpu ", "--seq-length", "--num-layers")
_AXES = ("tensor_model", "sequence", "context", "pipeline_model", "expert_model")
_LAYOUT_FIELDS = frozenset([
    *(("parallel", f"{name}_parallel_size") for name in _AXES), ("parallel", "zero_stage"),
    ("parallel", "sequence_parallel"), ("kernels", "recompute_granularity"), ("batch", "micro_batch_size"),
])  # fmt: skip

_State = tuple[Config, Given, Machine]


class Change(NamedTuple):
    """A change, in words or flags; the bytes that the smallest layout then needs; and the bytes that a GPU then has."""

    what: str
    needs: int
    have: int

    @property
    def fits(self) -> bool:
        """True if the memory suffices after the change."""
        return self.needs <= self.have


def least_memory(base: Config, given: Given, machine: Machine) -> tuple[int, ParallelPlan] | None:
    """Return bytes and layout of the layout that needs least memory; None if no layout is valid."""
    found: list[tuple[int, ParallelPlan]] = []
    # the overlap of exchanges hardly changes memory, and tp_seq always saves some
    tried = list(plans.frames(base, given, machine.gpus, machine.per_node))
    longest = max((frame.pp for frame in tried), default=1)  # shorter pipelines need more than that, or than none
    distinct = {(frame.axes, frame.ep): frame for frame in reversed(tried) if frame.pp in (1, longest)}
    for frame in distinct.values():
        dp = frame.dp(machine.gpus)
        size = plans.micro_batches(base, given, dp, frame.cp * frame.sp)[0]
        for stage, kind in plans.most_saving(plans.savings(base, given, dp * frame.cp * frame.sp)):
            layout = replace(frame, zero=stage, recompute=kind, micro_batch=size)
            config = layout.apply(base)
            if not violations(config, machine.gpus):
                peak = plan_of(config, machine.gpus, "cpu" if machine.is_cpu else "cuda").peak
                found.append((peak + reserve(machine, peak, num_groups(layout, machine.gpus)), layout))
    return min(found, key=lambda entry: entry[0]) if found else None


def find_changes(base: Config, given: Given, machine: Machine) -> list[Change]:
    """Return up to three changes, sufficient ones first: each alone and, if they do not suffice, mild ones combined."""
    now = least_memory(base, given, machine)
    tried = list(_tried(base, given, machine, now[0] if now else 0))
    found = [change for change, _ in tried]
    enough = {change.what.split()[0] for change in found if change.fits}  # these suffice alone
    state, words = (base, given, machine), ""
    for _ in range(_TOGETHER):
        gentle = [(change, after) for change, after in tried if not change.fits and not change.what.startswith(_HARSH)]
        if not gentle or sum(change.fits for change in found) >= _NUMBER:
            break
        step, state = min(gentle, key=lambda entry: entry[0].needs)
        words = f"{words}{step.what} and "
        tried = [entry for entry in _tried(*state, step.needs) if entry[0].what.split()[0] not in enough]
        found += [change._replace(what=words + change.what) for change, _ in tried if change.fits]
    found.sort(key=lambda change: (not change.fits, 0 if change.fits else change.needs - change.have))
    return found[:_NUMBER]


def _tried(base: Config, given: Given, machine: Machine, now: int) -> Iterator[tuple[Change, _State]]:
    # each change that helps, and the state after it; ``now``: bytes needed without one (0: none is valid)
    for what, config, fixed, where in _changes(base, given, machine, now):
        least = least_memory(config, fixed, where)
        if least is not None and (not now or least[0] < 0.97 * now or where.memory_bytes > machine.memory_bytes):
            yield Change(what, least[0], where.memory_bytes), (config, fixed, where)


def _changes(base: Config, given: Given, machine: Machine, now: int) -> Iterator[tuple[str, Config, Given, Machine]]:
    # (words, configuration, fixed fields, machine) for each change, mildest first

    def changed(section: str, name: str, value: object) -> Config:
        config = copy.deepcopy(base)
        setattr(getattr(config, section), name, value)
        return config

    for section, name in sorted(given & _LAYOUT_FIELDS):
        default = type(getattr(base, section))().__dict__[name]
        what = f"leave --{name.replace('_', '-')} to the planner"
        yield what, changed(section, name, default), given - {(section, name)}, machine
    if base.precision.params_dtype == "float32":
        yield "--bf16", changed("precision", "bf16", True), given, machine
    if not base.kernels.offload_activations and not machine.is_cpu:
        yield "--offload-activations", changed("kernels", "offload_activations", True), given, machine
    # the smallest multiple of the number of GPUs that suffices, else the largest tried
    fixed = ("batch", "global_batch_size") in given or machine.is_cpu
    for doublings in range(1, _MOST_GPUS + 1):
        times = 2**doublings
        inside = min(times, max(1, 8 // machine.per_node)) if machine.nodes == 1 else 1
        nodes = machine.nodes * times // inside
        where = replace(machine, gpus=machine.gpus * times, nodes=nodes)
        larger_batch = (base.batch.global_batch_size or 1) * times
        config = changed("batch", "global_batch_size", larger_batch if fixed else plans.default_batch(base, where.gpus))
        least = least_memory(config, given, where)
        if (least is not None and least[0] <= machine.memory_bytes) or doublings == _MOST_GPUS:
            more = f" --nodes {nodes}" if nodes > 1 else ""
            larger = f" (with a global batch {times} times as large)" if fixed else ""
            yield f"--gpus {where.gpus}{more}{larger}", config, given, where
            break
    bigger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > machine.memory_bytes]
    bigger.sort(key=lambda gpu: gpu.memory_bytes)
    if bigger and not machine.is_cpu:
        gpu = next((gpu for gpu in bigger if now <= gpu.memory_bytes), bigger[-1])
        yield f"--gpu {gpu.name}", base, given, replace(machine, gpu=gpu, memory_bytes=gpu.memory_bytes)
    if base.model.seq_length and base.model.seq_length > 1:
        config = changed("model", "seq_length", base.model.seq_length // 2)
        config.model.max_position_embeddings = None
        yield f"--seq-length {config.model.seq_length}", config, given, machine
    if base.model.num_layers and base.model.num_layers > 1:
        config = changed("model", "num_layers", base.model.num_layers // 2)
        yield f"--num-layers {config.model.num_layers}", config, given, machine
