"""How fast a run is in the layout that it has, and what it costs: the planner's time of one layout, without a search.

A dry run is made on any machine, so the one that it is for has to be named, or is assumed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import head_share, step_flops_per_token
from megatron_sp.estimate.rough import RoughRank
from megatron_sp.planner.hardware import find_gpu, find_link
from megatron_sp.planner.machine import Machine, cards_of
from megatron_sp.planner.rough_time import rough_seconds
from megatron_sp.planner.timeline import StepTime
from megatron_sp.utils.format import format_duration

ASSUMED_GPU, ASSUMED_LINK = "h100-80g", "ib-400g"


def machine_for(
    gpus: int, nodes: int = 0, gpu: str = "", link: str = "", flags: tuple[str, str] = ("--gpu", "--link")
) -> Machine:
    """Return a machine by the names of its parts.

    Args:
        gpus: total number of GPUs.
        nodes: number of nodes; 0: as many as have at most 8 GPUs each.
        gpu, link: of the planner's tables; empty: what is assumed.
        flags: what the user calls these two, for messages.
    Raises:
        ConfigError: an unknown name.
    """
    nodes = nodes or next(count for count in range(math.ceil(gpus / 8), gpus + 1) if gpus % count == 0)
    kind = find_gpu(gpu or ASSUMED_GPU, flags[0])
    between = find_link(link or ASSUMED_LINK, flags[1], between_nodes=True)
    inside = find_link(kind.link, flags[1], between_nodes=False)
    return Machine(
        kind, gpus, nodes, inside, between if nodes > 1 else None, cards_of(between, gpus // nodes), kind.memory_bytes
    )


def settle_overlap(config: Config, machine: Machine) -> tuple[Config, str]:
    """Return a copy of a configuration whose ``--sp-overlap-mode auto`` is the fastest mode by prediction, and its name.

    A run measures the modes when it starts. What is not auto is returned as it is, with an empty name.
    """
    parallel = config.parallel
    if parallel.overlap_mode != "auto" or parallel.sequence_parallel_size == 1:
        return config, ""
    heads = (config.model.num_attention_heads or 1) // (
        parallel.tensor_model_parallel_size * parallel.sequence_parallel_size
    )
    wanted = [parallel.sp_head_chunks] if parallel.sp_head_chunks is not None else [2, 4]
    tried = []
    for mode, chunks in [
        ("none", None),
        ("split-qkv", None),
        *(("chunked", count) for count in wanted if count <= max(heads, 1)),
    ]:
        made = copy.copy(config)
        made.parallel = copy.copy(parallel)
        made.parallel.sp_overlap_comm = made.parallel.split_qkv_linear = False
        made.parallel.sp_overlap_mode, made.parallel.sp_head_chunks = mode, chunks  # type: ignore[assignment]
        tried.append(
            (
                rough_seconds(RoughRank(made, machine.gpus, "cuda"), machine),
                made,
                f"{mode} x{chunks}" if chunks else mode,
            )
        )
    _, best, name = min(tried, key=lambda one: one[0])
    return best, name


def step_flops(config: Config, gpus: int) -> tuple[int, float]:
    """Return tokens and model FLOPs of a step, counting the query-key pairs that the mask leaves."""
    batch, model = config.batch, config.model
    samples = batch.global_batch_size or batch.micro_batch_size * config.parallel.dp_size(gpus)
    tokens = samples * (model.seq_length or 0)
    return tokens, step_flops_per_token(model, head_share(config))[model.is_bert] * tokens


@dataclass(frozen=True)
class Forecast:
    """Predicted speed of a run.

    Attributes:
        tokens: of a step.
        model_flops: FLOPs of a step for MFU.
    """

    machine: Machine
    time: StepTime
    tokens: int
    model_flops: float

    @classmethod
    def of(cls, config: Config, machine: Machine) -> Forecast:
        """Return the forecast for a validated configuration with its vocabulary and global batch size."""
        config, _ = settle_overlap(config, machine)
        from megatron_sp.planner.fake_run import step_time  # torch takes a second

        return cls(machine, step_time(config, machine), *step_flops(config, machine.gpus))

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of all GPUs together."""
        return self.tokens / self.time.seconds

    def words(self) -> str:
        """Return speed and machine in a line."""
        machine = self.machine
        mfu = self.model_flops / self.time.seconds / (machine.gpu.peak_tflops * 1e12 * machine.gpus)
        links = f"{machine.inside.name}{f', {machine.between.name} between hosts' if machine.between else ''}"
        return (
            f"{self.time.seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s ({self.tokens_per_second / machine.gpus:,.0f} a GPU,"
            f" MFU {mfu:.0%}) on {machine.gpu.name} ({links})"
        )

    def length(self, tokens: int) -> str:
        """Return how long so many tokens take."""
        seconds = tokens / self.tokens_per_second
        return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else format_duration(seconds)

    def price(self, tokens: int, per_gpu_hour: float) -> float:
        """Return what so many tokens cost."""
        return tokens / self.tokens_per_second / 3600 * self.machine.gpus * per_gpu_hour
