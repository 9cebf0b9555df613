"""Meaning of each key of DeepSpeed's JSON here.

There are four cases. *Claimed*: it has the meaning of one of our flags. *Ignored*: it tunes DeepSpeed's own machinery
and cannot change results; all such keys are listed in one line. *Refused*: it would change the result, or asks for
unsupported offloading. *Unknown*: listed in the same line, but an error if it looks like a misspelt key. ``"auto"`` and
``null`` count as not given, whatever the key.

For a missing key our default applies. Only inside an ``optimizer`` block, and an enabled ``fp16`` block, missing keys
have DeepSpeed's defaults. An ``optimizer`` block beside ``--lr`` is not read: Megatron-DeepSpeed hands its own optimizer,
made from the flags, to ``deepspeed.initialize``, which then leaves the block alone. The file is parsed with limits on
size, depth and number of values. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.curriculum import read_curriculum
from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.config.flags.config_file import MAX_FILE_BYTES
from megatron_sp.config.flags.deepspeed_config import Claim, DeepSpeedConfig
from megatron_sp.config.schema import GROUPS
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.files import read_text
from megatron_sp.utils.strict_json import parse_object

_MAX_VALUES = 10_000
_FP16_ON = ("precision.fp16", True)
_STAGE_3 = ("parallel.zero_stage", 3)


def read_deepspeed_config(path: str, rate: str | None = None) -> DeepSpeedConfig:
    """Read and interpret a file.

    Args:
        path: the file.
        rate: where the learning rate is given outside of it, for the message that the ``optimizer`` block is not read.
    Raises:
        ConfigError: it cannot be read, is not a JSON object, has a duplicate name, or exceeds the limits.
    """
    text = read_text(path, f"--deepspeed_config {path}", MAX_FILE_BYTES, "a file of flags")
    try:
        data = parse_object(text.encode(), f"--deepspeed_config {path}", _MAX_VALUES)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    reader = _Reader(os.path.basename(path))
    if rate and isinstance(data.get("optimizer"), dict):
        block = data.pop("optimizer")
        reader.found.overruled.append(
            f"{reader.where('optimizer', block)} (the optimizer is that of {rate} and the flags beside it, as in Megatron-DeepSpeed,"
            " where DeepSpeed never reads this block)"
        )
    reader.block(data, "", _TOP)
    return reader.found


def _short(value: Any) -> str:
    """Format a JSON value on one line of at most 60 characters."""
    text = "".join(c if c.isprintable() else "?" for c in json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:57] + "..."


def _is_off(value: Any) -> bool:
    """Return whether the value of an unsupported key disables its feature."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    return value in (None, False, 0, "auto", "none")


Handler = Callable[["_Reader", str, Any], None]


@dataclass(frozen=True)
class _Keys:
    """Keys of a block.

    Attributes:
        handlers: keys with a meaning, and their handlers.
        ignored: keys without a meaning.
        refused: unsupported keys -> what to use instead.
    """

    handlers: Mapping[str, Handler]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


