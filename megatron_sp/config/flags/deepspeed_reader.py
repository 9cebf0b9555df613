"""Reader of a DeepSpeed JSON, and what handles keys of common kinds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.fields import field_kinds
from megatron_sp.config.flags.deepspeed_config import Claim, DeepSpeedConfig
from megatron_sp.config.schema import GROUPS


def short(value: Any) -> str:
    """Format a JSON value on one line of at most 60 characters."""
    text = "".join(c if c.isprintable() else "?" for c in json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:57] + "..."


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    return value in (None, False, 0, "auto", "none")


Handler = Callable[["Reader", str, Any], None]


@dataclass(frozen=True)
class Keys:
    """Keys of a block."""

    handlers: Mapping[str, Handler]  # keys with a meaning, and their handlers
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # unsupported keys -> what to use instead


class Reader:
    """Reader that walks through a file and collects its contents."""

    def __init__(self, name: str) -> None:
        self.found = DeepSpeedConfig(name)

    def block(self, data: dict[str, Any], path: str, keys: Keys) -> None:
        """Process all keys of an object."""
        for key, value in data.items():
            place = f"{path}.{key}" if path else key
            if key in keys.handlers:
                if value is not None and value != "auto":
                    keys.handlers[key](self, place, value)
            elif key in keys.refused:
                if _is_off(value):
                    self.found.ignored.append(place)
                else:
                    self.refuse(place, value, keys.refused[key])
            elif key in keys.ignored:
                self.found.ignored.append(place)
            else:
                self._unknown(key, place, keys)

    def _unknown(self, key: str, place: str, keys: Keys) -> None:
        known = [*keys.handlers, *keys.refused, *keys.ignored]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            self.problem(f"{printable(place)} is unknown: did you mean {near[0]}?")
        else:
            self.found.unknown.append(printable(place))

    def problem(self, text: str) -> None:
        self.found.problems.append(f"{self.found.name}: {text}")

    def refuse(self, place: str, value: Any, instead: str) -> None:
        self.problem(f"{place} ({short(value)}) is not supported: {instead}")

    def where(self, place: str, value: Any, means: str = "") -> str:
        return f"{self.found.name}: {place} ({short(value)}{f', which is {means}' if means else ''})"

    def object(self, place: str, value: Any) -> dict[str, Any]:
        """Return ``value`` if it is an object; else record a problem and return an empty one."""
        if isinstance(value, dict):
            return value
        self.problem(f"{place}: expected an object {{...}}, got {short(value)}")
        return {}

    def flag(self, place: str, value: Any) -> bool | None:
        """Return ``value`` if it is a boolean; else None, recording a problem unless it is null or "auto"."""
        if isinstance(value, bool) or value is None or value == "auto":
            return value if isinstance(value, bool) else None
        self.problem(f'{place}: expected true, false or "auto", got {short(value)}')
        return None

    def claim(
        self,
        target: str,
        place: str,
        value: Any,
        *,
        needs: tuple[str, Any] | None = None,
        means: str = "",
        shown: Any = None,
    ) -> None:
        """Record ``value`` for our field ``target``, or a problem if its type or range is wrong."""
        group, _, name = target.partition(".")
        if isinstance(value, float) and value.is_integer() and field_kinds(GROUPS[group])[name].base == "int":
            value = int(value)  # 1e3 is how JSON writes many integers
        shown = value if shown is None else shown
        try:
            ours = None if value is None else field_kinds(GROUPS[group])[name].coerce(value)
        except (ValueError, OverflowError) as error:
            self.problem(f"{place}: {error}")
            return
        low = GROUPS[group].__dataclass_fields__[name].metadata["low"]  # type: ignore[attr-defined]
        if low is not None and ours is not None and ours < low:
            self.problem(f"{place} ({short(shown)}) must be at least {low:g}")
            return
        self.found.claims.append(Claim(target, ours, self.where(place, shown, means), needs=needs))

    def default(self, target: str, value: Any, *, needs: tuple[str, Any] | None = None) -> None:
        """Record DeepSpeed's default for our field ``target``."""
        self.found.claims.append(Claim(target, value, self.found.name, weak=True, needs=needs))


def printable(text: str) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= 80 else line[:77] + "..."


def words(text: str) -> tuple[str, ...]:
    """Return the keys of a list that is written as text."""
    return tuple(text.split())


def sets(target: str, *, needs: tuple[str, Any] | None = None) -> Handler:
    """Return a handler for a key that corresponds to one of our fields."""
    return lambda reader, place, value: reader.claim(target, place, value, needs=needs)


def block_of(keys: Keys) -> Handler:
    return lambda reader, place, value: reader.block(reader.object(place, value), place, keys)


def must_be(wanted: Any, instead: str) -> Handler:
    """Return a handler for a key of which only one value is supported."""

    def judge(reader: Reader, place: str, value: Any) -> None:
        if value == wanted:
            reader.found.ignored.append(place)
        else:
            reader.refuse(place, value, instead)

    return judge


def if_on(handle: Handler) -> Handler:
    """Return a handler that calls ``handle`` for a block whose own "enabled" is true; missing, it is false, as in
    DeepSpeed.
    """

    def judge(reader: Reader, place: str, value: Any) -> None:
        block = reader.object(place, value)
        if reader.flag(f"{place}.enabled", block.get("enabled")):
            handle(reader, place, block)
        else:
            reader.found.ignored.append(place)

    return judge


def refusing(instead: str) -> Handler:
    return lambda reader, place, value: reader.refuse(place, value, instead)


def inside(keys: Keys) -> Handler:
    """Return a handler for a block that is on, which reads what is in it beside that."""
    return lambda reader, place, value: reader.block({k: v for k, v in value.items() if k != "enabled"}, place, keys)
