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

from megatron_sp.config.fields import FieldKind, flag_name
from megatron_sp.config.flags.settings import Setting
from megatron_sp.config.schema import Config

HELD = {
    "expert-interval": (
        1, "layers number N, 2 N, ..., counted from 1, have experts: `--moe-layer-freq` with that pattern",
    ),
    "moe-loss-weight": (1, "`--moe-aux-loss-coeff` N / `--num-layers`"),
    "moe-expert-model-parallelism": (
        0, "`--expert-model-parallel-size` with as many ranks as can have the same number of experts",
    ),
}  # fmt: skip
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


def resolve_expert_dialect(
    config: Config, settings: Sequence[Setting], held: dict[str, Setting], processes: int
) -> list[str]:
    """Write into ``config`` what the words of the two programs mean, and what they leave out.

    ``held`` are settings of ``HELD``, and --num-experts with its words if they are several, by name. Returns a line for
    each flag without effect. Raises ValueError: a value is wrong, or says what cannot be.
    """
    model, names = config.model, {setting.name for setting in settings}
    has_experts: list[bool] | None = None
    if listed := held.get("num-experts"):  # a list of numbers: which of its places have any
        counts: list[int] = [_value("int", Setting(listed.name, (word,), listed.where)) for word in listed.words]
        several = sorted({count for count in counts if count != 1})
        if len(several) > 1:
            rule = "layers with experts have the same number of them here"
            numbers = f"{', '.join(map(str, several[:-1]))} and {several[-1]}"
            raise ValueError(
                f"{listed.where} {' '.join(listed.words)}: {rule}, and these have {numbers}: give one number"
            )
        config.set("model", "num_experts", several[0] if several else 1, listed.where)
        has_experts = [count != 1 for count in counts]
    if (model.num_experts or 0) <= 1:
        idle = [setting for name, setting in held.items() if name != "num-experts"]
        return [f"{setting.where} (without --num-experts it has no effect)" for setting in idle]
    lines = _loss_and_ranks(config, held, processes)
    # else they are the checkpoint's, or missing
    if ("expert-interval" in held or has_experts is not None) and model.num_layers:
        pattern = _layers(config, held.get("expert-interval"), has_experts)
        config.set("model", "moe_layer_freq", pattern, "--expert-interval")
    program = ""
    if names & _MEGABLOCKS:
        program = "megablocks"
    elif names & (_DEEPSPEED | _ENGINE) or has_experts:
        program = "Megatron-DeepSpeed"
    if program:
        lines += _defaults(config, settings, program)
    config.understood += tuple(lines)
    return []


def _defaults(config: Config, settings: Sequence[Setting], program: str) -> list[str]:
    # set what the program's command line leaves out, and return lines about it
    model, given, names = config.model, config.given, {setting.name for setting in settings}
    layers, is_megablocks = model.num_layers, program == "megablocks"
    megatrons = sorted(name for name in names if name.startswith("moe-") and name not in _DEEPSPEED | _MEGABLOCKS)
    # where the number of experts is a checkpoint's or a preset's, so is the rest
    is_told = ("model", "num_experts") in given and not config.checkpoint.use_checkpoint_args
    is_all = is_told and not megatrons
    assumed: dict[str, Any] = {}
    if is_all:
        assumed = {"moe_router_topk": 1, "moe_aux_loss_coeff": _LOSS / (layers or 1) if is_megablocks else _LOSS}
        if not is_megablocks and layers and ("model", "moe_layer_freq") not in given:
            assumed["moe_layer_freq"] = _layers(config, None, None)
    assumed = {name: value for name, value in assumed.items() if ("model", name) not in given}
    topk = assumed.get("moe_router_topk", model.moe_router_topk)
    last_topk = [setting.name for setting in settings if setting.name in _TOPK][-1:]
    weighs_one = is_all or last_topk in (["topk"], ["moe-top-k"])
    if (is_megablocks or topk == 1) and weighs_one and model.moe_router_score_function == "softmax":
        assumed["moe_router_pre_softmax"] = True
    changed = {
        name: value for name, value in assumed.items() if ("model", name) not in given and getattr(model, name) != value
    }
    lines, experts = [], f"--num-experts {model.num_experts}"
    if changed:
        flags = ", ".join(flag_name(name) + ("" if value is True else f" {value}") for name, value in changed.items())
        for name, value in changed.items():
            setattr(model, name, value)
        lines.append(f"{experts} (what is not given is as in {program}: {flags})")
    if not is_megablocks and is_all and topk == 2 and _NEXT_BEST not in names:
        why = f"a token's second expert is the next best one, as with Megatron-DeepSpeed's --{_NEXT_BEST}"
        lines.append(f"--topk 2 ({why})")
    if is_told and megatrons:  # which defaults are not those of the program, because a name of Megatron's was given
        left = [
            f"{flag_name(name)} {getattr(model, name):g}" for name in ("moe_router_topk", "moe_aux_loss_coeff")
            if ("model", name) not in given
        ]  # fmt: skip
        left += ["experts in every layer"] if ("model", "moe_layer_freq") not in given else []
        if left:
            lines.append(f"{experts} (with --{megatrons[0]} in Megatron's words, not {program}'s: {', '.join(left)})")
    return lines


def _layers(config: Config, setting: Setting | None, has_experts: list[bool] | None) -> str:
    # the pattern of layers: number N, 2 N, ..., counted from 1, have experts; ``has_experts`` may leave some out
    layers, every = config.model.num_layers, _EVERY if setting is None else _value("int", setting)
    if every < 1:
        raise ValueError(f"--expert-interval ({every}) must be at least 1: it is a number of layers")
    assert layers
    if layers < every:
        default = " (its default in Megatron-DeepSpeed)" if setting is None else ""
        raise ValueError(
            f"--expert-interval {every}{default}: layer number {every} would be the first with experts,"
            f" and num_layers is {layers}: give --expert-interval 1 for experts in every layer"
        )
    if has_experts is None or (all(has_experts) and len(has_experts) == layers // every):
        rest = f"+[0]*{layers % every}" if layers % every else ""
        return "1" if every == 1 else f"[{'0,' * (every - 1)}1]*{layers // every}{rest}"
    if len(has_experts) != layers // every:
        raise ValueError(
            f"--num-experts has {len(has_experts)} numbers, and with num_layers {layers} and"
            f" --expert-interval {every} there are {layers // every} layers with experts: give a number for each, or"
            " one for all"
        )
    has = (number % every == 0 and has_experts[number // every - 1] for number in range(1, layers + 1))
    return f"[{','.join('01'[each] for each in has)}]"


def _loss_and_ranks(config: Config, held: dict[str, Setting], processes: int) -> list[str]:
    parallel, lines = config.parallel, []
    if weight := held.get("moe-loss-weight"):
        coefficient = _value("float", weight) / (config.model.num_layers or 1)
        config.set("model", "moe_aux_loss_coeff", coefficient, weight.where)
        lines.append(f"{weight.where} (megablocks divides it by the layers: --moe-aux-loss-coeff {coefficient:g})")
    shares = held.get("moe-expert-model-parallelism")
    if shares and ("parallel", "expert_model_parallel_size") not in config.given:
        ranks = processes // max(1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
        parallel.expert_model_parallel_size = math.gcd(max(1, ranks), config.model.num_experts or 1)
        lines.append(f"{shares.where} (--expert-model-parallel-size {parallel.expert_model_parallel_size})")
    return lines


def _value(base: str, setting: Setting) -> Any:
    try:
        return FieldKind(base).parse(setting.words)
    except ValueError as error:
        raise ValueError(f"{setting.where}: {error}") from None
