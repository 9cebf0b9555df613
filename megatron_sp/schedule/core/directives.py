"""A schedule as data: its lines, the globs by which they name modules, and the axes of ranks."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups
from megatron_sp.utils.errors import ConfigError

AXES = ("dp", "cp", "sp", "tp")
AXES_OF_LINES = ("dp", "sp", "tp")  # over which a line may communicate by itself; cp is that of context() alone


@dataclass(frozen=True)
class Directive:
    """One line of a schedule."""

    on: str  # glob of the modules; "": the model itself
    # shard, column, row, sync, vocab_parallel, sum_gradients, checkpoint, replace, rng, set, annotate, hook, sequence,
    # ulysses, context or zero
    do: str
    # JSON values, or what only code can provide (functions, modules)
    args: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # file and line of the call that added it, for messages
    derived: tuple[str, ...] = ()  # arguments that were measured by verify(), or implied by another line

    def __str__(self) -> str:
        shown = {k: getattr(v, "__name__", type(v).__name__) if callable(v) else repr(v) for k, v in self.args.items()}
        return f"{self.on or '(the model)'}: {self.do}({', '.join(f'{name}={value}' for name, value in shown.items())})"


def caller() -> str:
    """Return file:line of the first frame outside of ``megatron_sp.schedule``."""
    here = os.path.dirname(os.path.dirname(__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename).startswith(here):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class PathError(ConfigError):
    """A glob matches no module."""


def expand(model: nn.Module, glob: str) -> list[str]:
    """Return the paths of all modules that a glob matches, in the model's order. Raises PathError: there are none."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    pattern = re.compile(_regex(glob))
    if matches := [path for path in paths if pattern.fullmatch(path)]:
        return matches
    tokens = _split_at_dots(glob)
    for length in range(len(tokens) - 1, -1, -1):  # the longest beginning of the glob that names something
        pattern = re.compile(_regex(".".join(tokens[:length])))
        if parents := [path for path in paths if pattern.fullmatch(path)]:
            break
    prefix = f"{parents[0]}." if parents[0] else ""
    inside = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
    children = list(dict.fromkeys(name for name in inside if name and "." not in name))
    near = difflib.get_close_matches(tokens[length], children, 3, 0.5)
    there = f"{', '.join(children[:12]) or 'no modules inside'}{', ...' if len(children) > 12 else ''}"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    has = f"{parents[0] or 'the model'} has {there}{hint}"
    raise PathError(f"{glob!r} names no module: there is no {tokens[length]!r}, {has} (E1)")


def _split_at_dots(glob: str) -> list[str]:
    return re.split(r"\.(?![^{}]*\})", glob)  # a brace is one token, whatever it contains


def _regex(glob: str) -> str:
    patterns = []
    for token in _split_at_dots(glob):
        pattern = r"[^.]+(?:\.[^.]+)*" if token == "**" else ""
        parts = [] if pattern else re.split(r"\{([^}]*)\}", token)  # outside and inside of braces, in turn
        for i, part in enumerate(parts):
            if i % 2:
                pattern += f"(?:{'|'.join(map(_regex, part.split(',')))})"
            else:
                pattern += re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
        patterns.append(pattern)
    return r"\.".join(patterns)


@dataclass(frozen=True)
class _ImaginedGroup:
    ranks: int
    place: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True)
class Mesh:
    """Process groups along the axes over which a schedule may split a model."""

    tp: Group = field(default=SINGLE_RANK)
    sp: Group = field(default=SINGLE_RANK)
    dp: Group = field(default=SINGLE_RANK)
    dp_sp: Group = field(default=SINGLE_RANK)  # dp, cp and sp together: all ranks that have the same parameters
    world: Group = field(default=SINGLE_RANK)
    cp: Group = field(default=SINGLE_RANK)

    @classmethod
    def of(cls, groups: ParallelGroups) -> Mesh:
        """Create the mesh of a job from its process groups."""
        return cls(groups.tp, groups.sp, groups.dp, groups.dp_cp_sp, groups.world, groups.cp)

    @classmethod
    def sizes(cls, tp: int = 1, sp: int = 1, dp: int = 1, *, cp: int = 1, tp_rank: int = 0) -> Mesh:
        """Create a mesh without a job: a schedule on it can be checked and shown, but not run."""
        for name, size in (("tp", tp), ("sp", sp), ("dp", dp), ("cp", cp)):
            if size < 1:
                raise ConfigError(f"{name} ({size}) must be at least 1")
        same = dp * cp * sp
        sizes = ((tp, tp_rank), (sp, 0), (dp, 0), (same, 0), (same * tp, 0), (cp, 0))
        return cls(*(SINGLE_RANK if n == 1 else cast(Group, _ImaginedGroup(n, rank)) for n, rank in sizes))

    def group(self, axis: str) -> Group:
        """Return the group of an axis."""
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis!r}: the axes are {', '.join(AXES)}")
        return cast(Group, getattr(self, axis))

    @property
    def is_imagined(self) -> bool:
        return any(isinstance(self.group(axis), _ImaginedGroup) for axis in AXES)

    @property
    def replicas(self) -> tuple[Group, ...]:
        """Groups over which, one after another, gradients are summed."""
        apart = self.dp.size() * self.cp.size() * self.sp.size()
        return (self.dp_sp,) if self.dp_sp.size() == apart else (self.dp, self.cp, self.sp)

    def __str__(self) -> str:
        shown = [axis for axis in reversed(AXES) if axis != "cp" or self.cp.size() > 1]
        return ", ".join(f"{axis} {self.group(axis).size()}" for axis in shown)
