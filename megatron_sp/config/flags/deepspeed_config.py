"""DeepSpeed's JSON (``--deepspeed_config FILE``): its values become part of the configuration.

``deepspeed_keys.py`` defines the meaning of each key. A value that is also given on the command line or in ``--config``
must agree: DeepSpeed never compared its JSON with the flags, and one of the two was silently ignored. For values that
only DeepSpeed's engine reads (the ZeRO stage, clipping, loss scaling) the file takes precedence, and a line reports the
overridden flag. Otherwise defaults apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_sp.config.schema import Config, Given

_SHOWN = 60  # most keys that the note about ignored ones names


class Claim(NamedTuple):
    """A value in the file for one of our fields."""

    field: str
    value: Any
    where: str  # for messages, such as "ds.json: zero_optimization.stage (2)"
    weak: bool = False  # a default of DeepSpeed, which applies if no value is given and contradicts none
    needs: tuple[str, Any] | None = None  # (field, value), a condition without which it does not apply


@dataclass
class DeepSpeedConfig:
    """Contents of a file.

    Attributes:
        ignored, unknown: paths of keys.
    """

    name: str  # name of the file, for messages
    claims: list[Claim] = field(default_factory=list)
    accumulation: int | None = None  # micro-batches per step; there is no such flag, it follows from the batch sizes
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)
    """What is said twice, and DeepSpeed reads in one of the two places alone: one line for each place that does not
    count.
    """

    def note(self) -> str | None:
        """Return one line that lists all ignored keys; None if there are none."""
        told = [(self.ignored, "DeepSpeed's own tuning, without a meaning here"), (self.unknown, "unknown")]
        more = [f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "" for paths, _ in told]
        parts = [f"{', '.join(p[:_SHOWN])}{rest} ({why})" for (p, why), rest in zip(told, more, strict=True) if p]
        return f"{self.name}: {'; '.join(parts)}" if parts else None


def settle(found: DeepSpeedConfig, config: Config, world_size: int) -> list[str]:
    """Write the file's values into ``config``.

    Args:
        config: configuration from the command line, neither normalised nor validated; modified in place, ``given`` too.
        world_size: number of processes, for the batch sizes.
    Returns:
        Problems of the file itself, and contradictions between the file and the command line.
    """
    problems, given = list(found.problems), config.given
    # defaults last, dependent claims after the others
    for claim in sorted(found.claims, key=lambda c: (c.weak, c.needs is not None)):
        if claim.needs is not None and _value(config, claim.needs[0]) != claim.needs[1]:
            continue
        told = list(_told(claim.field, config, given))
        others = [where for value, where in told if value != claim.value]
        if not told:
            group, _, name = claim.field.partition(".")
            setattr(getattr(config, group), name, claim.value)
            if not claim.weak:
                given[group, name] = claim.where
        elif others and not claim.weak and claim.field in _FILE_COUNTS:
            for name, value in {claim.field: claim.value, **_FILE_COUNTS[claim.field]}.items():
                group, _, attribute = name.partition(".")
                setattr(getattr(config, group), attribute, value)
            found.overruled.append(
                f"{others[0]} (DeepSpeed reads this from its file alone, and so it counts: {claim.where})"
            )
        elif others and not claim.weak:
            problems.append(f'{claim.where} contradicts {others[0]}: make them agree, or write "auto" in the file')
    return problems or _batch_sizes(found, config, given, world_size)


_FILE_COUNTS: dict[str, dict[str, Any]] = {
    "parallel.zero_stage": {"parallel.use_distributed_optimizer": False}, "optimizer.clip_grad": {},
    **{f"precision.{name}": {} for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")},
}  # fmt: skip
"""Fields that DeepSpeed's engine takes from its file while the flag of Megatron-DeepSpeed lies idle, so that stock
scripts contradict themselves in them: what the file says counts. With each, the flags that would say it again and their
value for "nothing said"."""


# fields whose value follows from another: (other field, its value or None for any, the value that follows or None for
# the same one)
_IMPLIED: dict[str, tuple[tuple[str, Any, Any], ...]] = {
    "parallel.zero_stage": (("parallel.use_distributed_optimizer", True, 1),),
    "parallel.zero3_fetch": (("parallel.stage3_use_all_reduce_for_fetch_params", True, "all_reduce"),),
    "precision.bf16": (("precision.fp16", True, False), ("precision.fp64", True, False)),
    "precision.fp16": (("precision.bf16", True, False), ("precision.fp64", True, False)),
    "optimizer.weight_decay": (
        ("optimizer.start_weight_decay", None, None),
        ("optimizer.end_weight_decay", None, None),
    ),
}


def _told(name: str, config: Config, given: Given) -> Iterator[tuple[Any, str]]:
    """Yield the values already given for a field, directly or through a flag that implies it, each with its place for
    messages.
    """
    for other, needed, says in ((name, None, None), *_IMPLIED.get(name, ())):
        group, _, attribute = other.partition(".")
        value = _value(config, other)
        if (group, attribute) in given and needed in (None, value):
            where = given[group, attribute]
            # a key's place includes its value
            plain = where.endswith(")") or (where.startswith("--") and isinstance(value, bool))
            yield (value if says is None else says), where if plain else f"{where} ({value})"


def _value(config: Config, name: str) -> Any:
    group, _, attribute = name.partition(".")
    return getattr(getattr(config, group), attribute)


def _batch_sizes(found: DeepSpeedConfig, config: Config, given: Given, world_size: int) -> list[str]:
    """Apply DeepSpeed's rule train_batch_size = micro-batch * accumulation * data-parallel ranks, computing the missing
    one.
    """
    batch, parallel, steps = config.batch, config.parallel, found.accumulation
    ranks = parallel.replica_size
    if ranks < 1 or world_size % ranks or batch.micro_batch_size < 1:
        return []  # config/rules.py reports this
    dp = world_size // ranks
    changes = (
        "--rampup-batch-size"
        if batch.rampup_batch_size
        else "--step-batch-size-schedule"
        if batch.step_batch_size_schedule
        else None
    )
    if steps is not None and changes:
        return [
            f"{found.name}: gradient_accumulation_steps ({steps}) is constant, and {changes} changes the batch size:"
            ' drop one of them, or write "auto" in the file'
        ]
    total = batch.global_batch_size
    if total is None:
        batch.global_batch_size = None if steps is None else batch.micro_batch_size * steps * dp
        return []
    where = given.get(("batch", "global_batch_size"), "--global-batch-size")
    said = where if where.startswith(f"{found.name}: ") else f"{where} ({total})"
    if ("batch", "micro_batch_size") not in given and where.startswith(f"{found.name}: "):
        parts = dp * (steps or 1)
        if total < 1 or total % parts:
            return [
                f"{said} must be a multiple of gradient_accumulation_steps * data-parallel size ({steps or 1} * {dp}"
                f" = {parts}): change it, or give --micro-batch-size"
            ]
        batch.micro_batch_size = total // parts
    elif steps is not None and batch.micro_batch_size * steps * dp != total:
        return [
            f"{found.name}: gradient_accumulation_steps ({steps}) contradicts {said}: micro-batch * accumulation * data-parallel size ="
            f' {batch.micro_batch_size} * {steps} * {dp} = {batch.micro_batch_size * steps * dp}; write "auto" for one of them, or make'
            " them agree"
        ]
    return []