class _Reader:
    """Reader that walks through a file and collects its contents."""

    def __init__(self, name: str) -> None:
        self.found = DeepSpeedConfig(name)

    def block(self, data: dict[str, Any], path: str, keys: _Keys) -> None:
        """Process all keys of an object."""
        for key, value in data.items():
            place = f"{path}.{key}" if path else key
            if key in keys.handlers:
                if value is not None and value != "auto":
                    keys.handlers[key](self, place, value)
            elif key in keys.refused:
                if _is_off(value):
                    self.found.ignored.append(place)
                else:
                    self.refuse(place, value, keys.refused[key])
            elif key in keys.ignored:
                self.found.ignored.append(place)
            else:
                self._unknown(key, place, keys)

    def _unknown(self, key: str, place: str, keys: _Keys) -> None:
        known = [*keys.handlers, *keys.refused, *keys.ignored]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            self.problem(f"{_printable(place)} is unknown: did you mean {near[0]}?")
        else:
            self.found.unknown.append(_printable(place))

    def problem(self, text: str) -> None:
        self.found.problems.append(f"{self.found.name}: {text}")

    def refuse(self, place: str, value: Any, instead: str) -> None:
        self.problem(f"{place} ({_short(value)}) is not supported: {instead}")

    def where(self, place: str, value: Any, means: str = "") -> str:
        return f"{self.found.name}: {place} ({_short(value)}{f', which is {means}' if means else ''})"

    def object(self, place: str, value: Any) -> dict[str, Any]:
        """Return ``value`` if it is an object; else record a problem and return an empty one."""
        if isinstance(value, dict):
            return value
        self.problem(f"{place}: expected an object {{...}}, got {_short(value)}")
        return {}

    def flag(self, place: str, value: Any) -> bool | None:
        """Return ``value`` if it is a boolean; else None, recording a problem unless it is null or "auto"."""
        if isinstance(value, bool) or value is None or value == "auto":
            return value if isinstance(value, bool) else None
        self.problem(f'{place}: expected true, false or "auto", got {_short(value)}')
        return None

    def claim(
        self, target: str, place: str, value: Any, *, needs: tuple[str, Any] | None = None, means: str = "", shown: Any = None
    ) -> None:
        """Record ``value`` for our field ``target``, or a problem if its type or range is wrong."""
        group, _, name = target.partition(".")
        if isinstance(value, float) and value.is_integer() and field_kinds(GROUPS[group])[name].base == "int":
            value = int(value)  # 1e3 is how JSON writes many integers
        shown = value if shown is None else shown
        try:
            ours = None if value is None else field_kinds(GROUPS[group])[name].coerce(value)
        except (ValueError, OverflowError) as error:
            self.problem(f"{place}: {error}")
            return
        low = GROUPS[group].__dataclass_fields__[name].metadata["low"]  # type: ignore[attr-defined]
        if low is not None and ours is not None and ours < low:
            self.problem(f"{place} ({_short(shown)}) must be at least {low:g}")
            return
        self.found.claims.append(Claim(target, ours, self.where(place, shown, means), needs=needs))

    def default(self, target: str, value: Any, *, needs: tuple[str, Any] | None = None) -> None:
        """Record DeepSpeed's default for our field ``target``."""
        self.found.claims.append(Claim(target, value, self.found.name, weak=True, needs=needs))


def _printable(text: str) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= 80 else line[:77] + "..."


def _as(target: str, *, needs: tuple[str, Any] | None = None) -> Handler:
    """Return a handler for a key that corresponds to one of our fields."""
    return lambda reader, place, value: reader.claim(target, place, value, needs=needs)


def _block_of(keys: _Keys) -> Handler:
    return lambda reader, place, value: reader.block(reader.object(place, value), place, keys)


# ------------------------------------------------------------------------------------------------------------------- batch sizes


def _accumulation(reader: _Reader, place: str, value: Any) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        reader.problem(f"{place}: expected an integer of at least 1, got {_short(value)}")
    else:
        reader.found.accumulation = value


# -------------------------------------------------------------------------------------------------------------------------- ZeRO


def _stage(reader: _Reader, place: str, value: Any) -> None:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        reader.problem(f"{place}: expected 0, 1, 2 or 3, got {_short(value)}")
    else:
        reader.claim("parallel.zero_stage", place, value)


def _overlap(reader: _Reader, place: str, value: Any) -> None:
    if reader.flag(place, value) is not None:
        reader.claim("parallel.overlap_grad_reduce", place, value)
        # in DeepSpeed it concerns the gathers of stage 3 only: a default, so that it never contradicts a flag about
        # them
        reader.default("parallel.overlap_param_gather", value)


def _fetch(reader: _Reader, place: str, value: Any) -> None:
    if reader.flag(place, value) is None:
        return
    fetch = "all_reduce" if value else "all_gather"
    reader.found.claims.append(Claim("parallel.zero3_fetch", fetch, reader.where(place, value), needs=_STAGE_3))


