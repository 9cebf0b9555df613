"""DeepSpeed's JSON (``--deepspeed_config FILE``): its values become part of the configuration.

``deepspeed_keys.py`` defines the meaning of each key. A value that is also given on the command line or in ``--config``
must agree: DeepSpeed never compared its JSON with the flags, and one of the two was silently ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

from megatron_sp.config.fields import field_kinds, shorten
from megatron_sp.config.schema import FIELDS, GROUPS, Config

_SHOWN = 60  # most keys that the note about ignored ones names


class Claim(NamedTuple):
    """A value in the file for one of our fields."""

    field: str
    value: Any
    where: str  # for messages, such as "ds.json: zero_optimization.stage (2)"
    weak: bool = False  # a default of DeepSpeed, which applies if no value is given and contradicts none
    needs: tuple[str, Any] | None = None  # (field, value), a condition without which it does not apply


Handler = Callable[["DeepSpeedFile", str, Any], None]
Meaning = Union[str, tuple[str, tuple[str, Any]], "Keys", Handler]
"""One of our fields, with a condition without which it does not apply; a block; or a handler of its own."""


@dataclass(frozen=True)
class Keys:
    """Keys of a block."""

    meanings: Mapping[str, Meaning]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # unsupported keys -> what to use instead


def show(value: Any) -> str:
    """Format a JSON value on one line of at most 60 characters."""
    return shorten(json.dumps(value, ensure_ascii=False))


@dataclass
class DeepSpeedFile:
    """Contents of a file, collected while its blocks are read."""

    name: str  # name of the file, for messages
    claims: list[Claim] = field(default_factory=list)
    accumulation: int | None = None  # micro-batches per step; there is no such flag, it follows from the batch sizes
    ignored: list[str] = field(default_factory=list)  # paths of keys
    unknown: list[str] = field(default_factory=list)  # paths of keys
    problems: list[str] = field(default_factory=list)
    # what is said twice, and DeepSpeed reads in one of the two places alone: a line for each place that does not count
    overruled: list[str] = field(default_factory=list)

    def note(self) -> str | None:
        """Return one line that lists all ignored keys; None if there are none."""
        parts = []
        for paths, why in ((self.ignored, "DeepSpeed's own tuning, without a meaning here"), (self.unknown, "unknown")):
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            parts += [f"{', '.join(paths[:_SHOWN])}{more} ({why})"] if paths else []
        return f"{self.name}: {'; '.join(parts)}" if parts else None

    def block(self, data: dict[str, Any], path: str, keys: Keys) -> None:
        """Process all keys of an object."""
        for key, value in data.items():
            place = f"{path}.{key}" if path else key
            if key in keys.meanings:
                meaning = keys.meanings[key]
                if value is None or value == "auto":
                    continue
                if isinstance(meaning, str):
                    self.claim(meaning, place, value)
                elif isinstance(meaning, tuple):
                    self.claim(meaning[0], place, value, needs=meaning[1])
                elif isinstance(meaning, Keys):
                    self.block(self.object(place, value), place, meaning)
                else:
                    meaning(self, place, value)
            elif key in keys.refused and not _is_off(value):
                self.refuse(place, value, keys.refused[key])
            elif key in keys.refused or key in keys.ignored:
                self.ignored.append(place)
            else:
                known = [*keys.meanings, *keys.refused, *keys.ignored]
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
                if near:
                    self.problem(f"{shorten(place, 80)} is unknown: did you mean {near[0]}?")
                else:
                    self.unknown.append(shorten(place, 80))

    def problem(self, text: str) -> None:
        """Record what is wrong."""
        self.problems.append(f"{self.name}: {text}")

    def refuse(self, place: str, value: Any, instead: str) -> None:
        """Record a value that is not supported."""
        self.problem(f"{place} ({show(value)}) is not supported: {instead}")

    def where(self, place: str, value: Any, means: str = "") -> str:
        """Return a key's place for messages."""
        return f"{self.name}: {place} ({show(value)}{f', which is {means}' if means else ''})"

    def object(self, place: str, value: Any) -> dict[str, Any]:
        """Return ``value`` if it is an object; else record a problem and return an empty one."""
        if isinstance(value, dict):
            return value
        self.problem(f"{place}: expected an object {{...}}, got {show(value)}")
        return {}

    def switch(self, place: str, value: Any) -> bool | None:
        """Return a boolean; else None, recording a problem unless it is null or "auto"."""
        if isinstance(value, bool) or value is None or value == "auto":
            return value if isinstance(value, bool) else None
        self.problem(f'{place}: expected true, false or "auto", got {show(value)}')
        return None

    # fmt: off
    def claim(self, target: str, place: str, value: Any, *, needs: tuple[str, Any] | None = None, means: str = "",
              shown: Any = None) -> None:
        """Record ``value`` for our field ``target``, or a problem if its type or range is wrong."""
        # fmt: on
        group, _, name = target.partition(".")
        kind, low = field_kinds(GROUPS[group])[name], FIELDS[group, name].metadata["low"]
        if isinstance(value, float) and value.is_integer() and kind.base == "int":
            value = int(value)  # 1e3 is how JSON writes many integers
        shown = value if shown is None else shown
        try:
            ours = None if value is None else kind.coerce(value)
        except (ValueError, OverflowError) as error:
            self.problem(f"{place}: {error}")
            return
        if low is not None and ours is not None and ours < low:
            self.problem(f"{place} ({show(shown)}) must be at least {low:g}")
            return
        self.claims.append(Claim(target, ours, self.where(place, shown, means), needs=needs))

    def default(self, target: str, value: Any, *, needs: tuple[str, Any] | None = None) -> None:
        """Record DeepSpeed's default for our field ``target``."""
        self.claims.append(Claim(target, value, self.name, weak=True, needs=needs))


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    return value in (None, False, 0, "auto", "none")


