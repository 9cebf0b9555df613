"""Rules of a command line that could not be read in full: what is wrong with it whatever the unreadable values were
meant to be.

A value that is no number, a mistyped name or a number out of range leaves a field *open*. The rules between fields are
then tried with several values for it, and a violation counts if all of them have it, to the letter: whoever corrects a
typo is told of everything else at once, and of nothing that only follows from the typo.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.fields import FieldKind, field_kinds
from megatron_sp.config.rules import normalize, out_of_range, violations
from megatron_sp.config.schema import GROUPS, Config

Field = tuple[str, str]
_WHOLE = (1, 2, 3, 8)  # small: some rules go through the ranks and the stages one by one
_REAL = (0.01, 0.5, 1.0, 100.0)
_WORLDS = (1, 2, 3, 48)


@dataclass
class OpenFields:
    """Fields, as (group, name), of which the command line does not say the value in a readable way."""

    meant: set[Field] = field(default_factory=set)  # they were given, so they have some value other than "nothing"
    # they may have been meant, or will be given instead of something that is refused
    perhaps: set[Field] = field(default_factory=set)
    world_size: bool = False  # the number of processes is unknown, too


def certain_violations(config: Config, world_size: int, unread: OpenFields) -> list[str]:
    """Return a message for each violated rule that stays violated whatever values the open fields are given.

    Args:
        config: what could be read, not normalised; it is not modified.
        unread: the fields that are open; those whose value is out of range are found here.
    """
    bounds = out_of_range(normalize(copy.deepcopy(config)))
    meant = unread.meant | bounds.keys()
    if not (meant or unread.perhaps or unread.world_size):
        return violations(normalize(copy.deepcopy(config)), world_size)
    common: list[str] | None = None
    for number in range(1 + len(_WHOLE)):
        trial = copy.deepcopy(config)
        for group, name in meant | unread.perhaps:
            if number > 0 or (group, name) in meant:  # the first trial is without what only may have been meant
                setattr(getattr(trial, group), name, _stand_in(group, name, number))
        found = violations(normalize(trial), _WORLDS[number % len(_WORLDS)] if unread.world_size else world_size)
        common = found if common is None else [text for text in common if text in found]
        if not common:
            break
    return [text for texts in bounds.values() for text in texts] + (common or [])


def _stand_in(group: str, name: str, number: int) -> Any:
    # the field's ``number``-th plausible value: it is within the field's own bounds
    about = GROUPS[group].__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    kind = field_kinds(GROUPS[group])[name]
    one = _one(kind, number, about["low"], about["high"])
    return (one,) * (1, 3)[number % 2] if kind.many else one


def _one(kind: FieldKind, number: int, low: float | None, high: float | None) -> Any:
    if kind.base == "choice":
        return kind.choices[number % len(kind.choices)]
    if kind.base == "bool":
        return bool(number % 2)
    if kind.base == "str":
        return "xy"[number % 2]  # a message that quotes it is not in all trials
    value = _WHOLE[number % len(_WHOLE)] if kind.base == "int" else _REAL[number % len(_REAL)]
    value = value if low is None else max(value, low)
    value = value if high is None else min(value, high)
    return int(value) if kind.base == "int" else float(value)
