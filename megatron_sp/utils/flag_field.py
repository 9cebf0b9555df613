"""Metadata that makes a configuration dataclass field a flag: help, unit, aliases, and bounds of its value."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MAX_COUNT = 10**15
"""Largest integer where a field names no bound of its own: products of two still fit into 128 bits, sums into 64."""
MAX_NUMBER = 1e30
"""Largest number where a field names no bound of its own."""


def flag(
    default: Any, help: str, *, unit: str = "", aliases: tuple[str, ...] = (), low: float | None = None, high: float | None = None,
    alone: int | str | None = None, path: bool = False,
) -> Any:  # fmt: skip
    """Create a dataclass field that becomes a flag.

    Args:
        help: one line for --help; also describes a default that is computed from other fields.
        unit: shown in --help and in docs/reference/flags.md.
        aliases: other names of the flag, without leading dashes.
        low: the smallest value allowed.
        high: the largest value allowed (default: ``MAX_COUNT``, or ``MAX_NUMBER`` for a float): far above any real use,
            and low enough that no arithmetic with it overflows or takes long.
        alone: the value if the flag is given without one.
        path: the value is a file's path, or a prefix of one.
    """
    metadata = {"help": help, "unit": unit, "aliases": aliases, "low": low, "high": high, "alone": alone, "path": path}
    return field(default=default, metadata=metadata)
