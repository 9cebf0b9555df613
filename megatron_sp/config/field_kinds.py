"""Types of configuration fields, and conversion of text or JSON to their values.

The command line, YAML files and ``state.json`` all use ``FieldKind``, so a value means the same in all of them. Only
the types that occur in ``config/schema.py`` are supported: int, float, str, bool, ``Literal`` of strings, each possibly
``| None``, an int or ``Literal["auto"]``, and ``tuple[int, ...]`` or ``tuple[str, ...]``. Neither torch nor numpy is
imported.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_sp.utils.flag_field import MAX_COUNT

_WORDS = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")


@dataclass(frozen=True)
class FieldKind:
    """Type of one field."""

    base: str  # ``int``, ``float``, ``str``, ``bool`` or ``choice``
    optional: bool = False  # None is allowed
    many: bool = False  # a tuple of ``base``, written as several words
    choices: tuple[str, ...] = ()  # the words allowed if ``base`` is ``choice``
    word: str = ""  # a word allowed instead of a value of ``base``, such as "auto"; "" if there is none

    @property
    def metavar(self) -> str:
        """Placeholder of the value in --help."""
        one = (
            "{" + ",".join(self.choices) + "}"
            if self.choices
            else self.base.upper() + (f"|{self.word}" if self.word else "")
        )
        return f"{one} [{one} ...]" if self.many else one

    @property
    def expected(self) -> str:
        """Description of the expected value, for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return (
            {"int": "one or more integers", "str": "one or more texts"}[self.base]
            if self.many
            else _WORDS[self.base] + (f" or {self.word}" if self.word else "")
        )

    def parse(self, words: Sequence[str]) -> Any:
        """Convert words of a command line or YAML file to a value.

        Raises:
            ValueError: the words are not a valid value; the message has what was expected.
        """
        if self.many:
            # "16 16 1000" in one pair of quotes is meant as three numbers, and so is "[16 16 1000]"
            if self.base == "int":
                words = [
                    part
                    for word in words
                    for part in word.removeprefix("[").removesuffix("]").replace(",", " ").split()
                ]
            if not words:
                raise ValueError(f"expected {self.expected}, got nothing")
            return tuple(self._parse_word(word) for word in words)
        if len(words) != 1:
            raise ValueError(f"expected {self.expected}, got {'nothing' if not words else ' '.join(words[:4])}")
        return self._parse_word(words[0])

    def coerce(self, value: Any) -> Any:
        """Check a value read from JSON and convert it to its exact type (list to tuple, int to float).

        Raises:
            ValueError: the value has another type.
        """
        if value is None and self.optional:
            return None
        if self.many and isinstance(value, (list, tuple)):
            return tuple(self._coerce_one(item) for item in value)
        return self._coerce_one(value) if not self.many else self._refuse(value)

    def _parse_word(self, word: str) -> Any:
        if not word.strip():
            raise ValueError(f"expected {self.expected}, got an empty text (an unset shell variable?)")
        if self.base == "choice":
            return self._choose(word)
        if self.word and word.strip().lower() == self.word:
            return self.word
        if self.base == "bool":
            if word.lower() not in (*_TRUE, *_FALSE):
                raise ValueError(f"expected true or false, got '{_short(word)}'")
            return word.lower() in _TRUE
        if self.base == "str":
            return word
        return _integer(word, self.word) if self.base == "int" else _number(word)

    def _choose(self, word: str) -> str:
        for choice in self.choices:
            # Megatron-DeepSpeed writes rmsnorm where Megatron-LM writes RMSNorm
            if choice.lower() == word.strip().lower():
                return choice
        raise ValueError(f"expected {self.expected}, got '{_short(word)}'")

    def _coerce_one(self, value: Any) -> Any:
        if self.base == "choice" and isinstance(value, str):
            return self._choose(value)
        if self.word and value == self.word:
            return value
        if self.base == "float" and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if type(value).__name__ == self.base != "float":  # exact: True is not an integer here
            return value
        return self._refuse(value)

    def _refuse(self, value: Any) -> Any:
        raise ValueError(f"expected {self.expected}, got {type(value).__name__} {_short(repr(value))}")


def _integer(word: str, other: str = "") -> int:
    try:
        return int(word)
    except ValueError:
        pass
    hint = ""
    try:
        value = float(word)
        hint = f": write {int(value)}" if value == int(value) and abs(value) <= MAX_COUNT else ""
    except (ValueError, OverflowError):
        pass
    wanted = f"an integer or {other}" if other else "an integer"
    raise ValueError(f"expected {wanted}, got '{_short(word)}'{hint}")


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"expected a number, got '{_short(word)}'") from None
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got '{_short(word)}'")
    return value


def _short(text: str) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= 60 else line[:57] + "..."


@cache
def field_kinds(cls: type) -> dict[str, FieldKind]:
    """Return the kind of every field of a configuration dataclass, by name."""
    return {name: _kind(hint) for name, hint in typing.get_type_hints(cls).items()}


def _kind(hint: Any) -> FieldKind:
    optional, word = False, ""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        optional = True
        hint, *words = (part for part in typing.get_args(hint) if part is not type(None))
        for literal in words:
            (word,) = typing.get_args(literal)
    if typing.get_origin(hint) is typing.Literal:
        return FieldKind("choice", optional, choices=typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return FieldKind(typing.get_args(hint)[0].__name__, optional, many=True)
    return FieldKind(hint.__name__, optional, word=word)
