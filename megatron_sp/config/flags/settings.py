"""Settings: flags as they were given on the command line or in a YAML file, and the configuration that they fill."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.config.fields import FieldKind, field_kinds
from megatron_sp.config.schema import FIELDS, GROUPS, Config
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import read_text

OWN_SPECIAL = {"preset": 1, "config": 1, "print-config": 0, "dry-run": 1, "world-size": 1, "help": 0}
"""Flags of ours that set no field, and their number of words."""
TOKEN_FLAGS = ("train-tokens", "lr-decay-tokens", "lr-warmup-tokens")
"""Lengths in tokens, which are turned into samples or steps wherever that is possible."""
ANY = -1  # number of words: as many as follow
MAX_FILE_BYTES = 256 * 1024  # a whole configuration takes 5 KB, a blend of a thousand data sets fits as well
_MAX_DEPTH = 5  # group, flag, list; two more, so that deeper nesting gets a message of its own
_TAG = "tag:yaml.org,2002:"
_SCALARS = ("str", "int", "float", "bool", "null", "timestamp")
VALUE_SPELLINGS: dict[str, dict[str, str]] = {
    "tokenizer-type": {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "HFTokenizer": "HuggingFaceTokenizer", "PretrainedFromHF": "HuggingFaceTokenizer",
        "Llama3Tokenizer": "HuggingFaceTokenizer",
    },
    "position-embedding-type": {"absolute": "learned_absolute", "rotary": "rope"},
    "optimizer": {"adamw": "adam", "fusedadamw": "adam"},
    # nccl2: other code of torch's, same numbers
    "distributed-backend": {"ccl": "auto", "hccl": "auto", "mccl": "auto", "nccl2": "nccl"},
}  # fmt: skip
"""Values that other projects spell differently, by flag."""


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
    """Return a flag's name, without leading dashes and with hyphens."""
    return spelling.removeprefix("--").replace("_", "-")


@cache
def targets() -> dict[str, Target]:
    """Return all flag names that set a field, including aliases and negated switches."""
    table: dict[str, Target] = {}
    for (group, field_name), item in FIELDS.items():
        kind = field_kinds(GROUPS[group])[field_name]
        for name in map(canonical, (field_name, *item.metadata["aliases"])):
            opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
            for spelling, negated in ((name, False), (opposite, True))[: 2 if kind.base == "bool" else 1]:
                if table.setdefault(spelling, Target(group, field_name, kind, negated))[:2] != (group, field_name):
                    raise AssertionError(f"--{spelling} is the spelling of two fields")
    return table


