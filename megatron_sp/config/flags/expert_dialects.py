"""Experts in the words of Megatron-DeepSpeed and megablocks, whose defaults are not Megatron's.

A command line that speaks one of the two means that program's defaults in all that it leaves out; one that has
Megatron's names beside them has been written for this package, and gets Megatron's. What was assumed is told in one
line. Both programs weigh a token's only expert by its share of the softmax over all of them, which here is
--moe-router-pre-softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_sp.config.fields import FieldKind
from megatron_sp.config.flags.flag_names import Setting
from megatron_sp.config.schema import Config

HELD = {
    "expert-interval": (
        1,
        "layers number N, 2 N, ..., counted from 1, have experts: `--moe-layer-freq` with that pattern",
    ),
    "moe-loss-weight": (1, "`--moe-aux-loss-coeff` N / `--num-layers`"),
    "moe-expert-model-parallelism": (
        0,
        "`--expert-model-parallel-size` with as many ranks as can have the same number of experts",
    ),
}
"""Flags that can be understood only when all others are known: their number of words, and what they mean. So is a list
after --num-experts."""

_DEEPSPEED = {
    "topk", "expert-interval", "mlp-type", "moe-loss-coeff", "moe-train-capacity-factor",
    "moe-eval-capacity-factor", "moe-min-capacity", "disable-moe-token-dropping", "moe-token-dropping",
    "moe-expert-parallel-size", "create-moe-param-group", "use-tutel", "enable-expert-tensor-parallelism",
    "disable-moe-top2-2nd-expert-sampling",
}  # fmt: skip
_MEGABLOCKS = {
    "moe-num-experts", "moe-top-k", "moe-loss-weight", "moe-capacity-factor", "moe-expert-model-parallelism",
    "moe-weight-parallelism", "moe-lbl-in-fp32", "moe-jitter-eps", "moe-zloss-weight", "moe-zloss-in-fp32",
    "moe-normalize-expert-weights",
}  # fmt: skip
_ENGINE = {"deepspeed", "deepspeed-config", "deepscale", "deepscale-config"}
_TOPK = ("topk", "moe-top-k", "moe-router-topk")
_NEXT_BEST = "disable-moe-top2-2nd-expert-sampling"
_EVERY = 2  # DeepSpeed's --expert-interval
_LOSS = 0.1  # coefficient of the balance loss in both programs


def settle_expert_dialect(
    config: Config, settings: Sequence[Setting], held: dict[str, Setting], processes: int
) -> list[str]:
    """Write into ``config`` what the words of the two programs mean, and what they leave out.

    Args:
        config: all other settings; neither normalised nor validated. Modified in place, ``given`` too.
        settings: all of them, for the names that were used.
        held: those of ``HELD``, and --num-experts with its words if they are several, by name.
    Returns:
        A line for each flag without effect; what was assumed is told in ``config.understood``.
    Raises:
        ValueError: a value is wrong, or says what cannot be; the message begins with the flag.
    """
    model, names = config.model, {setting.name for setting in settings}
    places = _places(config, held["num-experts"]) if "num-experts" in held else None
    if (model.num_experts or 0) <= 1:
        return [
            f"{setting.where} (without --num-experts it has no effect)"
            for name, setting in held.items()
            if name != "num-experts"
        ]
    lines = [*_loss_weight(config, held), *_shares(config, held, processes)]
    # else they are the checkpoint's, or missing
    if ("expert-interval" in held or places is not None) and model.num_layers:
        _set(config, "moe_layer_freq", _layers(config, held.get("expert-interval"), places), "--expert-interval")
    whose = (
        "megablocks"
        if names & _MEGABLOCKS
        else "Megatron-DeepSpeed"
        if names & (_DEEPSPEED | _ENGINE) or places
        else ""
    )
    if not whose:
        config.understood += tuple(lines)
        return []
    megatrons = sorted(name for name in names if name.startswith("moe-") and name not in _DEEPSPEED | _MEGABLOCKS)
    # where the number of experts is a checkpoint's or a preset's, so is the rest
    is_told = ("model", "num_experts") in config.given and not config.checkpoint.use_checkpoint_args
    is_all = is_told and not megatrons
    assumed = _defaults(config, whose) if is_all else {}
    topk = assumed.get("moe_router_topk", model.moe_router_topk)
    said = [setting.name for setting in settings if setting.name in _TOPK][-1:]
    if (
        (whose == "megablocks" or topk == 1)
        and (is_all or said in (["topk"], ["moe-top-k"]))
        and model.moe_router_score_function == "softmax"
    ):
        assumed["moe_router_pre_softmax"] = True
    lines += _assume(config, assumed, whose)
    if whose == "Megatron-DeepSpeed" and is_all and topk == 2 and _NEXT_BEST not in names:
        lines.append(
            f"--topk 2 (a token's second expert is the next best one, as with Megatron-DeepSpeed's --{_NEXT_BEST})"
        )
    if is_told and megatrons:
        lines += _left_to_megatron(config, whose, megatrons[0])
    config.understood += tuple(lines)
    return []


def _defaults(config: Config, whose: str) -> dict[str, Any]:
    layers = config.model.num_layers or 1
    found: dict[str, Any] = {
        "moe_router_topk": 1,
        "moe_aux_loss_coeff": _LOSS / layers if whose == "megablocks" else _LOSS,
    }
    if whose != "megablocks" and config.model.num_layers and ("model", "moe_layer_freq") not in config.given:
        found["moe_layer_freq"] = _layers(config, None, None)
    return {name: value for name, value in found.items() if ("model", name) not in config.given}


def _assume(config: Config, assumed: dict[str, Any], whose: str) -> list[str]:
    # set fields; return one line about those that this changes
    changed = [
        name
        for name, value in assumed.items()
        if ("model", name) not in config.given and getattr(config.model, name) != value
    ]
    for name in changed:
        setattr(config.model, name, assumed[name])
    flags = [f"--{name.replace('_', '-')}" + ("" if assumed[name] is True else f" {assumed[name]}") for name in changed]
    return (
        [f"--num-experts {config.model.num_experts} (what is not given is as in {whose}: {', '.join(flags)})"]
        if flags
        else []
    )


def _left_to_megatron(config: Config, whose: str, name: str) -> list[str]:
    # say which defaults are not those of ``whose``, because a name of Megatron's was given
    left = [f"--{field.replace('_', '-')} {getattr(config.model, field):g}" for field in ("moe_router_topk", "moe_aux_loss_coeff")
            if ("model", field) not in config.given]  # fmt: skip
    left += ["experts in every layer"] if ("model", "moe_layer_freq") not in config.given else []
    return (
        [
            f"--num-experts {config.model.num_experts} (with --{name} in Megatron's words, not {whose}'s: {', '.join(left)})"
        ]
        if left
        else []
    )


def _places(config: Config, setting: Setting) -> list[bool]:
    # set the number of experts from a list; return which of its places have any
    counts: list[int] = [_value("int", Setting(setting.name, (word,), setting.where)) for word in setting.words]
    several = sorted({count for count in counts if count != 1})
    if len(several) > 1:
        raise ValueError(
            f"{setting.where} {' '.join(setting.words)}: layers with experts have the same number of them here, and"
            f" these have {', '.join(map(str, several[:-1]))} and {several[-1]}: give one number"
        )
    _set(config, "num_experts", several[0] if several else 1, setting.where)
    return [count != 1 for count in counts]


def _layers(config: Config, setting: Setting | None, places: list[bool] | None) -> str:
    """Return the pattern of layers: number N, 2 N, ..., counted from 1, have experts; ``places`` may leave some of them
    out.
    """
    layers, every = config.model.num_layers, _EVERY if setting is None else _value("int", setting)
    if every < 1:
        raise ValueError(f"--expert-interval ({every}) must be at least 1: it is a number of layers")
    assert layers
    if layers < every:
        default = " (its default in Megatron-DeepSpeed)" if setting is None else ""
        raise ValueError(
            f"--expert-interval {every}{default}: layer number {every} would be the first with experts, and"
            f" num_layers is {layers}: give --expert-interval 1 for experts in every layer"
        )
    if places is None or (all(places) and len(places) == layers // every):
        return (
            "1"
            if every == 1
            else f"[{'0,' * (every - 1)}1]*{layers // every}" + (f"+[0]*{layers % every}" if layers % every else "")
        )
    if len(places) != layers // every:
        raise ValueError(
            f"--num-experts has {len(places)} numbers, and with num_layers {layers} and --expert-interval {every}"
            f" there are {layers // every} layers with experts: give a number for each, or one for all"
        )
    has = (number % every == 0 and places[number // every - 1] for number in range(1, layers + 1))
    return f"[{','.join('01'[each] for each in has)}]"


def _loss_weight(config: Config, held: dict[str, Setting]) -> list[str]:
    setting = held.get("moe-loss-weight")
    if setting is None:
        return []
    coefficient = _value("float", setting) / (config.model.num_layers or 1)
    _set(config, "moe_aux_loss_coeff", coefficient, setting.where)
    return [f"{setting.where} (megablocks divides it by the layers: --moe-aux-loss-coeff {coefficient:g})"]


def _shares(config: Config, held: dict[str, Setting], processes: int) -> list[str]:
    setting, parallel = held.get("moe-expert-model-parallelism"), config.parallel
    if setting is None or ("parallel", "expert_model_parallel_size") in config.given:
        return []
    ranks = processes // max(1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    parallel.expert_model_parallel_size = math.gcd(max(1, ranks), config.model.num_experts or 1)
    return [f"{setting.where} (--expert-model-parallel-size {parallel.expert_model_parallel_size})"]


def _set(config: Config, name: str, value: object, where: str) -> None:
    setattr(config.model, name, value)
    config.given["model", name] = where


def _value(base: str, setting: Setting) -> Any:
    try:
        return FieldKind(base).parse(setting.words)
    except ValueError as error:
        raise ValueError(f"{setting.where}: {error}") from None
