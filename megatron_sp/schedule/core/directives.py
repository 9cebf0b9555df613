"""A schedule as data: one record per line, in the order in which the lines were written. Nothing here touches a model."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron_sp.utils.errors import ConfigError

_HERE = os.path.dirname(os.path.dirname(__file__))


@dataclass(frozen=True)
class Directive:
    """One line of a schedule."""

    on: str
    # the action: shard, column, row, sync, vocab_parallel, sum_gradients, checkpoint, replace, rng, set, annotate,
    # hook, sequence, ulysses, context, zero
    do: str
    # arguments of the action; JSON values, except what only code can provide (functions, modules)
    args: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # file and line of the call that added it, for messages
    # names of arguments that were not given, but measured by ``verify()`` or implied by another line
    # (``head_counts.py``)
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


class PathError(ConfigError):
    """A glob matches no module."""


def expand(model: nn.Module, glob: str) -> list[str]:
    """Return the paths of all modules that a glob matches, in the model's order; "" is the model itself.

    Raises:
        PathError: no match; reports how far the glob matches, which modules are there, and similar names.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    pattern = re.compile(_regex(glob))
    found = [path for path in paths if pattern.fullmatch(path)]
    if not found:
        raise PathError(_explain(paths, glob))
    return found


def _tokens(glob: str) -> list[str]:
    # split a glob at its dots; a brace is one token, whatever it contains
    return re.split(r"\.(?![^{}]*\})", glob)


def _regex(glob: str) -> str:
    return r"\.".join(map(_token_regex, _tokens(glob)))


def _token_regex(token: str) -> str:
    if token == "**":
        return r"[^.]+(?:\.[^.]+)*"
    parts = re.split(r"\{([^}]*)\}", token)  # outside and inside of braces, in turn
    return "".join(
        f"(?:{'|'.join(map(_regex, part.split(',')))})" if i % 2 else _names(part) for i, part in enumerate(parts)
    )


def _names(text: str) -> str:
    return re.escape(text).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")


def _explain(paths: Iterable[str], glob: str) -> str:
    known = list(paths)
    tokens = _tokens(glob)
    for length in range(len(tokens) - 1, -1, -1):
        prefix = ".".join(tokens[:length])
        pattern = re.compile(_regex(prefix))
        parents = [path for path in known if pattern.fullmatch(path)]
        if parents:
            break
    children = list(
        dict.fromkeys(_child(path, parent) for parent in parents[:1] for path in known if _child(path, parent))
    )
    near = difflib.get_close_matches(tokens[length], children, 3, 0.5)
    where = f"{parents[0] or 'the model'} has {', '.join(children[:12]) or 'no modules inside'}{', ...' if len(children) > 12 else ''}"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{glob!r} names no module: there is no {tokens[length]!r}, {where}{hint} (E1)"


def _child(path: str, parent: str) -> str:
    # the name of a module directly inside ``parent``, or "" if it is not
    inside = path[len(parent) + 1 :] if parent and path.startswith(parent + ".") else path if not parent else ""
    return inside if inside and "." not in inside else ""
