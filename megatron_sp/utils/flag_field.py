"""How a field of a configuration dataclass says that it is a flag: help, unit, other spellings, and the bounds of its value."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MAX_COUNT = 10**15
"""Largest integer where a field names no bound of its own: products of two still fit into 128 bits, sums into 64."""
MAX_NUMBER = 1e30
"""Largest number where a field names no bound of its own."""


def flag(
    default: Any, help: str, *, unit: str = "", aliases: tuple[str, ...] = (), low: float | None = None, high: float | None = None,
    alone: int | None = None, path: bool = False,
) -> Any:  # fmt: skip
    """A dataclass field that becomes a flag.

    Args:
        help: one line for --help; a default that is worked out from other fields is described here.
        unit: shown in --help and in docs/flags.md.
        aliases: other spellings, without dashes in front.
        low: the smallest value allowed.
        high: the largest (default: ``MAX_COUNT``, or ``MAX_NUMBER`` of a float): far above what anybody trains, and low enough that no
            arithmetic with it overflows or takes long.
        alone: the value when the flag stands without one.
        path: of a file, or the beginning of one.
    """
    metadata = {"help": help, "unit": unit, "aliases": aliases, "low": low, "high": high, "alone": alone, "path": path}
    return field(default=default, metadata=metadata)
