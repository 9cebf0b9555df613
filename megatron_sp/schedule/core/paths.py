"""Module selection by glob: ``model.layers.*.mlp.{gate,up}_proj``. ``*`` matches within one name, ``**`` one or more names between dots."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from megatron_sp.utils.errors import ConfigError


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
    """Split a glob at its dots; a brace is one token, whatever it contains."""
    return re.split(r"\.(?![^{}]*\})", glob)


def _regex(glob: str) -> str:
    return r"\.".join(map(_token_regex, _tokens(glob)))


def _token_regex(token: str) -> str:
    if token == "**":
        return r"[^.]+(?:\.[^.]+)*"
    parts = re.split(r"\{([^}]*)\}", token)  # outside and inside of braces, in turn
    return "".join(f"(?:{'|'.join(map(_regex, part.split(',')))})" if i % 2 else _names(part) for i, part in enumerate(parts))


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
    children = list(dict.fromkeys(_child(path, parent) for parent in parents[:1] for path in known if _child(path, parent)))
    near = difflib.get_close_matches(tokens[length], children, 3, 0.5)
    where = f"{parents[0] or 'the model'} has {', '.join(children[:12]) or 'no modules inside'}{', ...' if len(children) > 12 else ''}"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{glob!r} names no module: there is no {tokens[length]!r}, {where}{hint} (E1)"


def _child(path: str, parent: str) -> str:
    """Return the name of a module directly inside ``parent``, or "" if it is not."""
    inside = path[len(parent) + 1 :] if parent and path.startswith(parent + ".") else path if not parent else ""
    return inside if inside and "." not in inside else ""
