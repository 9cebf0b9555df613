"""A schedule as data: one record per line, in the order in which the lines were written. Nothing here touches a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_HERE = os.path.dirname(os.path.dirname(__file__))


@dataclass(frozen=True)
class Directive:
    """One line of a schedule.

    Attributes:
        on: glob of the modules.
        do: the action: shard, column, row, sync, vocab_parallel, sum_gradients, checkpoint, replace, rng, set,
            annotate, hook, sequence, ulysses, context, zero.
        args: arguments of the action; JSON values, except what only code can provide (functions, modules).
        where: file and line of the call that added it, for messages.
        derived: names of arguments that were not given, but measured by ``verify()`` or implied by another line
            (``head_counts.py``).
    """

    on: str
    do: str
    args: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    derived: tuple[str, ...] = ()

    @property
    def needs_code(self) -> bool:
        """True if an argument cannot be written to a file (a function, a module)."""
        return any(not is_plain(value) for value in self.args.values())

    def __str__(self) -> str:
        words = ", ".join(f"{name}={_shown(value)}" for name, value in self.args.items())
        return f"{self.on or '(the model)'}: {self.do}({words})"


def is_plain(value: Any) -> bool:
    """Return whether a value is a JSON value."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__) if isinstance(value, Callable) else repr(value)  # type: ignore[arg-type]


def caller() -> str:
    """Return file:line of the first frame outside of ``megatron_sp.schedule``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename).startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
