"""Meaning of each key of DeepSpeed's JSON here.

There are four cases. *Claimed*: it has the meaning of one of our flags. *Ignored*: it tunes DeepSpeed's own machinery
and cannot change results; all such keys are listed in one line. *Refused*: it would change the result, or asks for
unsupported offloading. *Unknown*: listed in the same line, but an error if it looks like a misspelt key. ``"auto"`` and
``null`` count as not given, whatever the key.

For a missing key our default applies. Only inside an ``optimizer`` block, and an enabled ``fp16`` block, missing keys
have DeepSpeed's defaults. An ``optimizer`` block beside ``--lr`` is not read: Megatron-DeepSpeed hands its own
optimizer, made from the flags, to ``deepspeed.initialize``, which then leaves the block alone. The file is parsed with
limits on size, depth and number of values. Nothing here imports torch.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_sp.config.flags.config_file import MAX_FILE_BYTES
from megatron_sp.config.flags.deepspeed_config import Claim, DeepSpeedConfig
from megatron_sp.config.flags.deepspeed_reader import Keys, Reader, block_of, if_on, inside, must_be, sets, short, words
from megatron_sp.config.flags.deepspeed_training import (
    ADAM,
    ALL_TOKENS,
    DATA_EFFICIENCY,
    handle_curriculum,
    handle_optimizer,
    handle_scheduler,
)
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.files import read_text
from megatron_sp.utils.strict_json import parse_object

_MAX_VALUES = 10_000
_FP16_ON = ("precision.fp16", True)
_STAGE_3 = ("parallel.zero_stage", 3)


def read_deepspeed_config(path: str, rate: str | None = None) -> DeepSpeedConfig:
    """Read and interpret a file.

    Args:
        rate: where the learning rate is given outside of it, for the message that the ``optimizer`` block is not read.
    Raises:
        ConfigError: it cannot be read, is not a JSON object, has a duplicate name, or exceeds the limits.
    """
    text = read_text(path, f"--deepspeed_config {path}", MAX_FILE_BYTES, "a file of flags")
    try:
        data = parse_object(text.encode(), f"--deepspeed_config {path}", _MAX_VALUES)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    reader = Reader(os.path.basename(path))
    if rate and isinstance(data.get("optimizer"), dict):
        block = data.pop("optimizer")
        reader.found.overruled.append(
            f"{reader.where('optimizer', block)} (the optimizer is that of {rate} and the flags beside it, as in"
            " Megatron-DeepSpeed, where DeepSpeed never reads this block)"
        )
    reader.block(data, "", _TOP)
    return reader.found


# ---------------------------------------------------------------------------------------------------------- batch sizes


def _accumulation(reader: Reader, place: str, value: Any) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        reader.problem(f"{place}: expected an integer of at least 1, got {short(value)}")
    else:
        reader.found.accumulation = value


# ----------------------------------------------------------------------------------------------------------------- ZeRO


def _stage(reader: Reader, place: str, value: Any) -> None:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        reader.problem(f"{place}: expected 0, 1, 2 or 3, got {short(value)}")
    else:
        reader.claim("parallel.zero_stage", place, value)


def _overlap(reader: Reader, place: str, value: Any) -> None:
    if reader.flag(place, value) is not None:
        reader.claim("parallel.overlap_grad_reduce", place, value)
        # in DeepSpeed it concerns the gathers of stage 3 only: a default, so that it never contradicts a flag about
        # them
        reader.default("parallel.overlap_param_gather", value)


def _fetch(reader: Reader, place: str, value: Any) -> None:
    if reader.flag(place, value) is None:
        return
    fetch = "all_reduce" if value else "all_gather"
    reader.found.claims.append(Claim("parallel.zero3_fetch", fetch, reader.where(place, value), needs=_STAGE_3))


def _offload(reader: Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    device = block.get("device", "none")
    if device in ("cpu", "none"):
        reader.claim("parallel.offload_optimizer", f"{place}.device", device == "cpu", shown=device)
    elif device == "nvme":
        reader.refuse(
            f"{place}.device",
            device,
            'the optimizer\'s state lives on the device or in host memory: use "cpu", or leave it out',
        )
    elif device not in (None, "auto"):
        reader.problem(f'{place}.device: expected "cpu" or "none", got {short(device)}')
    reader.block({k: v for k, v in block.items() if k != "device"}, place, _OFFLOAD)


def _offload_param(reader: Reader, place: str, value: Any) -> None:
    device = reader.object(place, value).get("device", "none")
    if device in (None, "none", "auto"):
        reader.found.ignored.append(place)
        return
    reader.refuse(
        f"{place}.device", device,
        "parameters stay on their device; to save memory there use stage 3, offload_optimizer (--offload-optimizer), more ranks, or"
        " --recompute-granularity full; then remove the block",
    )  # fmt: skip


_OFFLOAD = Keys(
    {}, ignored=words("""
        pin_memory buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write fast_init ratio nvme_path
        super_offload cpuadam_cores_perc
    """),
)  # fmt: skip

_QUANTIZED = "parameters and gradients travel in their own format; remove it (gradients can travel in bf16: --grad-reduce-in-bf16)"
_NO_OFFLOAD_PARAM = (
    "parameters stay on their device; remove it (the optimizer's state can go to the host: --offload-optimizer)"
)

_ZERO = Keys(
    {
        "stage": _stage, "overlap_comm": _overlap,
        "stage3_use_all_reduce_for_fetch_params": _fetch, "use_all_reduce_for_fetch_params": _fetch,
        "offload_optimizer": _offload, "offload_param": _offload_param,
        "cpu_offload": sets("parallel.offload_optimizer"),
    },
    ignored=words("""
        contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
        allgather_bucket_size compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size
        cpu_offload_use_pin_memory stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold
        param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold
        stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance
        stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold
        stage3_allgather_sequential allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
        parameter_alignment zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    """),
    refused={
        "cpu_offload_param": _NO_OFFLOAD_PARAM, "cpu_offload_params": _NO_OFFLOAD_PARAM,
        "zero_quantized_weights": _QUANTIZED, "zero_quantized_nontrainable_weights": _QUANTIZED,
        "zero_quantized_gradients": _QUANTIZED,
        "zeropp_loco_param": _QUANTIZED, "zenflow": "every gradient takes part in every update; remove it",
    },
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- number formats


def _fp16(reader: Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    reader.block(block, place, _FP16)
    if block.get("enabled") is True and "initial_scale_power" not in block:
        reader.default("precision.initial_loss_scale", 2.0**16, needs=_FP16_ON)


def _loss_scale(reader: Reader, place: str, value: Any) -> None:
    if isinstance(value, (int, float)) and value < 0:
        reader.problem(f"{place} ({short(value)}) must be at least 0 (0: dynamic)")
        return
    dynamic = not isinstance(value, bool) and value == 0
    means = "dynamic" if dynamic else ""
    reader.claim("precision.loss_scale", place, None if dynamic else value, needs=_FP16_ON, means=means, shown=value)


def _scale_power(reader: Reader, place: str, value: Any) -> None:
    is_whole = (isinstance(value, float) and value.is_integer()) or type(value) is int
    if not is_whole or not 0 <= value <= 127:
        reader.problem(f"{place}: expected an integer from 0 to 127, got {short(value)}")
        return
    scale = 2.0 ** int(value)
    reader.claim("precision.initial_loss_scale", place, scale, needs=_FP16_ON, means=f"{scale:g}", shown=value)


def _communication(reader: Reader, place: str, value: Any) -> None:
    word = value.lower() if isinstance(value, str) else value
    if word in ("bf16", "bfloat16", "fp32"):
        reader.claim("parallel.grad_reduce_in_bf16", place, word != "fp32", shown=value)
    elif word == "fp16":
        reader.refuse(
            place, value, 'gradients travel in fp32 or bf16, for fp16 overflows in their sum: use "bf16" or "fp32"'
        )
    else:
        reader.problem(f'{place}: expected "fp32" or "bf16", got {short(value)}')


def _accumulate_in(reader: Reader, place: str, value: Any) -> None:
    if value == "fp32":
        reader.found.ignored.append(place)  # it asks for what happens anyway
    elif value in ("bf16", "fp16"):
        reader.refuse(
            place,
            value,
            'gradients are accumulated in fp32: use "fp32", or remove it (they can travel in bf16: "communication_data_type")',
        )
    else:
        reader.problem(f'{place}: expected "fp32", got {short(value)}')


_FIXED = "master weights, accumulated gradients and the optimizer's state are kept in fp32; remove it"
_BF16 = Keys(
    {"enabled": sets("precision.bf16")}, ignored=("immediate_grad_update", "check_grad_overflow", "check_overflow"),
    refused={"bf16_master_weights_and_grads": _FIXED, "bf16_optimizer_states": _FIXED},
)  # fmt: skip
_FP16 = Keys(
    {
        "enabled": sets("precision.fp16"), "loss_scale": _loss_scale, "initial_scale_power": _scale_power,
        "loss_scale_window": sets("precision.loss_scale_window", needs=_FP16_ON),
        "hysteresis": sets("precision.hysteresis", needs=_FP16_ON),
        "min_loss_scale": sets("precision.min_loss_scale", needs=_FP16_ON),
    },
    ignored=("auto_cast",),
    refused={
        "consecutive_hysteresis": "--hysteresis counts overflows since the scale last grew; remove it",
        "fp16_master_weights_and_grads": _FIXED, "fp16_optimizer_states": _FIXED,
    },
)  # fmt: skip
_DATA_TYPES = Keys(
    {"grad_accum_dtype": _accumulate_in},
    refused=dict.fromkeys(
        ("param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
        "--bf16, --fp16 or neither is for the whole model; remove it",
    ),
)


# ------------------------------------------------------------------------------------------------------------ all of it

_NO_COMPRESSION = "compression and layer dropping are not there; remove it"
_NO_AUTOCAST = "mixed precision is --bf16 or --fp16; use those blocks"

_TOP = Keys(
    {
        "train_batch_size": sets("batch.global_batch_size"),
        "train_micro_batch_size_per_gpu": sets("batch.micro_batch_size"),
        "gradient_accumulation_steps": _accumulation, "gradient_clipping": sets("optimizer.clip_grad"),
        "zero_optimization": block_of(_ZERO), "bf16": block_of(_BF16), "bfloat16": block_of(_BF16), "fp16": _fp16,
        "data_types": block_of(_DATA_TYPES),
        "communication_data_type": _communication,
        "sequence_parallel_size": sets("parallel.sequence_parallel_size"), "optimizer": handle_optimizer,
        "scheduler": handle_scheduler,
        "gradient_allreduce_op": must_be("mean", "the loss is divided by the step's number of tokens, gradients are summed; remove it"),
        "data_efficiency": if_on(inside(DATA_EFFICIENCY)), "curriculum_learning": if_on(handle_curriculum),
    },
    ignored=words("""
        steps_per_print wall_clock_breakdown memory_breakdown dump_state prescale_gradients gradient_predivide_factor
        sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer activation_checkpointing
        flops_profiler comms_logger tensorboard wandb comet csv_monitor monitor_config checkpoint datastates_ckpt aio
        nebula autotuning pipeline disable_allgather fp32_allreduce seq_parallel_communication_data_type log_level
        disable_python_gc dataloader_drop_last use_data_before_expert_parallelism compile timers graph_harvesting
        managed_gradient_accumulation use_node_local_storage vocabulary_size
    """),
    refused={
        "amp": _NO_AUTOCAST, "torch_autocast": _NO_AUTOCAST,
        "progressive_layer_drop": _NO_COMPRESSION,
        "eigenvalue": _NO_COMPRESSION, "quantize_training": _NO_COMPRESSION, "compression_training": _NO_COMPRESSION,
        "weight_quantization": _NO_COMPRESSION, "random_ltd": ALL_TOKENS,
        "sparse_attention": "attention is causal over the whole sequence; remove it",
        "elasticity": "the batch size is --global-batch-size, whatever the number of ranks; remove it",
        "hybrid_engine": "it is for reinforcement learning; remove it",
        "expert_parallel": "all MLPs are dense today; remove it", "moe": "all MLPs are dense today; remove it",
        "tensor_parallel": "give --tensor-model-parallel-size, and remove it",
    },
)  # fmt: skip

BLOCKS: dict[str, Keys] = {
    "": _TOP, "zero_optimization.": _ZERO, "zero_optimization.offload_optimizer.": _OFFLOAD, "bf16.": _BF16,
    "fp16.": _FP16,
    "data_types.": _DATA_TYPES, "optimizer.params.": ADAM,
}  # fmt: skip
"""All keys, by the beginning of their path, for docs/reference/flags.md."""
