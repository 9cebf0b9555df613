"""Names of flags: which field each of ours sets, what is known of other programs' names, and what a mistyped one was meant as."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from megatron_sp.config.field_kinds import FieldKind, field_kinds
from megatron_sp.config.flags import ignored_flags as dialect
from megatron_sp.config.flags.config_file import canonical
from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.schema import GROUPS

DEEPSPEED_FILE = ("deepspeed-config", "deepscale-config")
SPECIAL = (
    "preset", "config", "print-config", "dry-run", "world-size", "help", "profile-steps", "load-tag", *DEEPSPEED_FILE, *HELD,
    *dialect.GROUP_FILES,
)  # fmt: skip
ANY = -1  # number of values: as many as follow
_LIKENESS = 0.8  # of a name that has no effect here, where 0.6 does for one of ours


class Target(NamedTuple):
    """The field that a flag name sets."""

    group: str
    name: str
    kind: FieldKind
    negated: bool = False


@cache
def targets() -> dict[str, Target]:
    """Return all flag names that set a field, including aliases and negated switches."""
    table: dict[str, Target] = {}
    for group, cls in GROUPS.items():
        kinds = field_kinds(cls)
        for item in dataclasses.fields(cls):
            kind = kinds[item.name]
            for spelling in (item.name, *item.metadata["aliases"]):
                name = canonical(spelling)
                names = [(name, False), (_negation(name), True)] if kind.base == "bool" else [(name, False)]
                for each, negated in names:
                    if table.setdefault(each, Target(group, item.name, kind, negated))[:2] != (group, item.name):
                        raise AssertionError(f"--{each} is the spelling of two fields")
    return table


def _negation(name: str) -> str:
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def refusal(name: str) -> str | None:
    """Return why a flag of another program is not supported; None if it is not among those."""
    why = dialect.REFUSED.get(name) or _of_family(name, dialect.REFUSED_PREFIXES)
    if why is not None or _is_accepted(name):
        return why
    from megatron_sp.config.flags.upstream_names import UPSTREAM

    if name in UPSTREAM:
        return "a flag of Megatron's or DeepSpeed's that has no counterpart here"
    return None


def idleness(name: str) -> str | None:
    """Return why a flag of another program is accepted without effect; None if it is not among those."""
    known = dialect.IGNORED_SWITCHES.get(name) or dialect.IGNORED_VALUES.get(name)
    return known or (None if name in dialect.REFUSED else _of_family(name, dialect.IGNORED_PREFIXES))


def _of_family(name: str, prefixes: dict[str, str]) -> str | None:
    return next((why for start, why in prefixes.items() if name.startswith(start)), None)


def _is_accepted(name: str) -> bool:
    return name in targets() or name in dialect.REWRITTEN or name in SPECIAL or idleness(name) is not None


def arity(name: str) -> int:
    """Return how many words a flag takes; ``ANY``: as many as follow."""
    if name in targets():
        kind = targets()[name].kind
        return 0 if kind.base == "bool" else ANY if kind.many else 1
    if name in dialect.REWRITTEN:
        return int(dialect.REWRITTEN[name].takes_value)
    if name in dialect.IGNORED_VALUES:
        return ANY if name in dialect.IGNORED_LISTS else 1
    if name in dialect.IGNORED_SWITCHES or name in ("help", "print-config"):
        return 0
    if name in HELD:
        return HELD[name][0]
    return 1 if name in SPECIAL else ANY  # a refused or unknown flag takes its words with it, so they are not reported as well


@cache
def offered() -> tuple[str, ...]:
    """Return every flag name that is accepted, our own first."""
    tables = (targets(), SPECIAL, dialect.REWRITTEN, dialect.IGNORED_SWITCHES, dialect.IGNORED_VALUES)
    return tuple(name for table in tables for name in table)


def meant_by(name: str) -> list[str]:
    """Return up to three flags that an unknown name may be meant as; all of them are accepted."""
    if name in dialect.SYNONYMS:
        return [dialect.SYNONYMS[name]]
    return nearest(name, offered())


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that ``name`` is a beginning of, then similar ones; fields of ours are preferred."""
    names = list(names)
    begun = [other for other in names if len(name) >= 3 and other.startswith(name)]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    scores = [difflib.SequenceMatcher(None, name, other).ratio() for other in alike]
    close = [
        other for other, score in zip(alike, scores, strict=True)
        if score > max(scores) - 0.12 and (score >= _LIKENESS or other in targets())
    ]  # fmt: skip
    own = [other for other in dict.fromkeys(begun + close) if other in targets()]
    return (own or list(dict.fromkeys(begun + close)))[:3]
