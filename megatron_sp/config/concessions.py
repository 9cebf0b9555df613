"""Leniency like Megatron's: flags that have no effect in this run are dropped, with one line for each.

Launch scripts are written once and used for many runs, so they contain flags without effect in this one:
``--sequence-parallel`` with one tensor-parallel rank, ``--save-interval`` without ``--save``. Only flags that do not
change the result are dropped; a flag whose request cannot be met, such as ``--finetune`` without ``--load``, is still
an error. What a field needs to be read stands beside it in ``schema_*.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

from megatron_sp.config.conditions import NCCL
from megatron_sp.config.schema import GROUPS, Config
from megatron_sp.utils.flag_field import Condition

NCCL_ON_CPU = "--distributed-backend nccl (there is no GPU in this run: the ranks talk over gloo)"
"""The line about a backend that the machine cannot have; ``training/setup.py`` says it where it is found out at the
start.
"""


Wrong = Callable[[], Collection[str]]
"""Returns what is wrong with single values, as texts that name their fields."""


def drop_nccl(config: Config, why: str) -> list[str]:
    """Reset the flags about NCCL's communicators, which have no effect without it; return a line for each that was
    given.
    """
    fields = [each for each in _conditional() if NCCL in each.conditions]
    return [line for each in fields if (line := _drop(config, each, why, tuple))]


def settle_source(config: Config) -> Iterator[str]:
    """Drop --use-checkpoint-args where there is no checkpoint and the other flags say what the model is; idempotent."""
    checkpoint = config.checkpoint
    if checkpoint.use_checkpoint_args and checkpoint.load is None and not checkpoint.auto_resume and has_shape(config):
        checkpoint.use_checkpoint_args = False
        yield "--use-checkpoint-args (without --load there is no checkpoint; the model is what the other flags say)"


def drop_flash(config: Config) -> list[str]:
    """Take back what --use-flash-attn has asked for where there is no GPU; a kernel that --attention-backend names
    stays for the rules.

    Half of all scripts have the flag, for speed on the machine that they were written for.
    """
    kernels = config.kernels
    if not kernels.use_flash_attn:
        return []
    kernels.use_flash_attn = False
    if ("kernels", "attention_backend") in config.given:
        return []
    kernels.attention_backend = "auto"
    return ["--use-flash-attn (there is no GPU in this run: attention is torch's)"]


def concede(config: Config, wrong: Wrong = tuple) -> list[str]:
    """Reset the fields in ``config`` that have no effect in this run; idempotent.

    Args:
        wrong: says which values a rule rejects: these are kept, for the rule to name.
    Returns:
        One line for each field that was set: the flag, with the reason in brackets.
    """
    _zeros_that_mean_off(config)
    lines = list(_attention(config))
    if config.parallel.distributed_backend == "nccl" and config.kernels.device == "cpu":
        config.parallel.distributed_backend = "gloo"
        lines.append(NCCL_ON_CPU)
    unmet = [(each, next((c for c in each.conditions if not c.holds(config)), None)) for each in _conditional()]
    for each, condition in unmet:
        if condition is not None and (config.knows_model or not any(c.of_model for c in each.conditions)):
            line = _drop(config, each, condition.reason, wrong, keeps=condition.keeps)
            lines += [line] if line else []
    return lines


def is_read(config: Config, group: str, name: str) -> bool:
    """Return whether a run reads a field, as far as conditions of the field say it."""
    return all(condition.holds(config) for condition in GROUPS[group].__dataclass_fields__[name].metadata["only"])  # type: ignore[attr-defined]


class _Conditional(NamedTuple):
    """A field that is read under conditions only."""

    group: str
    name: str
    default: Any
    conditions: tuple[Condition, ...]


@cache
def _conditional() -> tuple[_Conditional, ...]:
    items = ((group, item) for group, cls in GROUPS.items() for item in dataclasses.fields(cls))
    return tuple(
        _Conditional(group, item.name, item.default, item.metadata["only"])
        for group, item in items
        if item.metadata["only"]
    )


def _drop(config: Config, field: _Conditional, why: str, wrong: Wrong, *, keeps: bool = False) -> str:
    """Reset a field that is not read, and return the line about it; empty if it was not set, or if a rule is to reject
    its value.
    """
    owner, where = getattr(config, field.group), config.given.get((field.group, field.name), "")
    value, flag = getattr(owner, field.name), f"--{field.name.replace('_', '-')}"
    # a switch that is given as it is anyway asks for nothing, nor does a file that has every field
    is_set = value != field.default or (where.startswith("--") and not isinstance(value, bool))
    if not is_set or (value != field.default and any(flag in text or field.name in text for text in wrong())):
        return ""
    if not keeps:
        setattr(owner, field.name, field.default)
    line = f"{where or flag} ({why})"
    return line if config.says(field.group, field.name, value) and line not in config.ignored_flags else ""


def _zeros_that_mean_off(config: Config) -> None:
    # normalize Megatron's values for "never": 0 for an interval, -1 for validation batches
    batch, checkpoint = config.batch, config.checkpoint
    batch.exit_interval, batch.eval_interval = batch.exit_interval or None, batch.eval_interval or None
    checkpoint.save_interval = checkpoint.save_interval or None
    if batch.eval_iters == -1:
        batch.eval_iters = 0


def _attention(config: Config) -> Iterator[str]:
    kernels = config.kernels
    if kernels.use_flash_attn and (
        kernels.attention_backend != "auto" or ("kernels", "attention_backend") in config.given
    ):
        if kernels.attention_backend != "flash":
            kernels.use_flash_attn = False
            yield f"--use-flash-attn (--attention-backend {kernels.attention_backend} says it more exactly)"
    elif kernels.use_flash_attn:
        kernels.attention_backend = "flash"
    if kernels.device == "cpu":
        yield from drop_flash(config)


def has_shape(config: Config) -> bool:
    """Return whether the flags define the model's shape without a checkpoint."""
    model = config.model
    return None not in (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length)
