"""Rules of captured steps (--cuda-graphs): what a CUDA graph cannot have, told from the flags alone.

A graph launches the same kernels with the same addresses every time, and the host takes no part. So what reads the
device's numbers on the host, chooses by numbers of a batch, or copies to and from memory of the host, cannot be in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_model import ModelConfig

_PLAIN = ("unfused", "local")
_EXPERTS = "the host reads how many tokens each expert has (--num-experts)"


@dataclass(frozen=True)
class Obstacle:
    """A reason why steps are not captured."""

    reason: str  # what it is, and why a graph cannot have it
    way_out: str  # what to do about it


def obstacles(config: Config) -> list[Obstacle]:
    """Return why the steps of a configuration cannot be captured; empty if they can, on a GPU."""
    return [Obstacle(reason, way_out) for reason, way_out in _obstacles(config)]


def decoding_obstacles(model: ModelConfig, *, has_gpu: bool) -> list[Obstacle]:
    """Return why the steps of generated tokens cannot be captured; empty if they can."""
    found = [] if has_gpu else [Obstacle("a CPU has no graphs", "use a GPU")]
    return found + [Obstacle(_EXPERTS, "take a model without experts")] * model.has_experts


def violation(obstacle: Obstacle) -> str:
    """Return the error about --cuda-graphs on."""
    return f"--cuda-graphs on cannot be: {obstacle.reason}; {obstacle.way_out}, or use --cuda-graphs auto or off"


def _obstacles(config: Config) -> Iterator[tuple[str, str]]:
    model, parallel, kernels, data = config.model, config.parallel, config.kernels, config.data
    if kernels.device == "cpu":
        yield "--device cpu has no graphs", "use a GPU"
    elif parallel.distributed_backend == "gloo":
        yield "--distributed-backend gloo sends by the host, which takes no part in a graph", "use nccl"
    if model.has_experts:
        yield _EXPERTS, "leave the experts out"
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            "a stage of a pipeline waits for messages of others (--pipeline-model-parallel-size)",
            "use other kinds of parallelism",
        )
    for flag, given in (
        ("--offload-optimizer", parallel.offload_optimizer), ("--offload-activations", kernels.offload_activations),
    ):  # fmt: skip
        if given:
            yield f"{flag} copies to memory of the host, which is handed out anew in every step", "leave it out"
    if data.reset_attention_mask:
        yield "the host plans attention by the documents of each batch (--reset-attention-mask)", "leave it out"
    if model.is_bert and data.bert_pack_sequences:
        yield "the host plans attention by the sequences of each row (--bert-pack-sequences)", "leave it out"
    elif model.is_bert and (kernels.attention_backend not in _PLAIN or parallel.context_parallel_size > 1):
        yield (
            "the host plans attention by the length of each of BERT's sequences",
            "for short ones use --attention-backend unfused without --context-parallel-size, which masks padding by numbers of the device",
        )
    if (
        model.attention_dropout > 0
        and kernels.recompute_granularity is not None
        and kernels.attention_backend not in _PLAIN
    ):
        yield (
            "a recomputation sets the state of the generator that attention's kernel draws from (--attention-dropout"
            " with --recompute-granularity)",
            "add --attention-dropout 0",
        )
    if parallel.check_collectives:
        yield "--check-collectives compares ranks on the host before each collective", "leave it out"
    if config.logging.enable_fault_injection:
        yield "--enable-fault-injection acts at places of the host's code", "leave it out"