@cache
def foreign_tables() -> dict[str, dict[str, str]]:
    """Return the sections of ``foreign_flags.txt``: by title, the reason of each name."""
    tables: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    reason, is_whole = "", True
    for line in Path(__file__).with_name("foreign_flags.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = tables[line.strip("[]")] = {}
        elif line.startswith(" "):
            names.update(dict.fromkeys(line.split(), reason))
            is_whole = True
        elif line and not line.startswith("#"):
            reason = line if is_whole else f"{reason} {line}"
            is_whole = False
    return tables


# ------------------------------------------------------------------------------------------------------------ a draft


@dataclass
class Draft:
    """A configuration that is being filled in, and what is known of the settings that could not be read."""

    config: Config
    problems: list[str]  # everything that is wrong so far; one error lists it all
    meant: set[tuple[str, str]] = field(default_factory=set)  # fields that were given in a way that cannot be read
    perhaps: set[tuple[str, str]] = field(default_factory=set)  # fields that may have been meant
    unread: set[str] = field(default_factory=set)  # names of the settings that could not be read

    def attempt(self, setting: Setting, handle: Callable[[Setting], None]) -> None:
        """Call ``handle`` for a setting, and note what is wrong with it."""
        try:
            handle(setting)
        except ValueError as error:
            known = foreign_tables()["values"].get(f"{setting.name}={''.join(setting.words[:1])}")
            more = f" (a value of Megatron's that is not supported yet: {known})" if known else ""
            self.problems.append(f"{setting.where}: {error}{more}")
            self.unread.add(setting.name)
            if setting.name in targets():
                self.meant.add(targets()[setting.name][:2])

    def assign(self, setting: Setting) -> None:
        """Set the field of one of our flags. Raises ValueError."""
        target = targets()[setting.name]
        self.config.set(target.group, target.name, _value(setting, target), setting.where)
        self.meant.discard((target.group, target.name))  # the last one counts


def fields_of_groups(*groups: str) -> set[tuple[str, str]]:
    """Return the fields of groups of flags, as (group, name)."""
    return {(group, item.name) for group in groups for item in dataclasses.fields(GROUPS[group])}


def is_on(words: tuple[str, ...]) -> bool:
    """Return whether a switch is on, as it is without a value."""
    return not words or FieldKind("bool").parse(words)


def _value(setting: Setting, target: Target) -> Any:
    words, name = setting.words, target.name
    alone = FIELDS[target.group, name].metadata["alone"]
    if alone is not None and not words:
        return alone
    if name == "profile" and words and words[0] in ("pt", "pt-full"):
        words = ()
    if target.kind.base == "bool":
        return is_on(words) != target.negated
    is_window = name == "window_size" and len(words) == 1
    pair = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", words[0]) if is_window else None
    if pair is not None:  # Megatron's window, the keys before and after a token's own: as the number of visible keys
        if int(pair[1]) < 0 or int(pair[2]) != 0:
            rule = "no token sees later ones; leave this out to see all earlier ones"
            raise ValueError(f"expected N tokens, or Megatron's N-1,0, got '{words[0][:40]}': {rule}")
        words = (str(int(pair[1]) + 1),)
    if name in ("split", "moe_layer_freq"):
        words = tuple(word.strip("'\" ") for word in words)  # some shells leave the quotes in the value
    try:
        return target.kind.parse(words)
    except ValueError:
        ours = {theirs.lower(): word for theirs, word in VALUE_SPELLINGS.get(setting.name, {}).items()}
        return target.kind.parse([ours.get(word.lower(), word) for word in words])


# -------------------------------------------------------------------------------------------------------- a YAML file


def read_config_file(path: str) -> list[Setting]:
    """Read the settings of a YAML file; empty values (``null``, ``[]``) keep the default.

    Keys are flag names with ``-`` or ``_``, flat or under the name of their group. Raises ConfigError.
    """
    import yaml

    # It is parsed into nodes only and never constructed into objects, so a tag such as ``!!python/object`` is rejected
    # as mere text; words keep their spelling in the file (1e-4 is a number here, though YAML 1.1 calls it a string),
    # and every message can name its line.
    text = read_text(path, f"--config {path}", MAX_FILE_BYTES, "a file of flags")
    try:
        # composing deeply nested YAML would take seconds; events are read one by one, so this stops early
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                rule = "flags are flat or under the name of their group"
                raise ConfigError(f"--config {path}: nested too deeply; {rule}")
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}{line}: not YAML: {getattr(error, 'problem', '')}") from None
    empty = root is None or (root.id == "scalar" and root.tag == _TAG + "null")
    return [] if empty else list(_settings(root, os.path.basename(path)))


def _settings(node: Any, file: str, group: str = "") -> Iterator[Setting]:
    def line(node: Any) -> str:
        return f"{file} line {node.start_mark.line + 1}"

    def is_word(node: Any) -> bool:
        return node.id == "scalar" and node.tag.removeprefix(_TAG) in _SCALARS

    if node.id != "mapping" or node.tag != _TAG + "map":
        raise ConfigError(f"{line(node)}: expected lines of 'flag: value'{f' under {group}' if group else ''}")
    seen: set[str] = set()
    for key, value in node.value:
        if not is_word(key):
            raise ConfigError(f"{line(key)}: expected the name of a flag")
        flag = canonical(key.value)
        if flag in seen:
            raise ConfigError(f"{line(key)}: {key.value} is given twice")
        seen.add(flag)
        if value.id == "mapping" and not group:
            if key.value not in GROUPS:
                groups = f"the groups are {', '.join(GROUPS)}"
                raise ConfigError(f"{line(key)}: {key.value} is not a group of flags; {groups}")
            yield from _settings(value, file, key.value)
            continue
        items = value.value if value.id == "sequence" and value.tag == _TAG + "seq" else [value]
        for item in items:
            if not is_word(item):
                kinds = "a word, a number, true, false, or a list of these"
                raise ConfigError(f"{line(item)}: the value of {key.value} must be {kinds}")
        words = tuple(item.value for item in items if item.tag != _TAG + "null")
        if words:
            yield Setting(flag, words, f"{line(key)}: {key.value}")
