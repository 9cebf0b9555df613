"""A plan of memory as data: kinds of tensors, the moments of a step, what is the worst of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

_MIB = 2**20


@dataclass(frozen=True)
class Line:
    """One kind of tensors: what they are, and how many bytes."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """What exists at one moment of a step, beside what stays.

    Attributes:
        phase: forward, backward or update.
        name: where in the phase.
    """

    phase: Literal["forward", "backward", "update"]
    name: str
    lines: tuple[Line, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank.

    Attributes:
        stays: lives from start to end.
        moments: the worst one of each kind.
        host: bytes in host memory instead (--offload-activations).
    """

    stays: tuple[Line, ...]
    moments: tuple[Moment, ...]
    host: int = 0

    @property
    def resident(self) -> int:
        return sum(line.num_bytes for line in self.stays)

    @cached_property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda m: m.num_bytes)

    @property
    def peak(self) -> int:
        return self.resident + self.worst.num_bytes

    def peak_of(self, phase: str) -> int:
        """Peak within forward, backward or update."""
        return self.resident + max(m.num_bytes for m in self.moments if m.phase == phase)

    def text(self) -> str:
        """A line per kind, in MiB, at the worst moment."""
        rows = [("stays", self.stays), (f"at the peak: {self.worst.phase}, {self.worst.name}", self.worst.lines)]
        made = []
        for title, lines in rows:
            made.append(f"{title}: {sum(line.num_bytes for line in lines) / _MIB:.2f} MiB")
            made += [f"  {line.num_bytes / _MIB:10.2f}  {line.name}" for line in lines if line.num_bytes]
        return "\n".join([*made, f"peak: {self.peak / _MIB:.2f} MiB"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "resident": self.resident, "peak": self.peak, "host": self.host,
            "phases": {p: self.peak_of(p) for p in ("forward", "backward", "update")},
            "stays": {line.name: line.num_bytes for line in self.stays},
            "worst": {"phase": self.worst.phase, "name": self.worst.name, **{line.name: line.num_bytes for line in self.worst.lines}},
        }  # fmt: skip


def total(lines: Sequence[Line]) -> int:
    """Bytes of all lines."""
    return sum(line.num_bytes for line in lines)


def merged(lines: Sequence[Line]) -> list[Line]:
    """One line for each name."""
    names = list(dict.fromkeys(line.name for line in lines))
    return [Line(name, sum(line.num_bytes for line in lines if line.name == name)) for name in names]
