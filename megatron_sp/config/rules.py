"""Rules between the fields of a configuration, and values that one field implies for another.

A rule is a line ``yield "..."`` under its condition; the text has the values, the rule and a remedy. None needs torch,
a file or a device, so every rank rejects an invalid command line at once, before the first collective.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

from megatron_sp.config.fields import MAX_NUMBER, When, field_kinds, flag_name
from megatron_sp.config.rules_data import data_violations
from megatron_sp.config.rules_model import resolve_gelu, resolve_groups, shape_violations, variant_violations
from megatron_sp.config.rules_training import batch_violations, length_violations, resolve_batch_size, value_violations
from megatron_sp.config.schema import FIELDS, GROUPS, PEAK_TFLOPS, Config, default_type, raise_all
from megatron_sp.utils.numbers import MAX_COUNT

# a rule is a condition and a sentence
# fmt: off
NCCL_ON_CPU = "--distributed-backend nccl (there is no GPU in this run: the ranks talk over gloo)"
"""The line about a backend that the machine cannot have."""
_MAX_NAME, _MAX_PATH = 200, 3000  # bytes; systems allow 255 and 4,095, and files inside the folder need some of them
# The rules of a feature are imported where a field with one of these words in its name has not its default.
_PIPELINE, _CONTEXT = ("pipeline",), ("cp_", "context_parallel", "delay_wgrad")
_EXPERTS = ("moe_", "expert")
_LAYOUT = ("_parallel_size", "sp_", "split_qkv", "zero")
_CONDITIONAL = {key: item.metadata["only"] for key, item in FIELDS.items() if item.metadata["only"]}


def normalize(config: Config) -> Config:
    """Expand shorthand flags and apply what flags imply; contradictions are left for ``violations``.

    Modifies ``config`` in place and returns it; idempotent.
    """
    model, kernels, data, parallel = config.model, config.kernels, config.data, config.parallel
    checkpoint, lines = config.checkpoint, list[str]()
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        parallel.zero_stage = 1
    if parallel.stage3_use_all_reduce_for_fetch_params:
        parallel.zero3_fetch = "all_reduce"
    if kernels.recompute_activations and kernels.recompute_granularity is None:
        kernels.recompute_granularity = "selective"
    if kernels.recompute_granularity == "full":
        kernels.recompute_method = kernels.recompute_method or "uniform"
        if kernels.recompute_method == "uniform" and kernels.recompute_num_layers is None:
            kernels.recompute_num_layers = 1
    if data.tokenizer_type is None:
        data.tokenizer_type = default_type(data, model.vocab_size)
    resolve_batch_size(config.batch)
    if _asks(parallel, *_PIPELINE):
        from megatron_sp.config.rules_pipeline import resolve_stages

        resolve_stages(config)
    if checkpoint.use_checkpoint_args and checkpoint.load is None and not checkpoint.auto_resume and has_shape(config):
        checkpoint.use_checkpoint_args = False
        lines.append(
            "--use-checkpoint-args (without --load there is no checkpoint; the model is what the other flags say)")
    if _asks(parallel, *_CONTEXT):
        from megatron_sp.config.rules_layout import resolve_comm_type

        lines += resolve_comm_type(parallel)
    if _asks(model, *_EXPERTS):
        from megatron_sp.config.rules_experts import resolve_experts

        lines += resolve_experts(config)
    config.ignored_flags += (*lines, *resolve_groups(config))
    config.ignored_flags += tuple(drop_unused(config))
    if config.knows_model and is_read(config, "model", "gelu_approximate"):
        resolve_gelu(model)
    return config


def validate(config: Config, world_size: int = 1) -> None:
    """Raise one ConfigError that lists all violations; call ``normalize()`` first."""
    raise_all(violations(config, world_size))


def violations(config: Config, world_size: int) -> list[str]:
    """Return a message for each violated rule; if single values are out of range, only those.

    A model that is still to be taken from a checkpoint is checked when it has been (``training/resume.py``).
    """
    return _range_texts(config) or [
        *(_about_model(config, world_size) if config.knows_model else ()),
        *_layout_and_batch(config, world_size),
        *length_violations(config),
        *value_violations(config),
        *data_violations(config),
        *_checkpoint(config),
        *_logging_and_graphs(config, world_size),
    ]


def model_violations(config: Config) -> list[str]:
    """Return the violations of the model's rules only, for a shape that was not given by flags."""
    from megatron_sp.config.rules_experts import expert_violations

    return _range_texts(config) or [*shape_violations(config), *expert_violations(config, 1)]


