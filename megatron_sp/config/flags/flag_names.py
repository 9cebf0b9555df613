"""Names of our flags, and the field that each sets."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import NamedTuple

from megatron_sp.config.fields import FieldKind, field_kinds
from megatron_sp.config.schema import GROUPS

OWN_SPECIAL = {"preset": 1, "config": 1, "print-config": 0, "dry-run": 1, "world-size": 1, "help": 0}
"""Flags of ours that set no field, and their number of words."""
TOKEN_FLAGS = ("train-tokens", "lr-decay-tokens", "lr-warmup-tokens")
"""Lengths in tokens, which are turned into samples or steps wherever that is possible."""
ANY = -1  # number of words: as many as follow


class Setting(NamedTuple):
    """One flag as it was given on the command line or in a file."""

    name: str  # hyphens, no dashes in front
    words: tuple[str, ...]  # its value; empty for a switch on the command line
    where: str  # for messages: "--lr", or "run.yaml line 3: lr"


class Target(NamedTuple):
    """The field that a flag name sets."""

    group: str
    name: str
    kind: FieldKind
    negated: bool = False


def canonical(spelling: str) -> str:
    """Return the name of a flag without leading dashes and with hyphens."""
    return spelling.removeprefix("--").replace("_", "-")


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
                negation = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
                for each, negated in [(name, False), (negation, True)] if kind.base == "bool" else [(name, False)]:
                    if table.setdefault(each, Target(group, item.name, kind, negated))[:2] != (group, item.name):
                        raise AssertionError(f"--{each} is the spelling of two fields")
    return table
