"""Rules between the fields of a configuration, and values that one field implies for another.

Nothing here needs torch, a file or a device, so every rank rejects an invalid command line at once, before the first
collective. A rule is a line ``yield "..."`` under its condition; the text has the values, the rule and a remedy.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from megatron_sp.config.concessions import concede, is_read, settle_source
from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.config.rules_batch import batch_violations, settle_batch_size
from megatron_sp.config.rules_data import data_violations
from megatron_sp.config.rules_model import settle_gelu, settle_groups, shape_violations, variant_violations
from megatron_sp.config.rules_training import (
    learning_rate_violations,
    length_violations,
    optimizer_violations,
    precision_violations,
)
from megatron_sp.config.schema import GROUPS, Config, raise_all
from megatron_sp.config.schema_data import default_type
from megatron_sp.config.schema_run import PEAK_TFLOPS
from megatron_sp.utils.flag_field import MAX_COUNT, MAX_NUMBER

_MAX_NAME, _MAX_PATH = 200, 3000  # bytes; systems allow 255 and 4,095, and files inside the folder need some of them


def normalize(config: Config) -> Config:
    """Expand shorthand flags and apply what flags imply; contradictions are left for ``violations``.

    Modifies ``config`` in place and returns it; idempotent.
    """
    model, kernels, data = config.model, config.kernels, config.data
    if config.parallel.use_distributed_optimizer and config.parallel.zero_stage == 0:
        config.parallel.zero_stage = 1
    if config.parallel.stage3_use_all_reduce_for_fetch_params:
        config.parallel.zero3_fetch = "all_reduce"
    if kernels.recompute_activations and kernels.recompute_granularity is None:
        kernels.recompute_granularity = "selective"
    if kernels.recompute_granularity == "full":
        kernels.recompute_method = kernels.recompute_method or "uniform"
        if kernels.recompute_method == "uniform" and kernels.recompute_num_layers is None:
            kernels.recompute_num_layers = 1
    if data.tokenizer_type is None:
        data.tokenizer_type = default_type(data, model.vocab_size)
    settle_batch_size(config.batch)
    if _asks(config.parallel, *_PIPELINE):
        from megatron_sp.config.rules_pipeline import settle_stages

        settle_stages(config)
    lines = [*settle_source(config)]
    if _asks(config.parallel, *_CONTEXT):
        from megatron_sp.config.rules_context import settle_comm_type

        lines += settle_comm_type(config.parallel)
    if _asks(model, *_EXPERTS):
        from megatron_sp.config.rules_experts import settle_experts

        lines += settle_experts(config)
    config.ignored_flags += (*lines, *settle_groups(config))
    config.ignored_flags += tuple(concede(config, lambda: _wrong_values(config)))
    if config.knows_model and is_read(config, "model", "gelu_approximate"):
        settle_gelu(model)
    return config


# The rules of a feature are imported where a field with one of these words in its name has not its default.
_PIPELINE, _CONTEXT = ("pipeline",), ("cp_", "context_parallel", "delay_wgrad")
_EXPERTS = ("moe_", "expert")
_LAYOUT = ("_parallel_size", "sp_", "split_qkv", "zero")


def _asks(group: Any, *words: str) -> bool:
    return any(getattr(group, name) != default for name, default in _defaults(group.__class__, words))


@cache
def _defaults(cls: type, words: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    # (name, default) of a group's fields with one of ``words`` in their name
    named = (item for item in dataclasses.fields(cls) if any(word in item.name for word in words))
    return tuple((item.name, item.default) for item in named)


def _wrong_values(config: Config) -> list[str]:
    return _range_texts(config) or [
        *variant_violations(config.model),
        *learning_rate_violations(config),
        *optimizer_violations(config),
        *precision_violations(config),
        *data_violations(config),
    ]


def validate(config: Config, world_size: int = 1) -> None:
    """Check every rule that needs no file and no device; call ``normalize()`` first.

    Raises:
        ConfigError: lists all violations, each with the values, the rule and a remedy.
    """
    raise_all(violations(config, world_size))


def violations(config: Config, world_size: int) -> list[str]:
    """Return a message for each violated rule; if single values are out of range, only those: other rules need them.

    What is about a model that is still to be taken from a checkpoint is checked when it has been
    (``training/resume.py``).
    """
    return _range_texts(config) or [
        *(_about_model(config, world_size) if config.knows_model else ()),
        *_layout(config, world_size),
        *batch_violations(config, world_size),
        *_curriculum(config),
        *length_violations(config),
        *learning_rate_violations(config),
        *optimizer_violations(config),
        *precision_violations(config),
        *data_violations(config),
        *_checkpoint(config),
        *_logging(config, world_size),
        *_graphs(config),
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
        from megatron_sp.config.rules_context import context_violations, delay_violations

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


def _layout(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if _asks(parallel, *_LAYOUT):
        from megatron_sp.config.rules_layout import whole_replica_violations, zero_violations

        yield from whole_replica_violations(config, world_size)
        yield from zero_violations(config)
    if parallel.distributed_timeout_minutes <= 0:
        yield f"distributed_timeout_minutes ({parallel.distributed_timeout_minutes}) must be above 0"
    if world_size < 1:
        yield f"the number of processes ({world_size}) must be at least 1"


def _curriculum(config: Config) -> Iterator[str]:
    if config.batch.seq_length_curriculum is not None:
        from megatron_sp.config.curriculum import curriculum_violations

        yield from curriculum_violations(config)


def _graphs(config: Config) -> Iterator[str]:
    if config.kernels.cuda_graphs == "on":
        from megatron_sp.config.rules_graphs import obstacles, violation

        yield from map(violation, obstacles(config))


def _range_texts(config: Config) -> list[str]:
    return [text for texts in out_of_range(config).values() for text in texts]


def out_of_range(config: Config) -> dict[tuple[str, str], list[str]]:
    """Return what is wrong with single fields, by (group, name): values out of range, unusable texts and paths."""
    found: dict[tuple[str, str], list[str]] = {}
    for group, cls in GROUPS.items():
        for name, kind in field_kinds(cls).items():
            value, flag = getattr(getattr(config, group), name), f"--{name.replace('_', '-')}"
            about = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if kind.base in ("int", "float"):
                numbers = (each for each in values if not isinstance(each, str))  # --save-interval auto
                texts = [text for each in numbers if (text := _out_of_bounds(flag, each, about, kind.base))]
            elif kind.base == "str":
                texts = [text for each in values if (text := _unusable_text(flag, each, about["path"]))]
            else:
                continue
            if texts:
                found[group, name] = texts
    return found


def _out_of_bounds(flag: str, value: float, about: Mapping[str, Any], base: str) -> str | None:
    low, high = about["low"], about["high"]
    if low is not None and value < low:
        return f"{flag} ({_show(value)}) must be at least {_show(low)}"
    if high is None:
        high = MAX_COUNT if base == "int" else MAX_NUMBER
    return f"{flag} ({_show(value)}) must be at most {_show(high)}" if abs(value) > high else None


def _unusable_text(flag: str, text: str, is_path: bool) -> str | None:
    if "\0" in text:
        return f"{flag}: a text with a zero byte in it cannot be a name"
    if not is_path:
        return None
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > _MAX_NAME or len(os.fsencode(text)) > _MAX_PATH:
        what = f"a name of {longest} bytes, and the longest have {_MAX_NAME}"
        if longest <= _MAX_NAME:
            what = f"{len(os.fsencode(text))} bytes, and paths have at most {_MAX_PATH}"
        return f"{flag} ({text[:40]}...) has {what}"
    return None


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


def _logging(config: Config, world_size: int) -> Iterator[str]:
    log = config.logging
    if log.profile and log.profile_step_end <= log.profile_step_start:
        yield f"profile_step_end ({log.profile_step_end}) must be above profile_step_start ({log.profile_step_start})"
    absent = [rank for rank in log.profile_ranks if not 0 <= rank < world_size]
    if log.profile and absent:
        yield f"profile_ranks names rank {absent[0]}, but the ranks are 0 to {world_size - 1}"
    parallel = config.parallel
    if log.report_overlap is not None and parallel.replica_size == parallel.expert_model_parallel_size == 1:
        yield (
            "--report-overlap is about the exchanges of sequence-, context-, tensor- and pipeline-parallel ranks,"
            " and with sequence_parallel_size 1, context_parallel_size 1, tensor_model_parallel_size 1 and"
            " pipeline_model_parallel_size 1 there are none to report: add --sequence-parallel-size N,"
            " --context-parallel-size N, --tensor-model-parallel-size N or --pipeline-model-parallel-size N, or"
            " leave it out"
        )
    measures = "--report-overlap measures training steps"
    if log.report_overlap is not None and config.batch.skip_train:
        yield f"{measures}, and --skip-train takes none: give one of them"
    if log.report_overlap is not None and parallel.verify_parallelism:
        yield f"{measures}, and --verify-parallelism compares one step and ends: give one of them"
    if log.peak_tflops is None or log.peak_tflops in PEAK_TFLOPS:
        return
    try:
        if not 0 < float(log.peak_tflops) < math.inf:
            yield f"peak_tflops ({log.peak_tflops}) must be above 0"
    except ValueError:
        yield f"peak_tflops ({log.peak_tflops}) must be a number of TFLOP/s above 0, or one of {', '.join(PEAK_TFLOPS)}"


def _show(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