def inference_violations(config: Config, world_size: int) -> list[str]:
    """Return the violations of using an existing model in a layout; the rules of training do not apply."""
    from megatron_sp.config.rules_experts import shared_expert_violations
    from megatron_sp.config.rules_layout import split_violations, whole_replica_violations

    of_heads = split_violations(config, world_size, ("tp", "sp"))
    return [*of_heads, *shared_expert_violations(config), *whole_replica_violations(config, world_size)]


def _asks(group: Any, *words: str) -> bool:
    return any(getattr(group, name) != default for name, default in _defaults(group.__class__, words))


@cache
def _defaults(cls: type, words: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    # (name, default) of a group's fields with one of ``words`` in their name
    named = (item for item in dataclasses.fields(cls) if any(word in item.name for word in words))
    return tuple((item.name, item.default) for item in named)


# -------------------------------------------------------------------------------------------- flags without an effect
#
# Launch scripts are written once and used for many runs, so they contain flags without effect in this one, such as
# --save-interval without --save. These are dropped, with one line for each, and only these: a flag whose request cannot
# be met, such as --finetune without --load, is still an error.


def is_read(config: Config, group: str, name: str) -> bool:
    """Return whether a run reads a field, as far as conditions of the field say it."""
    return all(condition.holds(config) for condition in FIELDS[group, name].metadata["only"])


def has_shape(config: Config) -> bool:
    """Return whether the flags define the model's shape without a checkpoint."""
    model = config.model
    return None not in (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length)


def drop_nccl(config: Config, why: str) -> list[str]:
    """Reset the flags about NCCL's communicators, which have no effect without it; one line for each that was given."""
    lines = [_drop(config, *key, why) for key, conditions in _CONDITIONAL.items() if When.NCCL in conditions]
    return list(filter(None, lines))


def drop_flash(config: Config) -> list[str]:
    """Take back what --use-flash-attn, which half of all scripts have, has asked for where there is no GPU."""
    kernels = config.kernels
    if not kernels.use_flash_attn:
        return []
    kernels.use_flash_attn = False
    if ("kernels", "attention_backend") in config.given:
        return []
    kernels.attention_backend = "auto"
    return ["--use-flash-attn (there is no GPU in this run: attention is torch's)"]


def drop_unused(config: Config) -> list[str]:
    """Reset the fields that have no effect in this run, and return a line for each that was set; idempotent."""
    batch, checkpoint, kernels = config.batch, config.checkpoint, config.kernels
    # Megatron's values for "never": 0 for an interval, -1 for validation batches
    batch.exit_interval, batch.eval_interval = batch.exit_interval or None, batch.eval_interval or None
    checkpoint.save_interval = checkpoint.save_interval or None
    batch.eval_iters = 0 if batch.eval_iters == -1 else batch.eval_iters
    lines = []
    if kernels.use_flash_attn:
        backend = kernels.attention_backend
        if backend == "auto" and ("kernels", "attention_backend") not in config.given:
            kernels.attention_backend = "flash"
        elif backend != "flash":
            kernels.use_flash_attn = False
            lines.append(f"--use-flash-attn (--attention-backend {backend} says it more exactly)")
    if kernels.device == "cpu":
        lines += drop_flash(config)
        if config.parallel.distributed_backend == "nccl":
            config.parallel.distributed_backend = "gloo"
            lines.append(NCCL_ON_CPU)
    # all conditions are looked at before the first field is reset: some look at fields that others reset
    unmet = {key: [c for c in conditions if not c.holds(config)] for key, conditions in _CONDITIONAL.items()}
    for key, missing in unmet.items():
        if missing and (config.knows_model or not any(condition.of_model for condition in _CONDITIONAL[key])):
            lines.append(_drop(config, *key, missing[0].reason, checks=True, keeps=missing[0].keeps))
    return list(filter(None, lines))


def _drop(config: Config, group: str, name: str, why: str, *, checks: bool = False, keeps: bool = False) -> str:
    # reset a field that is not read, and return the line about it; empty if it was not set, or if a rule rejects it
    default, value = FIELDS[group, name].default, config.get(group, name)
    where, flag = config.given.get((group, name), ""), flag_name(name)
    # a switch that is given as it is anyway asks for nothing, nor does a file that has every field
    is_set = value != default or (where.startswith("--") and not isinstance(value, bool))
    if not is_set:
        return ""
    if value != default and checks:
        rules = variant_violations(config.model), value_violations(config), data_violations(config)
        if any(flag in text or name in text for text in _range_texts(config) or chain(*rules)):
            return ""
    if not keeps:
        config.set(group, name, default)
    line = f"{where or flag} ({why})"
    return line if config.says(group, name, value) and line not in config.ignored_flags else ""


# --------------------------------------------------------------------------------------------------------- violations


def _about_model(config: Config, world_size: int) -> Iterator[str]:
    parallel, kernels = config.parallel, config.kernels
    yield from shape_violations(config)
    if _asks(parallel, *_PIPELINE):
        from megatron_sp.config.rules_pipeline import pipeline_violations

        yield from pipeline_violations(config)
    if _asks(parallel, *_LAYOUT):
        from megatron_sp.config.rules_layout import exchange_violations, split_violations

        yield from split_violations(config, world_size)
        yield from exchange_violations(config, world_size)
    if _asks(parallel, *_CONTEXT):
        from megatron_sp.config.rules_layout import context_violations, delay_violations

        yield from context_violations(config)
        yield from delay_violations(config)
    if _asks(config.model, *_EXPERTS) or _asks(parallel, *_EXPERTS):
        from megatron_sp.config.rules_experts import expert_violations, lifeless_router, shared_expert_violations

        yield from expert_violations(config, world_size)
        yield from shared_expert_violations(config)
        yield from lifeless_router(config)
    if kernels != type(kernels)(device=kernels.device):
        from megatron_sp.config.rules_kernels import kernel_violations

        yield from kernel_violations(config)


def _layout_and_batch(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if _asks(parallel, *_LAYOUT):
        from megatron_sp.config.rules_layout import whole_replica_violations, zero_violations

        yield from whole_replica_violations(config, world_size)
        yield from zero_violations(config)
    if parallel.distributed_timeout_minutes <= 0:
        yield f"distributed_timeout_minutes ({parallel.distributed_timeout_minutes}) must be above 0"
    if world_size < 1:
        yield f"the number of processes ({world_size}) must be at least 1"
    yield from batch_violations(config, world_size)
    if config.batch.seq_length_curriculum is not None:
        from megatron_sp.config.curriculum import curriculum_violations

        yield from curriculum_violations(config)


def _range_texts(config: Config) -> list[str]:
    return [text for texts in out_of_range(config).values() for text in texts]


def out_of_range(config: Config) -> dict[tuple[str, str], list[str]]:
    """Return what is wrong with single fields, by (group, name): values out of range, unusable texts and paths."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for (group, name), item in FIELDS.items():
        base, value = field_kinds(GROUPS[group])[name].base, config.get(group, name)
        if value is None or base not in ("int", "float", "str"):
            continue
        values = value if isinstance(value, tuple) else (value,)
        texts = [flag_name(name) + what for each in values if (what := _unusable(each, base, item.metadata))]
        if texts:
            wrong[group, name] = texts
    return wrong


def _unusable(value: Any, base: str, about: Mapping[str, Any]) -> str:
    # what is wrong with a value, as it follows the flag in a message; empty: nothing
    if isinstance(value, str):
        if "\0" in value:
            return ": a text with a zero byte in it cannot be a name"
        longest, length = max(len(os.fsencode(part)) for part in value.split("/")), len(os.fsencode(value))
        if not about["path"] or (longest <= _MAX_NAME and length <= _MAX_PATH):
            return ""
        what = f"{length} bytes, and paths have at most {_MAX_PATH}"
        if longest > _MAX_NAME:
            what = f"a name of {longest} bytes, and the longest have {_MAX_NAME}"
        return f" ({value[:40]}...) has {what}"
    low, high = about["low"], about["high"]
    if high is None:
        high = MAX_COUNT if base == "int" else MAX_NUMBER
    is_below = low is not None and value < low
    if not is_below and abs(value) <= high:
        return ""
    numbers = value, low if is_below else high
    shown, bound = (f"{number:g}" if isinstance(number, float) else number for number in numbers)
    return f" ({shown}) must be at {'least' if is_below else 'most'} {bound}"


def _checkpoint(config: Config) -> Iterator[str]:
    ckpt = config.checkpoint
    source, is_auto = ckpt.load or ckpt.auto_resume, ckpt.save_interval == "auto"
    needs = (
        ("--mean-time-between-failures-hours", ckpt.mean_time_between_failures_hours, "--save-interval auto", is_auto),
        ("--auto-resume", ckpt.auto_resume, "--save DIR", ckpt.save),
        ("--ckpt-step", ckpt.ckpt_step is not None, "--load DIR or --auto-resume", source),
        ("--resume-fallback", ckpt.resume_fallback, "--load DIR or --auto-resume", source),
        ("--finetune", ckpt.finetune, "--load DIR", ckpt.load),
        ("--use-checkpoint-args", ckpt.use_checkpoint_args, "--load DIR or --auto-resume", source),
    )
    for flag, given, needed, present in needs:
        if given and not present:
            yield f"{flag} needs {needed}"
    if ckpt.auto_resume and ckpt.no_save_optim:
        yield "--auto-resume cannot go on from checkpoints without optimizer state: drop --no-save-optim"


def _logging_and_graphs(config: Config, world_size: int) -> Iterator[str]:
    log, parallel = config.logging, config.parallel
    if log.profile and log.profile_step_end <= log.profile_step_start:
        yield f"profile_step_end ({log.profile_step_end}) must be above profile_step_start ({log.profile_step_start})"
    absent = [rank for rank in log.profile_ranks if not 0 <= rank < world_size]
    if log.profile and absent:
        yield f"profile_ranks names rank {absent[0]}, but the ranks are 0 to {world_size - 1}"
    if log.report_overlap is not None:
        if parallel.replica_size == parallel.expert_model_parallel_size == 1:
            yield ("--report-overlap is about the exchanges of sequence-, context-, tensor- and pipeline-parallel"
                " ranks, and with sequence_parallel_size 1, context_parallel_size 1, tensor_model_parallel_size 1 and"
                " pipeline_model_parallel_size 1 there are none to report: add --sequence-parallel-size N,"
                " --context-parallel-size N, --tensor-model-parallel-size N or --pipeline-model-parallel-size N, or"
                " leave it out")
        measures = "--report-overlap measures training steps"
        if config.batch.skip_train:
            yield f"{measures}, and --skip-train takes none: give one of them"
        if parallel.verify_parallelism:
            yield f"{measures}, and --verify-parallelism compares one step and ends: give one of them"
    peak = log.peak_tflops
    if peak is not None and peak not in PEAK_TFLOPS:
        try:
            if not 0 < float(peak) < math.inf:
                yield f"peak_tflops ({peak}) must be above 0"
        except ValueError:
            yield f"peak_tflops ({peak}) must be a number of TFLOP/s above 0, or one of {', '.join(PEAK_TFLOPS)}"
    if config.kernels.cuda_graphs == "on":
        from megatron_sp.config.rules_kernels import obstacles, violation

        yield from map(violation, obstacles(config))