def _offload(reader: _Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    device = block.get("device", "none")
    if device in ("cpu", "none"):
        reader.claim("parallel.offload_optimizer", f"{place}.device", device == "cpu", shown=device)
    elif device == "nvme":
        reader.refuse(f"{place}.device", device, 'the optimizer\'s state lives on the device or in host memory: use "cpu", or leave it out')
    elif device not in (None, "auto"):
        reader.problem(f'{place}.device: expected "cpu" or "none", got {_short(device)}')
    reader.block({k: v for k, v in block.items() if k != "device"}, place, _OFFLOAD)


def _offload_param(reader: _Reader, place: str, value: Any) -> None:
    device = reader.object(place, value).get("device", "none")
    if device in (None, "none", "auto"):
        reader.found.ignored.append(place)
        return
    reader.refuse(
        f"{place}.device", device,
        "parameters stay on their device; to save memory there use stage 3, offload_optimizer (--offload-optimizer), more ranks, or"
        " --recompute-granularity full; then remove the block",
    )  # fmt: skip


_OFFLOAD = _Keys(
    {}, ignored=(
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "nvme_path", "super_offload", "cpuadam_cores_perc",
    ),
)  # fmt: skip

_QUANTIZED = "parameters and gradients travel in their own format; remove it (gradients can travel in bf16: --grad-reduce-in-bf16)"
_NO_OFFLOAD_PARAM = "parameters stay on their device; remove it (the optimizer's state can go to the host: --offload-optimizer)"

_ZERO = _Keys(
    {
        "stage": _stage, "overlap_comm": _overlap,
        "stage3_use_all_reduce_for_fetch_params": _fetch, "use_all_reduce_for_fetch_params": _fetch,
        "offload_optimizer": _offload, "offload_param": _offload_param, "cpu_offload": _as("parallel.offload_optimizer"),
    },
    ignored=(
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions",
        "allgather_bucket_size", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint", "sub_group_size",
        "cpu_offload_use_pin_memory", "stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_param_persistence_threshold",
        "param_persistence_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold", "stage3_max_live_parameters",
        "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold",
        "module_granularity_threshold", "stage3_allgather_sequential", "allgather_sequential", "ignore_unused_parameters", "legacy_stage1",
        "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather",
        "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
        "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    ),
    refused={
        "cpu_offload_param": _NO_OFFLOAD_PARAM, "cpu_offload_params": _NO_OFFLOAD_PARAM,
        "zero_quantized_weights": _QUANTIZED, "zero_quantized_nontrainable_weights": _QUANTIZED, "zero_quantized_gradients": _QUANTIZED,
        "zeropp_loco_param": _QUANTIZED, "zenflow": "every gradient takes part in every update; remove it",
    },
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- number formats


def _bf16(reader: _Reader, place: str, value: Any) -> None:
    reader.block(reader.object(place, value), place, _BF16)


def _fp16(reader: _Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    reader.block(block, place, _FP16)
    if block.get("enabled") is True and "initial_scale_power" not in block:
        reader.default("precision.initial_loss_scale", 2.0**16, needs=_FP16_ON)


def _loss_scale(reader: _Reader, place: str, value: Any) -> None:
    if isinstance(value, (int, float)) and value < 0:
        reader.problem(f"{place} ({_short(value)}) must be at least 0 (0: dynamic)")
        return
    dynamic = not isinstance(value, bool) and value == 0
    means = "dynamic" if dynamic else ""
    reader.claim("precision.loss_scale", place, None if dynamic else value, needs=_FP16_ON, means=means, shown=value)


def _scale_power(reader: _Reader, place: str, value: Any) -> None:
    is_whole = (isinstance(value, float) and value.is_integer()) or type(value) is int
    if not is_whole or not 0 <= value <= 127:
        reader.problem(f"{place}: expected an integer from 0 to 127, got {_short(value)}")
        return
    scale = 2.0 ** int(value)
    reader.claim("precision.initial_loss_scale", place, scale, needs=_FP16_ON, means=f"{scale:g}", shown=value)


def _communication(reader: _Reader, place: str, value: Any) -> None:
    word = value.lower() if isinstance(value, str) else value
    if word in ("bf16", "bfloat16", "fp32"):
        reader.claim("parallel.grad_reduce_in_bf16", place, word != "fp32", shown=value)
    elif word == "fp16":
        reader.refuse(place, value, 'gradients travel in fp32 or bf16, for fp16 overflows in their sum: use "bf16" or "fp32"')
    else:
        reader.problem(f'{place}: expected "fp32" or "bf16", got {_short(value)}')


def _accumulate_in(reader: _Reader, place: str, value: Any) -> None:
    if value == "fp32":
        reader.found.ignored.append(place)  # it asks for what happens anyway
    elif value in ("bf16", "fp16"):
        reader.refuse(
            place, value, 'gradients are accumulated in fp32: use "fp32", or remove it (they can travel in bf16: "communication_data_type")'
        )
    else:
        reader.problem(f'{place}: expected "fp32", got {_short(value)}')


_FIXED = "master weights, accumulated gradients and the optimizer's state are kept in fp32; remove it"
_BF16 = _Keys(
    {"enabled": _as("precision.bf16")}, ignored=("immediate_grad_update", "check_grad_overflow", "check_overflow"),
    refused={"bf16_master_weights_and_grads": _FIXED, "bf16_optimizer_states": _FIXED},
)  # fmt: skip
_FP16 = _Keys(
    {
        "enabled": _as("precision.fp16"), "loss_scale": _loss_scale, "initial_scale_power": _scale_power,
        "loss_scale_window": _as("precision.loss_scale_window", needs=_FP16_ON), "hysteresis": _as("precision.hysteresis", needs=_FP16_ON),
        "min_loss_scale": _as("precision.min_loss_scale", needs=_FP16_ON),
    },
    ignored=("auto_cast",),
    refused={
        "consecutive_hysteresis": "--hysteresis counts overflows since the scale last grew; remove it",
        "fp16_master_weights_and_grads": _FIXED, "fp16_optimizer_states": _FIXED,
    },
)  # fmt: skip
_DATA_TYPES = _Keys(
    {"grad_accum_dtype": _accumulate_in},
    refused=dict.fromkeys(
        ("param_dtype", "buffer_dtype", "keep_in_fp32_modules"), "--bf16, --fp16 or neither is for the whole model; remove it"
    ),
)


# ------------------------------------------------------------------------------------------------------- optimizer and scheduler

_ADAM_DEFAULTS = {
    "lr": ("optimizer.lr", 1e-3), "eps": ("optimizer.adam_eps", 1e-8), "weight_decay": ("optimizer.weight_decay", 0.0),
}  # fmt: skip
_SGD_DEFAULTS = {
    "lr": ("optimizer.lr", 1e-3), "momentum": ("optimizer.sgd_momentum", 0.0), "weight_decay": ("optimizer.weight_decay", 0.0),
}  # fmt: skip
_KERNELS = ("torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none", "fp32_optimizer_states")


def _optimizer(reader: _Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    kind, params = block.get("type"), block.get("params", {})
    reader.block({k: v for k, v in block.items() if k not in ("type", "params")}, place, _Keys({}, ignored=("legacy_fusion",)))
    if kind is None and params not in (None, "auto", {}):
        given = f"{place}.params ({_short(params)})"
        reader.problem(f'{given} has no optimizer.type: add "type": "AdamW", "Adam" or "SGD", or remove the block')
    if kind in (None, "auto"):
        return
    word = kind.lower() if isinstance(kind, str) else ""
    if word not in ("adam", "adamw", "sgd"):
        reader.refuse(
            f"{place}.type", kind, "the optimizers today are AdamW and SGD; use one of them, or remove the block and give --optimizer"
        )
        return
    params = {} if params in (None, "auto") else reader.object(f"{place}.params", params)
    reader.claim("optimizer.optimizer", f"{place}.type", "sgd" if word == "sgd" else "adam", shown=kind)
    if word == "adam" and params.get("adam_w_mode") is False:
        reader.refuse(
            f"{place}.params.adam_w_mode",
            False,
            'weight decay is decoupled (AdamW): remove it, or use "type": "AdamW" and give weight_decay',
        )
    reader.block(params, f"{place}.params", _SGD if word == "sgd" else _ADAM)
    for key, (target, default) in (_SGD_DEFAULTS if word == "sgd" else _ADAM_DEFAULTS).items():
        if key not in params:
            reader.default(target, default)
    if word != "sgd" and "betas" not in params:
        reader.default("optimizer.adam_beta1", 0.9)
        reader.default("optimizer.adam_beta2", 0.999)


def _betas(reader: _Reader, place: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        reader.problem(f"{place}: expected two numbers [beta1, beta2], got {_short(value)}")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True):
        if beta not in (None, "auto"):
            reader.claim(f"optimizer.{name}", place, beta, shown=value)


def _must_be(wanted: Any, instead: str) -> Handler:
    """Return a handler for a key of which only one value is supported."""

    def judge(reader: _Reader, place: str, value: Any) -> None:
        if value == wanted:
            reader.found.ignored.append(place)
        else:
            reader.refuse(place, value, instead)

    return judge


_ADAM = _Keys(
    {
        "lr": _as("optimizer.lr"), "betas": _betas, "eps": _as("optimizer.adam_eps"), "weight_decay": _as("optimizer.weight_decay"),
        "bias_correction": _must_be(True, "the moments are always corrected for their start; remove it"),
    },
    ignored=(*_KERNELS, "adam_w_mode"),
    refused={
        "amsgrad": "AdamW is plain; remove it", "maximize": "the loss is made small; remove it",
        "max_grad_norm": 'use the key "gradient_clipping", or --clip-grad',
    },
)  # fmt: skip
_SGD = _Keys(
    {"lr": _as("optimizer.lr"), "momentum": _as("optimizer.sgd_momentum"), "weight_decay": _as("optimizer.weight_decay")},
    ignored=_KERNELS,
    refused={
        "nesterov": "SGD has plain momentum; remove it", "dampening": "SGD has plain momentum; remove it",
        "maximize": "the loss is made small; remove it", "max_grad_norm": 'use the key "gradient_clipping", or --clip-grad',
    },
)  # fmt: skip


def _scheduler(reader: _Reader, place: str, value: Any) -> None:
    """Handle a scheduler: only a constant rate is supported, as DeepSpeed's warm-ups begin at the third step and ours at the first."""
    block = reader.object(place, value)
    kind, params = block.get("type"), block.get("params")
    if kind in (None, "auto") or not block:
        return
    params = params if isinstance(params, dict) else {}
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None)
    is_rate = isinstance(low, (int, float)) and not isinstance(low, bool)
    if kind in ("WarmupLR", "WarmupDecayLR") and is_rate and low == high:
        reader.claim("optimizer.lr", f"{place}.params.warmup_max_lr", high)
        for name, constant in (
            ("lr_decay_style", "constant"), ("lr_warmup_fraction", None), ("lr_warmup_iters", 0), ("lr_warmup_samples", 0),
        ):  # fmt: skip
            where = reader.where(f"{place}.type", kind, f"constant at {high}")
            reader.found.claims.append(Claim(f"optimizer.{name}", constant, where))
        return
    reader.refuse(
        f"{place}.type", kind,
        f"learning-rate schedules are Megatron's, and rise from the first step where DeepSpeed's wait for the third; give"
        f" {_ways(kind, params)} and remove the block",
    )  # fmt: skip


def _ways(kind: Any, params: dict[str, Any]) -> str:
    """Return the flags of the most similar schedule."""

    def word(key: str, default: str) -> str:
        value = params.get(key)
        return f"{value:g}" if isinstance(value, float) else str(value) if type(value) is int else default

    style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(kind if isinstance(kind, str) else "", "")
    if not style:
        return "--lr, --lr-decay-style and --lr-warmup-iters"
    ends = "" if style == "constant" else f" --lr-decay-iters {word('total_num_steps', 'N')}"
    peak = "" if style == "cosine" else f"--lr {word('warmup_max_lr', 'LR')} "
    start = word("warmup_min_lr", "0") if style != "cosine" else "0"
    first = "" if start == "0" else f" --lr-warmup-init {start}"
    return f"{peak}--lr-decay-style {style} --lr-warmup-iters {word('warmup_num_steps', '1000')}{first}{ends}"


# --------------------------------------------------------------------------------------------------------------- data efficiency


def _if_on(handle: Handler) -> Handler:
    """Return a handler that calls ``handle`` for a block whose own "enabled" is true; missing, it is false, as in DeepSpeed."""

    def judge(reader: _Reader, place: str, value: Any) -> None:
        block = reader.object(place, value)
        if reader.flag(f"{place}.enabled", block.get("enabled")):
            handle(reader, place, block)
        else:
            reader.found.ignored.append(place)

    return judge


def _refuse(instead: str) -> Handler:
    return lambda reader, place, value: reader.refuse(place, value, instead)


def _inside(keys: _Keys) -> Handler:
    """Return a handler for a block that is on, which reads what is in it beside that."""
    return lambda reader, place, value: reader.block({k: v for k, v in value.items() if k != "enabled"}, place, keys)


def _legacy_curriculum(reader: _Reader, place: str, value: Any) -> None:
    kind = value.get("curriculum_type", "seqlen")
    if kind == "seqlen":
        _lengths(reader, place, value)
    else:
        reader.refuse(f"{place}.curriculum_type", kind, 'a curriculum is of the sequences\' length here: use "seqlen", or remove the block')


def _curriculum_of_metrics(reader: _Reader, place: str, value: Any) -> None:
    metrics = reader.object(f"{place}.curriculum_metrics", value.get("curriculum_metrics", {}))
    if not metrics:
        reader.problem(f"{place}: is enabled and has no curriculum_metrics: add one, or disable it")
    for name, metric in metrics.items():
        there = f"{place}.curriculum_metrics.{_printable(name)}"
        block = reader.object(there, metric)
        if name != "seqlen_truncate":
            reader.refuse(there, metric, "a curriculum cuts samples off and does not choose them: use seqlen_truncate, or remove it")
        elif (cluster := block.get("clustering_type", "single_cluster")) != "single_cluster":
            reader.refuse(f"{there}.clustering_type", cluster, 'samples are not chosen by their difficulty: use "single_cluster"')
        else:
            _lengths(reader, there, block)


_PARTS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"), "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}  # fmt: skip


def _lengths(reader: _Reader, place: str, block: dict[str, Any]) -> None:
    """Claim a curriculum of the sequences' length."""
    kind, config = block.get("schedule_type"), reader.object(f"{place}.schedule_config", block.get("schedule_config", {}))
    if not isinstance(kind, str) or kind not in _PARTS:
        reader.refuse(f"{place}.schedule_type", kind, f"the schedules are {', '.join(_PARTS)}; use one of them, or remove the block")
        return
    missing = [key for key in ("min_difficulty", "max_difficulty") if key not in block] + [key for key in _PARTS[kind] if key not in config]
    if missing:
        reader.problem(f"{place}: {kind} needs {', '.join(missing)}")
        return
    if kind == "fixed_discrete":
        lengths, lasts = config["difficulty"], config["max_step"]
        if not isinstance(lengths, list) or not isinstance(lasts, list) or len(lengths) != len(lasts) + 1:
            reader.problem(
                f"{place}.schedule_config: difficulty must be a list with one number more than max_step: the last length has no end"
            )
            return
        numbers = [f"{_word(length)}:{_word(last)}" for length, last in zip(lengths, lasts, strict=False)] + [_word(lengths[-1])]
    else:
        numbers = [_word(block["min_difficulty"]), _word(block["max_difficulty"]), *(_word(config[key]) for key in _PARTS[kind])]
    try:
        read_curriculum((kind, *numbers))
    except ValueError as error:
        reader.problem(f"{place}: {error}")
        return
    reader.claim("batch.seq_length_curriculum", place, (kind, *numbers))


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else _short(value)


_NO_COMPRESSION = "compression and layer dropping are not there; remove it"
_ALL_TOKENS = (
    "random layer token dropping (random-LTD) leaves tokens out of the middle layers, and here every layer computes all; remove it"
)

_CURRICULUM = _Keys({"curriculum_learning": _if_on(_curriculum_of_metrics)}, ignored=("num_epochs", "num_workers", "pin_memory"))
_ROUTING = _Keys({"random_ltd": _if_on(_refuse(_ALL_TOKENS))})
_DATA_EFFICIENCY = _Keys({"data_sampling": _if_on(_inside(_CURRICULUM)), "data_routing": _if_on(_inside(_ROUTING))}, ignored=("seed",))


# --------------------------------------------------------------------------------------------------------------------- all of it

ADAPTED = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "global batch = micro-batch * accumulation * data-parallel ranks; what is missing of the three follows",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "zero_optimization.overlap_comm": "--overlap-grad-reduce and, unless that is given, --overlap-param-gather",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "--zero3-fetch, at stage 3",
    "zero_optimization.offload_optimizer.device": '"cpu": --offload-optimizer; "nvme" is refused',
    "zero_optimization.offload_param.device": '"none"; everything else is refused',
    "bf16.enabled, fp16.enabled": "--bf16, --fp16",
    "fp16.loss_scale": "--loss-scale; 0: dynamic",
    "fp16.initial_scale_power": "--initial-loss-scale, as a power of 2; 16 where an fp16 block that is on leaves it out",
    "fp16.loss_scale_window, .hysteresis, .min_loss_scale": "--loss-scale-window, --hysteresis, --min-loss-scale",
    "data_types.grad_accum_dtype": '"fp32", as always here; everything else is refused',
    "communication_data_type": '"bf16": --grad-reduce-in-bf16; "fp32": not',
    "optimizer": "not read beside --lr; else Adam, AdamW or SGD: lr, betas, eps, weight_decay, momentum, with DeepSpeed's defaults",
    "scheduler": "WarmupLR and WarmupDecayLR where they are constant; else refused, with the flags that come nearest",
    "sequence_parallel_size": "--sequence-parallel-size",
    "curriculum_learning": "--seq-length-curriculum, if it is enabled, by fixed_linear, fixed_root or fixed_discrete",
    "data_efficiency.data_sampling.curriculum_learning": "the same, of the metric seqlen_truncate; other metrics are refused",
    "data_efficiency": "what is in it counts only where it and everything around it say `enabled: true`; random_ltd is refused then",
}
"""Keys with a meaning and what it is, for docs/reference/flags.md."""

_NO_AUTOCAST = "mixed precision is --bf16 or --fp16; use those blocks"

_TOP = _Keys(
    {
        "train_batch_size": _as("batch.global_batch_size"), "train_micro_batch_size_per_gpu": _as("batch.micro_batch_size"),
        "gradient_accumulation_steps": _accumulation, "gradient_clipping": _as("optimizer.clip_grad"),
        "zero_optimization": _block_of(_ZERO), "bf16": _bf16, "bfloat16": _bf16, "fp16": _fp16, "data_types": _block_of(_DATA_TYPES),
        "communication_data_type": _communication,
        "sequence_parallel_size": _as("parallel.sequence_parallel_size"), "optimizer": _optimizer, "scheduler": _scheduler,
        "gradient_allreduce_op": _must_be("mean", "the loss is divided by the step's number of tokens, gradients are summed; remove it"),
        "data_efficiency": _if_on(_inside(_DATA_EFFICIENCY)), "curriculum_learning": _if_on(_legacy_curriculum),
    },
    ignored=(
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor",
        "sparse_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "activation_checkpointing", "flops_profiler",
        "comms_logger", "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "checkpoint", "datastates_ckpt", "aio", "nebula",
        "autotuning", "pipeline", "disable_allgather", "fp32_allreduce", "seq_parallel_communication_data_type", "log_level",
        "disable_python_gc", "dataloader_drop_last", "use_data_before_expert_parallelism", "compile", "timers", "graph_harvesting",
        "managed_gradient_accumulation", "use_node_local_storage", "vocabulary_size",
    ),
    refused={
        "amp": _NO_AUTOCAST, "torch_autocast": _NO_AUTOCAST,
        "progressive_layer_drop": _NO_COMPRESSION,
        "eigenvalue": _NO_COMPRESSION, "quantize_training": _NO_COMPRESSION, "compression_training": _NO_COMPRESSION,
        "weight_quantization": _NO_COMPRESSION, "random_ltd": _ALL_TOKENS,
        "sparse_attention": "attention is causal over the whole sequence; remove it",
        "elasticity": "the batch size is --global-batch-size, whatever the number of ranks; remove it",
        "hybrid_engine": "it is for reinforcement learning; remove it",
        "expert_parallel": "all MLPs are dense today; remove it", "moe": "all MLPs are dense today; remove it",
        "tensor_parallel": "give --tensor-model-parallel-size, and remove it",
    },
)  # fmt: skip

BLOCKS: dict[str, _Keys] = {
    "": _TOP, "zero_optimization.": _ZERO, "zero_optimization.offload_optimizer.": _OFFLOAD, "bf16.": _BF16, "fp16.": _FP16,
    "data_types.": _DATA_TYPES, "optimizer.params.": _ADAM,
}  # fmt: skip
"""All keys, by the beginning of their path, for docs/reference/flags.md."""
