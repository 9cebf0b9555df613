"""A configuration that is being filled in, setting by setting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.fields import FieldKind
from megatron_sp.config.flags.flag_names import Setting, Target, targets
from megatron_sp.config.schema import GROUPS, Config


@dataclass
class Draft:
    """A configuration, and what is known of the settings that could not be read."""

    config: Config
    problems: list[str]  # everything that is wrong so far; one error lists it all
    meant: set[tuple[str, str]] = field(default_factory=set)  # fields that were given in a way that cannot be read
    perhaps: set[tuple[str, str]] = field(default_factory=set)  # fields that may have been meant
    unread: set[str] = field(default_factory=set)  # names of the settings that could not be read

    def attempt(self, setting: Setting, handle: Callable[[Setting], None]) -> None:
        """Call ``handle`` for a setting; what is wrong with it is one of the draft's problems."""
        try:
            handle(setting)
        except ValueError as error:
            from megatron_sp.config.flags.foreign_names import GROUP_FILES, MEGATRON_CHOICES, REWRITTEN

            known = MEGATRON_CHOICES.get(setting.name, {}).get("".join(setting.words[:1]))
            more = f" (a value of Megatron's that is not supported yet: {known})" if known else ""
            self.problems.append(f"{setting.where}: {error}{more}")
            self.unread.add(setting.name)
            rewrite = REWRITTEN.get(setting.name)
            names = [flag for flag, _ in rewrite.to] if rewrite else [GROUP_FILES.get(setting.name, setting.name)]
            self.meant |= {targets()[name][:2] for name in names if name in targets()}

    def assign(self, setting: Setting) -> None:
        """Set the field of one of our flags. Raises ValueError: it cannot have this value."""
        target = targets()[setting.name]
        setattr(getattr(self.config, target.group), target.name, _value(setting, target))
        self.config.given[target.group, target.name] = setting.where
        self.meant.discard((target.group, target.name))  # the last one counts


def fields_of_groups(*groups: str) -> set[tuple[str, str]]:
    """Return the fields of groups of flags, as (group, name)."""
    return {(group, item.name) for group in groups for item in dataclasses.fields(GROUPS[group])}


def is_on(words: tuple[str, ...]) -> bool:
    """Return whether a switch is on: without a value it is; in a file its value is true or false."""
    return not words or FieldKind("bool").parse(words)


def _value(setting: Setting, target: Target) -> Any:
    words = setting.words
    alone = next(i.metadata["alone"] for i in dataclasses.fields(GROUPS[target.group]) if i.name == target.name)
    if alone is not None and not words:
        return alone
    if target.name == "profile" and words and words[0] in ("pt", "pt-full"):
        words = ()
    if target.kind.base == "bool":
        return is_on(words) != target.negated
    if target.name == "window_size" and len(words) == 1:
        words = (_one_window(words[0]),)
    if target.name in ("split", "moe_layer_freq"):
        words = tuple(word.strip("'\" ") for word in words)  # some shells leave the quotes in the value
    try:
        return target.kind.parse(words)
    except ValueError:
        from megatron_sp.config.flags.foreign_names import VALUE_SPELLINGS

        ours = {theirs.lower(): word for theirs, word in VALUE_SPELLINGS.get(setting.name, {}).items()}
        return target.kind.parse([ours.get(word.lower(), word) for word in words])


def _one_window(text: str) -> str:
    """Convert Megatron's window, the keys before and after a token's own such as "4095,0", to the number of visible
    keys.
    """
    pair = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if pair is None:
        return text
    before, behind = int(pair[1]), int(pair[2])
    if before < 0 or behind != 0:
        rule = "no token sees later ones; leave this out to see all earlier ones"
        raise ValueError(f"expected N tokens, or Megatron's N-1,0, got '{text[:40]}': {rule}")
    return str(before + 1)