# ----------------------------------------------------------------------------------------- the file and the other flags

# Fields that DeepSpeed's engine takes from its file while the flag of Megatron-DeepSpeed lies idle, so that stock
# scripts contradict themselves in them: what the file says counts. With each, the flags that would say it again and
# their value for "nothing said".
_FILE_COUNTS: dict[str, dict[str, Any]] = {
    "parallel.zero_stage": {"parallel.use_distributed_optimizer": False}, "optimizer.clip_grad": {},
    "precision.loss_scale": {}, "precision.initial_loss_scale": {}, "precision.min_loss_scale": {},
    "precision.loss_scale_window": {}, "precision.hysteresis": {},
}  # fmt: skip
# Fields whose value follows from another: (other field, its value or None for any, the value that follows or None for
# the same one).
_IMPLIED: dict[str, tuple[tuple[str, Any, Any], ...]] = {
    "parallel.zero_stage": (("parallel.use_distributed_optimizer", True, 1),),
    "parallel.zero3_fetch": (("parallel.stage3_use_all_reduce_for_fetch_params", True, "all_reduce"),),
    "precision.bf16": (("precision.fp16", True, False), ("precision.fp64", True, False)),
    "precision.fp16": (("precision.bf16", True, False), ("precision.fp64", True, False)),
    "optimizer.weight_decay": (
        ("optimizer.start_weight_decay", None, None), ("optimizer.end_weight_decay", None, None),
    ),
}  # fmt: skip


def reconcile(file: DeepSpeedFile, config: Config, world_size: int) -> list[str]:
    """Write the file's values into ``config``, which is neither normalised nor validated, and into its ``given``.

    Returns the file's problems, and contradictions between it and the command line.
    """
    problems = list(file.problems)
    # defaults last, dependent claims after the others
    for claim in sorted(file.claims, key=lambda c: (c.weak, c.needs is not None)):
        if claim.needs is not None and config.get(*claim.needs[0].split(".")) != claim.needs[1]:
            continue
        group, _, name = claim.field.partition(".")
        # the values already given for it, directly or through a flag that implies it, each with its place for messages
        given = []
        for source, needed, implied in ((claim.field, None, None), *_IMPLIED.get(claim.field, ())):
            source_group, _, source_name = source.partition(".")
            value, where = config.get(source_group, source_name), config.given.get((source_group, source_name))
            if where is not None and needed in (None, value):
                # a key's place includes its value
                plain = where.endswith(")") or (where.startswith("--") and isinstance(value, bool))
                given.append((value if implied is None else implied, where if plain else f"{where} ({value})"))
        others = [where for value, where in given if value != claim.value]
        if not given:
            config.set(group, name, claim.value, "" if claim.weak else claim.where)
        elif others and not claim.weak and claim.field in _FILE_COUNTS:
            for target, value in {claim.field: claim.value, **_FILE_COUNTS[claim.field]}.items():
                group, _, name = target.partition(".")
                config.set(group, name, value)
            why = f"DeepSpeed reads this from its file alone, and so it counts: {claim.where}"
            file.overruled.append(f"{others[0]} ({why})")
        elif others and not claim.weak:
            problems.append(f'{claim.where} contradicts {others[0]}: make them agree, or write "auto" in the file')
    return problems or _batch_sizes(file, config, world_size)


def _batch_sizes(file: DeepSpeedFile, config: Config, world_size: int) -> list[str]:
    # DeepSpeed's rule train_batch_size = micro-batch * accumulation * data-parallel ranks, computing the missing one
    batch, parallel, steps, given = config.batch, config.parallel, file.accumulation, config.given
    ranks = parallel.replica_size
    if ranks < 1 or world_size % ranks or batch.micro_batch_size < 1:
        return []  # config/rules.py reports this
    dp, accumulation = world_size // ranks, f"{file.name}: gradient_accumulation_steps ({steps})"
    if steps is not None and (batch.rampup_batch_size or batch.step_batch_size_schedule):
        flag = "--rampup-batch-size" if batch.rampup_batch_size else "--step-batch-size-schedule"
        rule = f"is constant, and {flag} changes the batch size"
        return [f'{accumulation} {rule}: drop one of them, or write "auto" in the file']
    total = batch.global_batch_size
    if total is None:
        batch.global_batch_size = None if steps is None else batch.micro_batch_size * steps * dp
        return []
    where = given.get(("batch", "global_batch_size"), "--global-batch-size")
    is_files = where.startswith(f"{file.name}: ")
    stated = where if is_files else f"{where} ({total})"
    if ("batch", "micro_batch_size") not in given and is_files:
        parts = dp * (steps or 1)
        if total < 1 or total % parts:
            product = f"gradient_accumulation_steps * data-parallel size ({steps or 1} * {dp} = {parts})"
            return [f"{stated} must be a multiple of {product}: change it, or give --micro-batch-size"]
        batch.micro_batch_size = total // parts
    elif steps is not None and batch.micro_batch_size * steps * dp != total:
        product = f"{batch.micro_batch_size} * {steps} * {dp} = {batch.micro_batch_size * steps * dp}"
        rule = f"micro-batch * accumulation * data-parallel size = {product}"
        return [f'{accumulation} contradicts {stated}: {rule}; write "auto" for one of them, or make them agree']
    return []
