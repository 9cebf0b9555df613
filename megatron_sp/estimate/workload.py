"""The part of a run that the closed forms are about: what one rank computes and holds in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.schema import BatchConfig, Config, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.expert_rows import RoutedRows, even_rows

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Workload:
    """One rank's part of a training step. The rank is sp rank 0, which holds most: the first ranks get the remainder of the heads.

    Attributes:
        model, parallel, kernels, batch, precision: validated configuration of the run, with the model's ``vocab_size``
            set.
        dp: data-parallel size; determines the number of micro-batches and of ZeRO's shards.
        device: determines kernels, temporaries and the chunks of the LM head.
        head_share: share of the positions that BERT's head processes on a CPU: the masked ones (--mask-prob).
        routed: rows that a layer's experts get; None: as many as with even random choices.
    """

    model: ModelConfig
    parallel: ParallelConfig
    kernels: KernelConfig
    batch: BatchConfig
    precision: PrecisionConfig
    dp: int = 1
    device: Device = "cpu"
    head_share: float = 1.0
    routed: RoutedRows | None = None


def num_micro_batches(workload: Workload) -> int:
    """Return the number of micro-batches of a step."""
    batch, each = workload.batch, workload.batch.micro_batch_size * workload.dp
    return (batch.global_batch_size or each) // each


def rows_of_experts(workload: Workload, tokens: int) -> RoutedRows:
    """Return the rows of one pass of a rank with so many tokens through a layer with experts."""
    parallel = workload.parallel
    return workload.routed or even_rows(
        workload.model, parallel.expert_model_parallel_size, tokens, parallel.moe_worst_load
    )


def head_share(config: Config) -> float:
    """Return the share of the positions that the head processes: for BERT the masked ones, else all."""
    return config.data.mask_prob if config.model.is_bert else 1.0


def workload_of(config: Config, world_size: int, device: Device) -> Workload:
    """Return the workload of a rank of a validated configuration."""
    return Workload(
        config.model, config.parallel, config.kernels, config.batch, config.precision,
        dp=config.parallel.dp_size(world_size), device=device, head_share=head_share(config),
    )  # fmt: skip
