"""Rules of kernels, recomputation and devices, and what a CUDA graph cannot have (--cuda-graphs), told from the flags.

A graph launches the same kernels with the same addresses every time, and the host takes no part. So what reads the
device's numbers on the host, chooses by numbers of a batch, or copies to and from memory of the host, cannot be in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_model import ModelConfig

# a rule is a condition and a sentence
# fmt: off
_FLASH_HEAD_DIM = 256
_PLAIN = ("unfused", "local")
_EXPERTS = "the host reads how many tokens each expert has (--num-experts)"


def kernel_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule."""
    kernels, model, precision = config.kernels, config.model, config.precision
    yield from _attention(config)
    if (fused := kernels.fused_kernels) in ("apex", "triton"):
        if kernels.device == "cpu":
            yield f"--fused-kernels {fused} needs a GPU, but --device cpu was given: use auto or torch"
        if precision.fp64:
            rule = "computes in fp32, bf16 and fp16 only, not float64"
            yield f"--fused-kernels {fused} {rule}: use auto, or another precision"
        if fused == "apex" and config.parallel.offload_optimizer and config.optimizer.optimizer == "adam":
            yield ("--fused-kernels apex updates on the GPU, --offload-optimizer on the host: use --fused-kernels auto,"
                " or drop the latter")
    granularity, method, layers = kernels.recompute_granularity, kernels.recompute_method, kernels.recompute_num_layers
    if kernels.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, but full was given: drop one"
    if granularity == "selective" and method:
        yield ("--recompute-method chooses whole blocks and needs --recompute-granularity full (given: selective):"
            " change one of them")
    if granularity == "full" and method == "block" and layers is None:
        yield "--recompute-method block needs --recompute-num-layers N (how many blocks to recompute)"
    if kernels.recompute_attention != "none" and granularity != "full":
        yield (f"--recompute-attention {kernels.recompute_attention} is about recomputed blocks and needs"
            f" --recompute-granularity full (given: {granularity or 'nothing'}): change one of them")
    if kernels.recompute_qkv and granularity == "selective":
        yield ("--recompute-qkv keeps attention's output, and --recompute-granularity selective computes it again: drop"
            " one of them")
    shards = config.parallel.num_shards
    positions = -(-(model.seq_length or 0) // shards)
    if model.seq_length and kernels.mlp_chunks > positions:
        yield (f"mlp_chunks ({kernels.mlp_chunks}) must be at most the positions of a rank ({model.seq_length} /"
            f" {shards}, rounded up, = {positions}): use --mlp-chunks {positions} or less")
    if layers and model.num_layers and layers > model.num_layers:
        yield f"recompute_num_layers ({layers}) must be at most num_layers ({model.num_layers})"


def _attention(config: Config) -> Iterator[str]:
    kernels, model, precision = config.kernels, config.model, config.precision
    backend = kernels.attention_backend
    flag = f"--attention-backend {backend}"
    if backend in ("flash", "flash2", "flash3", "flash4", "cudnn"):
        package = "cuDNN" if backend == "cudnn" else "flash-attn"
        if kernels.device == "cpu":
            yield f"{flag} needs a GPU, but --device cpu was given: use auto or fused"
        if not (precision.bf16 or precision.fp16):
            rule = f"computes in bf16 and fp16 only, not {precision.params_dtype}"
            yield f"{package} {rule}: add --bf16, or drop the flash flag"
        if model.knows_head_dim and model.head_dim > _FLASH_HEAD_DIM:
            rule = f"takes heads up to {_FLASH_HEAD_DIM} wide, not {model.head_dim}"
            yield f"{package} {rule}: use --attention-backend auto"
    if backend in ("flash3", "flash4") and model.attention_dropout > 0:
        yield (f"FlashAttention {backend[-1]} has no attention dropout, and attention_dropout is"
            f" {model.attention_dropout}: add --attention-dropout 0, or use --attention-backend flash2 or auto")
    if backend == "cudnn" and kernels.deterministic_mode:
        yield f"{flag} and --deterministic-mode exclude each other: torch refuses cuDNN's backward there; use auto"
    if backend == "cudnn" and (model.window_size is not None or config.data.reset_attention_mask):
        other = "--window-size" if model.window_size is not None else "--reset-attention-mask"
        yield f"{flag} and {other} exclude each other: torch's SDPA passes no such mask to cuDNN; use auto"


# ------------------------------------------------------------------------------------------------------ captured steps


class Obstacle(NamedTuple):
    """A reason why steps are not captured."""

    reason: str  # what it is, and why a graph cannot have it
    way_out: str  # what to do about it


def violation(obstacle: Obstacle) -> str:
    """Return the error about --cuda-graphs on."""
    return f"--cuda-graphs on cannot be: {obstacle.reason}; {obstacle.way_out}, or use --cuda-graphs auto or off"


def decoding_obstacles(model: ModelConfig, *, has_gpu: bool) -> list[Obstacle]:
    """Return why the steps of generated tokens cannot be captured; empty if they can."""
    no_gpu = [] if has_gpu else [Obstacle("a CPU has no graphs", "use a GPU")]
    return no_gpu + [Obstacle(_EXPERTS, "take a model without experts")] * model.has_experts


def obstacles(config: Config) -> list[Obstacle]:
    """Return why the steps of a configuration cannot be captured; empty if they can, on a GPU."""
    model, parallel, kernels, data = config.model, config.parallel, config.kernels, config.data
    on_cpu = kernels.device == "cpu"
    packs = model.is_bert and data.bert_pack_sequences
    masks_on_device = kernels.attention_backend in _PLAIN and parallel.context_parallel_size == 1
    draws = model.attention_dropout > 0 and kernels.attention_backend not in _PLAIN
    copies, leave_out = "copies to memory of the host, which is handed out anew in every step", "leave it out"
    table = (
        (on_cpu, "--device cpu has no graphs", "use a GPU"),
        (not on_cpu and parallel.distributed_backend == "gloo",
         "--distributed-backend gloo sends by the host, which takes no part in a graph", "use nccl"),
        (model.has_experts, _EXPERTS, "leave the experts out"),
        (parallel.pipeline_model_parallel_size > 1,
         "a stage of a pipeline waits for messages of others (--pipeline-model-parallel-size)",
         "use other kinds of parallelism"),
        (parallel.offload_optimizer, f"--offload-optimizer {copies}", leave_out),
        (kernels.offload_activations, f"--offload-activations {copies}", leave_out),
        (data.reset_attention_mask, "the host plans attention by the documents of each batch (--reset-attention-mask)",
         leave_out),
        (packs, "the host plans attention by the sequences of each row (--bert-pack-sequences)", leave_out),
        (model.is_bert and not packs and not masks_on_device,
         "the host plans attention by the length of each of BERT's sequences",
         "for short ones use --attention-backend unfused without --context-parallel-size, which masks padding by"
         " numbers of the device"),
        (draws and kernels.recompute_granularity is not None,
         "a recomputation sets the state of the generator that attention's kernel draws from (--attention-dropout with"
         " --recompute-granularity)", "add --attention-dropout 0"),
        (parallel.check_collectives,
         "--check-collectives compares ranks on the host before each collective", leave_out),
        (config.logging.enable_fault_injection,
         "--enable-fault-injection acts at places of the host's code", leave_out),
    )
    return [Obstacle(reason, way_out) for stands, reason, way_out in table if stands]
