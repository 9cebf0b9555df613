"""Metadata that makes a configuration dataclass field a flag: help, unit, aliases, and bounds of its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

MAX_COUNT = 10**15
"""Largest integer where a field names no bound of its own: products of two still fit into 128 bits, sums into 64."""
MAX_NUMBER = 1e30
"""Largest number where a field names no bound of its own."""


@dataclass(frozen=True)
class Condition:
    """Condition under which a run reads a field."""

    needs: str  # what must be there, as behind the word "with" or "without"
    holds: Callable[[Any], bool]  # returns whether a ``Config`` has it
    why: str = ""  # reason for the line about a field without it (default: from ``needs``)
    of_model: bool = False  # it looks at the model, which may have to be read from a checkpoint first
    keeps: bool = False  # a field without it keeps its value, for checkpoints to be compared with

    @property
    def reason(self) -> str:
        """Why a field has no effect without it."""
        return self.why or f"without {self.needs} it has no effect"


def described(item: Field[Any]) -> str:
    """Return the meaning of a flag, after what it needs to have an effect."""
    needs = " and ".join(condition.needs for condition in item.metadata["only"])
    return f"with {needs}: {item.metadata['help']}" if needs else str(item.metadata["help"])


def flag(
    default: Any, help: str, *, unit: str = "", aliases: tuple[str, ...] = (), low: float | None = None, high: float | None = None,
    alone: int | str | None = None, path: bool = False, only: Condition | tuple[Condition, ...] = (),
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
        only: the run reads it only under these conditions; --help says so in front of ``help``.
    """
    conditions = (only,) if isinstance(only, Condition) else only
    metadata = {
        "help": help, "unit": unit, "aliases": aliases, "low": low, "high": high, "alone": alone, "path": path, "only": conditions,
    }  # fmt: skip
    return field(default=default, metadata=metadata)
