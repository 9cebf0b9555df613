"""Blocks of DeepSpeed's JSON about optimizer, scheduler and data: ``deepspeed_keys.py`` has the others."""

from __future__ import annotations

from typing import Any

from megatron_sp.config.curriculum import read_curriculum
from megatron_sp.config.flags.deepspeed_config import Claim
from megatron_sp.config.flags.deepspeed_reader import (
    Keys,
    Reader,
    if_on,
    inside,
    must_be,
    printable,
    refusing,
    sets,
    short,
)

_ADAM_DEFAULTS = {
    "lr": ("optimizer.lr", 1e-3), "eps": ("optimizer.adam_eps", 1e-8), "weight_decay": ("optimizer.weight_decay", 0.0),
}  # fmt: skip
_SGD_DEFAULTS = {
    "lr": ("optimizer.lr", 1e-3), "momentum": ("optimizer.sgd_momentum", 0.0),
    "weight_decay": ("optimizer.weight_decay", 0.0),
}  # fmt: skip
_KERNELS = ("torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none", "fp32_optimizer_states")


def handle_optimizer(reader: Reader, place: str, value: Any) -> None:
    block = reader.object(place, value)
    kind, params = block.get("type"), block.get("params", {})
    reader.block(
        {k: v for k, v in block.items() if k not in ("type", "params")}, place, Keys({}, ignored=("legacy_fusion",))
    )
    if kind is None and params not in (None, "auto", {}):
        given = f"{place}.params ({short(params)})"
        reader.problem(f'{given} has no optimizer.type: add "type": "AdamW", "Adam" or "SGD", or remove the block')
    if kind in (None, "auto"):
        return
    word = kind.lower() if isinstance(kind, str) else ""
    if word not in ("adam", "adamw", "sgd"):
        reader.refuse(
            f"{place}.type",
            kind,
            "the optimizers today are AdamW and SGD; use one of them, or remove the block and give --optimizer",
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
    reader.block(params, f"{place}.params", _SGD if word == "sgd" else ADAM)
    for key, (target, default) in (_SGD_DEFAULTS if word == "sgd" else _ADAM_DEFAULTS).items():
        if key not in params:
            reader.default(target, default)
    if word != "sgd" and "betas" not in params:
        reader.default("optimizer.adam_beta1", 0.9)
        reader.default("optimizer.adam_beta2", 0.999)


def _betas(reader: Reader, place: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        reader.problem(f"{place}: expected two numbers [beta1, beta2], got {short(value)}")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True):
        if beta not in (None, "auto"):
            reader.claim(f"optimizer.{name}", place, beta, shown=value)


ADAM = Keys(
    {
        "lr": sets("optimizer.lr"), "betas": _betas, "eps": sets("optimizer.adam_eps"),
        "weight_decay": sets("optimizer.weight_decay"),
        "bias_correction": must_be(True, "the moments are always corrected for their start; remove it"),
    },
    ignored=(*_KERNELS, "adam_w_mode"),
    refused={
        "amsgrad": "AdamW is plain; remove it", "maximize": "the loss is made small; remove it",
        "max_grad_norm": 'use the key "gradient_clipping", or --clip-grad',
    },
)  # fmt: skip
_SGD = Keys(
    {"lr": sets("optimizer.lr"), "momentum": sets("optimizer.sgd_momentum"), "weight_decay": sets("optimizer.weight_decay")},
    ignored=_KERNELS,
    refused={
        "nesterov": "SGD has plain momentum; remove it", "dampening": "SGD has plain momentum; remove it",
        "maximize": "the loss is made small; remove it",
        "max_grad_norm": 'use the key "gradient_clipping", or --clip-grad',
    },
)  # fmt: skip


def handle_scheduler(reader: Reader, place: str, value: Any) -> None:
    """Handle a scheduler: only a constant rate is supported, as DeepSpeed's warm-ups begin at the third step and ours
    at the first.
    """
    block = reader.object(place, value)
    kind, params = block.get("type"), block.get("params")
    if kind in (None, "auto") or not block:
        return
    params = params if isinstance(params, dict) else {}
    low, high = (
        params.get("warmup_min_lr", 0.0),
        params.get("warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None),
    )
    is_rate = isinstance(low, (int, float)) and not isinstance(low, bool)
    if kind in ("WarmupLR", "WarmupDecayLR") and is_rate and low == high:
        reader.claim("optimizer.lr", f"{place}.params.warmup_max_lr", high)
        for name, constant in (
            ("lr_decay_style", "constant"), ("lr_warmup_fraction", None), ("lr_warmup_iters", 0),
            ("lr_warmup_samples", 0),
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

    def word(key: str, default: str) -> str:
        value = params.get(key)
        return f"{value:g}" if isinstance(value, float) else str(value) if type(value) is int else default

    style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(
        kind if isinstance(kind, str) else "", ""
    )
    if not style:
        return "--lr, --lr-decay-style and --lr-warmup-iters"
    ends = "" if style == "constant" else f" --lr-decay-iters {word('total_num_steps', 'N')}"
    peak = "" if style == "cosine" else f"--lr {word('warmup_max_lr', 'LR')} "
    start = word("warmup_min_lr", "0") if style != "cosine" else "0"
    first = "" if start == "0" else f" --lr-warmup-init {start}"
    return f"{peak}--lr-decay-style {style} --lr-warmup-iters {word('warmup_num_steps', '1000')}{first}{ends}"


def handle_curriculum(reader: Reader, place: str, value: Any) -> None:
    kind = value.get("curriculum_type", "seqlen")
    if kind == "seqlen":
        _lengths(reader, place, value)
    else:
        reader.refuse(
            f"{place}.curriculum_type",
            kind,
            'a curriculum is of the sequences\' length here: use "seqlen", or remove the block',
        )


def _curriculum_of_metrics(reader: Reader, place: str, value: Any) -> None:
    metrics = reader.object(f"{place}.curriculum_metrics", value.get("curriculum_metrics", {}))
    if not metrics:
        reader.problem(f"{place}: is enabled and has no curriculum_metrics: add one, or disable it")
    for name, metric in metrics.items():
        there = f"{place}.curriculum_metrics.{printable(name)}"
        block = reader.object(there, metric)
        if name != "seqlen_truncate":
            reader.refuse(
                there,
                metric,
                "a curriculum cuts samples off and does not choose them: use seqlen_truncate, or remove it",
            )
        elif (cluster := block.get("clustering_type", "single_cluster")) != "single_cluster":
            reader.refuse(
                f"{there}.clustering_type", cluster, 'samples are not chosen by their difficulty: use "single_cluster"'
            )
        else:
            _lengths(reader, there, block)


_PARTS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}  # fmt: skip


def _lengths(reader: Reader, place: str, block: dict[str, Any]) -> None:
    kind, config = (
        block.get("schedule_type"),
        reader.object(f"{place}.schedule_config", block.get("schedule_config", {})),
    )
    if not isinstance(kind, str) or kind not in _PARTS:
        reader.refuse(
            f"{place}.schedule_type",
            kind,
            f"the schedules are {', '.join(_PARTS)}; use one of them, or remove the block",
        )
        return
    missing = [key for key in ("min_difficulty", "max_difficulty") if key not in block] + [
        key for key in _PARTS[kind] if key not in config
    ]
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
        numbers = [f"{_word(length)}:{_word(last)}" for length, last in zip(lengths, lasts, strict=False)] + [
            _word(lengths[-1])
        ]
    else:
        numbers = [
            _word(block["min_difficulty"]),
            _word(block["max_difficulty"]),
            *(_word(config[key]) for key in _PARTS[kind]),
        ]
    try:
        read_curriculum((kind, *numbers))
    except ValueError as error:
        reader.problem(f"{place}: {error}")
        return
    reader.claim("batch.seq_length_curriculum", place, (kind, *numbers))


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else short(value)


ALL_TOKENS = "random layer token dropping (random-LTD) leaves tokens out of the middle layers, and here every layer computes all; remove it"

_CURRICULUM = Keys(
    {"curriculum_learning": if_on(_curriculum_of_metrics)}, ignored=("num_epochs", "num_workers", "pin_memory")
)
_ROUTING = Keys({"random_ltd": if_on(refusing(ALL_TOKENS))})
DATA_EFFICIENCY = Keys(
    {"data_sampling": if_on(inside(_CURRICULUM)), "data_routing": if_on(inside(_ROUTING))}, ignored=("seed",)
)
