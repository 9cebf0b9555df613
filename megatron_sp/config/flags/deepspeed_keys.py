"""Meaning of each key of DeepSpeed's JSON here.

A key *claims* one of our flags, is *ignored* (it tunes DeepSpeed's own machinery), *refused* (it would change the
result), or *unknown*: listed with the ignored ones, but an error if it looks like a misspelt key. ``"auto"`` and
``null`` count as not given. For a missing key our default applies, but inside an ``optimizer`` block and an enabled
``fp16`` block DeepSpeed's.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_sp.config.curriculum import read_curriculum
from megatron_sp.config.fields import shorten
from megatron_sp.config.flags.deepspeed_config import Claim, DeepSpeedFile, Handler, Keys, Meaning, show
from megatron_sp.config.flags.settings import MAX_FILE_BYTES, foreign_tables
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.files import read_text
from megatron_sp.utils.strict_json import parse_object

_MAX_VALUES = 10_000
_FP16_ON = ("precision.fp16", True)
_STAGE_3 = ("parallel.zero_stage", 3)


def read_deepspeed_config(path: str, rate: str | None = None) -> DeepSpeedFile:
    """Read and interpret a file; where the learning rate is given outside of it, ``rate`` says where.

    Raises ConfigError: it cannot be read, is not a JSON object, has a name twice, or is too large or too deep.
    """
    text = read_text(path, f"--deepspeed_config {path}", MAX_FILE_BYTES, "a file of flags")
    try:
        data = parse_object(text.encode(), f"--deepspeed_config {path}", _MAX_VALUES)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    file = DeepSpeedFile(os.path.basename(path))
    if rate and isinstance(data.get("optimizer"), dict):
        # Megatron-DeepSpeed hands its own optimizer, made from the flags, to deepspeed.initialize
        block = data.pop("optimizer")
        file.overruled.append(
            f"{file.where('optimizer', block)} (the optimizer is that of {rate} and the flags beside"
            " it, as in Megatron-DeepSpeed, where DeepSpeed never reads this block)"
        )
    file.block(data, "", _TOP)
    return file


def _keys(block: str, meanings: dict[str, Meaning]) -> Keys:
    # a block's keys: ``foreign_flags.txt`` has those that mean nothing here, and those that are refused
    table = foreign_tables()[f"deepspeed: {block}"]
    refused = {key: why for key, why in table.items() if why != "ignored"}
    return Keys(meanings, tuple(key for key in table if key not in refused), refused)


def _must_be(wanted: Any, instead: str) -> Handler:
    # a handler for a key of which only one value is supported
    return lambda file, place, value: (
        file.ignored.append(place) if value == wanted else file.refuse(place, value, instead)
    )


def _if_on(meaning: str | Keys | Handler) -> Handler:
    # a handler for a block whose own "enabled" is true; missing, it is false, as in DeepSpeed. ``meaning``: keys inside
    # it, why it is refused, or a handler
    def judge(file: DeepSpeedFile, place: str, value: Any) -> None:
        block = file.object(place, value)
        if not file.switch(f"{place}.enabled", block.get("enabled")):
            file.ignored.append(place)
        elif isinstance(meaning, Keys):
            file.block({key: inner for key, inner in block.items() if key != "enabled"}, place, meaning)
        elif isinstance(meaning, str):
            file.refuse(place, block, meaning)
        else:
            meaning(file, place, block)

    return judge


# ------------------------------------------------------------------------------------------------- batch sizes and ZeRO


def _accumulation(file: DeepSpeedFile, place: str, value: Any) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        file.problem(f"{place}: expected an integer of at least 1, got {show(value)}")
    else:
        file.accumulation = value


def _stage(file: DeepSpeedFile, place: str, value: Any) -> None:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        file.problem(f"{place}: expected 0, 1, 2 or 3, got {show(value)}")
    else:
        file.claim("parallel.zero_stage", place, value)


def _overlap(file: DeepSpeedFile, place: str, value: Any) -> None:
    if file.switch(place, value) is not None:
        file.claim("parallel.overlap_grad_reduce", place, value)
        # in DeepSpeed it concerns the gathers of stage 3 only: a default, so that it never contradicts a flag about
        # them
        file.default("parallel.overlap_param_gather", value)


def _fetch(file: DeepSpeedFile, place: str, value: Any) -> None:
    if file.switch(place, value) is not None:
        fetch = "all_reduce" if value else "all_gather"
        file.claims.append(Claim("parallel.zero3_fetch", fetch, file.where(place, value), needs=_STAGE_3))


def _offload(file: DeepSpeedFile, place: str, value: Any) -> None:
    block = file.object(place, value)
    device, key = block.get("device", "none"), f"{place}.device"
    if device in ("cpu", "none"):
        file.claim("parallel.offload_optimizer", key, device == "cpu", shown=device)
    elif device == "nvme":
        where = "the optimizer's state lives on the device or in host memory"
        file.refuse(key, device, f'{where}: use "cpu", or leave it out')
    elif device not in (None, "auto"):
        file.problem(f'{key}: expected "cpu" or "none", got {show(device)}')
    file.block({k: v for k, v in block.items() if k != "device"}, place, _OFFLOAD)


def _offload_param(file: DeepSpeedFile, place: str, value: Any) -> None:
    device = file.object(place, value).get("device", "none")
    if device in (None, "none", "auto"):
        file.ignored.append(place)
        return
    instead = "use stage 3, offload_optimizer (--offload-optimizer), more ranks, or --recompute-granularity full"
    why = f"parameters stay on their device; to save memory there {instead}; then remove the block"
    file.refuse(f"{place}.device", device, why)


_OFFLOAD = _keys("zero_optimization.offload_optimizer", {})
_ZERO = _keys("zero_optimization", {
    "stage": _stage, "overlap_comm": _overlap,
    "stage3_use_all_reduce_for_fetch_params": _fetch, "use_all_reduce_for_fetch_params": _fetch,
    "offload_optimizer": _offload, "offload_param": _offload_param, "cpu_offload": "parallel.offload_optimizer",
})  # fmt: skip


# ------------------------------------------------------------------------------------------------------- number formats


def _fp16(file: DeepSpeedFile, place: str, value: Any) -> None:
    block = file.object(place, value)
    file.block(block, place, _FP16)
    if block.get("enabled") is True and "initial_scale_power" not in block:
        file.default("precision.initial_loss_scale", 2.0**16, needs=_FP16_ON)


def _loss_scale(file: DeepSpeedFile, place: str, value: Any) -> None:
    if isinstance(value, (int, float)) and value < 0:
        file.problem(f"{place} ({show(value)}) must be at least 0 (0: dynamic)")
        return
    scale, means = value, ""
    if not isinstance(value, bool) and value == 0:
        scale, means = None, "dynamic"
    file.claim("precision.loss_scale", place, scale, needs=_FP16_ON, means=means, shown=value)


def _scale_power(file: DeepSpeedFile, place: str, value: Any) -> None:
    is_whole = (isinstance(value, float) and value.is_integer()) or type(value) is int
    if not is_whole or not 0 <= value <= 127:
        file.problem(f"{place}: expected an integer from 0 to 127, got {show(value)}")
        return
    scale = 2.0 ** int(value)
    file.claim("precision.initial_loss_scale", place, scale, needs=_FP16_ON, means=f"{scale:g}", shown=value)


def _communication(file: DeepSpeedFile, place: str, value: Any) -> None:
    word = value.lower() if isinstance(value, str) else value
    if word in ("bf16", "bfloat16", "fp32"):
        file.claim("parallel.grad_reduce_in_bf16", place, word != "fp32", shown=value)
    elif word == "fp16":
        why = "gradients travel in fp32 or bf16, for fp16 overflows in their sum"
        file.refuse(place, value, f'{why}: use "bf16" or "fp32"')
    else:
        file.problem(f'{place}: expected "fp32" or "bf16", got {show(value)}')


def _accumulate_in(file: DeepSpeedFile, place: str, value: Any) -> None:
    if value == "fp32":
        file.ignored.append(place)  # it asks for what happens anyway
    elif value in ("bf16", "fp16"):
        travel = 'they can travel in bf16: "communication_data_type"'
        file.refuse(place, value, f'gradients are accumulated in fp32: use "fp32", or remove it ({travel})')
    else:
        file.problem(f'{place}: expected "fp32", got {show(value)}')


_BF16 = _keys("bf16", {"enabled": "precision.bf16"})
_FP16 = _keys("fp16", {
    "enabled": "precision.fp16", "loss_scale": _loss_scale, "initial_scale_power": _scale_power,
    "loss_scale_window": ("precision.loss_scale_window", _FP16_ON),
    "hysteresis": ("precision.hysteresis", _FP16_ON), "min_loss_scale": ("precision.min_loss_scale", _FP16_ON),
})  # fmt: skip
_DATA_TYPES = _keys("data_types", {"grad_accum_dtype": _accumulate_in})


# ------------------------------------------------------------------------------------ optimizer, scheduler, curriculum

_DEFAULTS = {  # DeepSpeed's, of a block that leaves them out
    "adam": {"lr": ("lr", 1e-3), "eps": ("adam_eps", 1e-8), "weight_decay": ("weight_decay", 0.0)},
    "sgd": {"lr": ("lr", 1e-3), "momentum": ("sgd_momentum", 0.0), "weight_decay": ("weight_decay", 0.0)},
}


def _optimizer(file: DeepSpeedFile, place: str, value: Any) -> None:
    block = file.object(place, value)
    kind, params = block.get("type"), block.get("params", {})
    rest = {key: inner for key, inner in block.items() if key not in ("type", "params")}
    file.block(rest, place, Keys({}, ignored=("legacy_fusion",)))
    if kind is None and params not in (None, "auto", {}):
        ways = 'add "type": "AdamW", "Adam" or "SGD", or remove the block'
        file.problem(f"{place}.params ({show(params)}) has no optimizer.type: {ways}")
    if kind in (None, "auto"):
        return
    word = kind.lower() if isinstance(kind, str) else ""
    if word not in ("adam", "adamw", "sgd"):
        instead = "use one of them, or remove the block and give --optimizer"
        file.refuse(f"{place}.type", kind, f"the optimizers today are AdamW and SGD; {instead}")
        return
    ours = "sgd" if word == "sgd" else "adam"
    params = {} if params in (None, "auto") else file.object(f"{place}.params", params)
    file.claim("optimizer.optimizer", f"{place}.type", ours, shown=kind)
    if word == "adam" and params.get("adam_w_mode") is False:
        instead = 'remove it, or use "type": "AdamW" and give weight_decay'
        file.refuse(f"{place}.params.adam_w_mode", False, f"weight decay is decoupled (AdamW): {instead}")
    file.block(params, f"{place}.params", _SGD if ours == "sgd" else _ADAM)
    for key, (target, default) in _DEFAULTS[ours].items():
        if key not in params:
            file.default(f"optimizer.{target}", default)
    if ours == "adam" and "betas" not in params:
        file.default("optimizer.adam_beta1", 0.9)
        file.default("optimizer.adam_beta2", 0.999)


def _betas(file: DeepSpeedFile, place: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        file.problem(f"{place}: expected two numbers [beta1, beta2], got {show(value)}")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True):
        if beta not in (None, "auto"):
            file.claim(f"optimizer.{name}", place, beta, shown=value)


_ADAM = _keys("optimizer.params of Adam", {
    "lr": "optimizer.lr", "betas": _betas, "eps": "optimizer.adam_eps", "weight_decay": "optimizer.weight_decay",
    "bias_correction": _must_be(True, "the moments are always corrected for their start; remove it"),
})  # fmt: skip
_SGD = _keys("optimizer.params of SGD", {
    "lr": "optimizer.lr", "momentum": "optimizer.sgd_momentum", "weight_decay": "optimizer.weight_decay",
})  # fmt: skip


def _scheduler(file: DeepSpeedFile, place: str, value: Any) -> None:
    # only a constant rate is supported: DeepSpeed's warm-ups begin at the third step and ours at the first
    block = file.object(place, value)
    kind, params = block.get("type"), block.get("params")
    if kind in (None, "auto") or not block:
        return
    params = params if isinstance(params, dict) else {}
    low = params.get("warmup_min_lr", 0.0)
    high = params.get("warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None)
    is_rate = isinstance(low, (int, float)) and not isinstance(low, bool)
    if kind in ("WarmupLR", "WarmupDecayLR") and is_rate and low == high:
        file.claim("optimizer.lr", f"{place}.params.warmup_max_lr", high)
        where = file.where(f"{place}.type", kind, f"constant at {high}")
        constant = {"decay_style": "constant", "warmup_fraction": None, "warmup_iters": 0, "warmup_samples": 0}
        file.claims += [Claim(f"optimizer.lr_{name}", setting, where) for name, setting in constant.items()]
        return

    def word(key: str, default: str) -> str:
        number = params.get(key)
        return f"{number:g}" if isinstance(number, float) else str(number) if type(number) is int else default

    styles = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    style = styles.get(kind, "") if isinstance(kind, str) else ""
    flags = "--lr, --lr-decay-style and --lr-warmup-iters"
    if style:
        flags = f"--lr-decay-style {style} --lr-warmup-iters {word('warmup_num_steps', '1000')}"
        if style != "cosine":  # whose rates are shares of --lr
            start = word("warmup_min_lr", "0")
            flags = f"--lr {word('warmup_max_lr', 'LR')} {flags}{'' if start == '0' else f' --lr-warmup-init {start}'}"
        if style != "constant":
            flags += f" --lr-decay-iters {word('total_num_steps', 'N')}"
    differ = "learning-rate schedules are Megatron's, and rise from the first step where DeepSpeed's wait for the third"
    file.refuse(f"{place}.type", kind, f"{differ}; give {flags} and remove the block")


def _curriculum(file: DeepSpeedFile, place: str, value: Any) -> None:
    if (kind := value.get("curriculum_type", "seqlen")) == "seqlen":
        _lengths(file, place, value)
        return
    instead = 'use "seqlen", or remove the block'
    file.refuse(f"{place}.curriculum_type", kind, f"a curriculum is of the sequences' length here: {instead}")


def _curriculum_of_metrics(file: DeepSpeedFile, place: str, value: Any) -> None:
    metrics = file.object(f"{place}.curriculum_metrics", value.get("curriculum_metrics", {}))
    if not metrics:
        file.problem(f"{place}: is enabled and has no curriculum_metrics: add one, or disable it")
    for name, metric in metrics.items():
        there = f"{place}.curriculum_metrics.{shorten(name, 80)}"
        block = file.object(there, metric)
        if name != "seqlen_truncate":
            instead = "use seqlen_truncate, or remove it"
            file.refuse(there, metric, f"a curriculum cuts samples off and does not choose them: {instead}")
        elif (cluster := block.get("clustering_type", "single_cluster")) != "single_cluster":
            why = 'samples are not chosen by their difficulty: use "single_cluster"'
            file.refuse(f"{there}.clustering_type", cluster, why)
        else:
            _lengths(file, there, block)


_PARTS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}


def _lengths(file: DeepSpeedFile, place: str, block: dict[str, Any]) -> None:
    kind, config = block.get("schedule_type"), file.object(f"{place}.schedule_config", block.get("schedule_config", {}))
    if not isinstance(kind, str) or kind not in _PARTS:
        instead = f"the schedules are {', '.join(_PARTS)}; use one of them, or remove the block"
        file.refuse(f"{place}.schedule_type", kind, instead)
        return
    missing = [key for key in ("min_difficulty", "max_difficulty") if key not in block]
    missing += [key for key in _PARTS[kind] if key not in config]
    if missing:
        file.problem(f"{place}: {kind} needs {', '.join(missing)}")
        return

    def word(value: Any) -> str:
        return str(int(value)) if isinstance(value, float) and value.is_integer() else show(value)

    if kind == "fixed_discrete":
        lengths, lasts = config["difficulty"], config["max_step"]
        if not isinstance(lengths, list) or not isinstance(lasts, list) or len(lengths) != len(lasts) + 1:
            rule = "difficulty must be a list with one number more than max_step: the last length has no end"
            file.problem(f"{place}.schedule_config: {rule}")
            return
        numbers = [f"{word(length)}:{word(last)}" for length, last in zip(lengths, lasts, strict=False)]
        numbers.append(word(lengths[-1]))
    else:
        values = (block["min_difficulty"], block["max_difficulty"], *(config[key] for key in _PARTS[kind]))
        numbers = [word(value) for value in values]
    try:
        read_curriculum((kind, *numbers))
    except ValueError as error:
        file.problem(f"{place}: {error}")
        return
    file.claim("batch.seq_length_curriculum", place, (kind, *numbers))


_ALL_TOKENS = foreign_tables()["deepspeed: the file"]["random_ltd"]
_METRICS = Keys(
    {"curriculum_learning": _if_on(_curriculum_of_metrics)}, ignored=("num_epochs", "num_workers", "pin_memory")
)
_DATA_EFFICIENCY = Keys(
    {"data_sampling": _if_on(_METRICS), "data_routing": _if_on(Keys({"random_ltd": _if_on(_ALL_TOKENS)}))},
    ignored=("seed",),
)


# -------------------------------------------------------------------------------------------------------- all of it

_TOP = _keys("the file", {
    "train_batch_size": "batch.global_batch_size", "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": _accumulation, "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization": _ZERO, "bf16": _BF16, "bfloat16": _BF16, "fp16": _fp16, "data_types": _DATA_TYPES,
    "communication_data_type": _communication, "sequence_parallel_size": "parallel.sequence_parallel_size",
    "optimizer": _optimizer, "scheduler": _scheduler,
    "gradient_allreduce_op": _must_be(
        "mean", "the loss is divided by the step's number of tokens, gradients are summed; remove it"),
    "data_efficiency": _if_on(_DATA_EFFICIENCY), "curriculum_learning": _if_on(_curriculum),
})  # fmt: skip
BLOCKS: dict[str, Keys] = {
    "": _TOP, "zero_optimization.": _ZERO, "zero_optimization.offload_optimizer.": _OFFLOAD, "bf16.": _BF16,
    "fp16.": _FP16, "data_types.": _DATA_TYPES, "optimizer.params.": _ADAM,
}  # fmt: skip
"""All keys, by the beginning of their path, for docs/reference/flags.md."""
