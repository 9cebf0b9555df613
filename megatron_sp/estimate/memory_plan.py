"""Memory plan of a rank as data: kinds of tensors, moments of a step, and the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Device = Literal["cpu", "cuda"]

_MIB = 2**20


@dataclass(frozen=True)
class Line:
    """One kind of tensor: its name and the bytes of all its tensors."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a step, in addition to the resident memory.

    Attributes:
        phase: forward, backward or update.
        name: place within the phase.
    """

    phase: Literal["forward", "backward", "update"]
    name: str
    lines: tuple[Line, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Memory that is taken at this moment beside what stays."""
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank in bytes.

    Attributes:
        stays: resident memory, held for the whole run.
        moments: the moments of a step that can be the peak.
        host: bytes of offloaded activations in host memory (on a CPU also in ``stays``); from ``plan_of`` on a GPU also
            of a save's copy.
        optimizer_host: bytes of master weights, optimizer state and copies in a GPU's host memory (--offload-optimizer).
        is_captured: steps are captured in graphs (--cuda-graphs), whose memory nothing else uses.
    """

    stays: tuple[Line, ...]
    moments: tuple[Moment, ...]
    host: int = 0
    optimizer_host: int = 0
    is_captured: bool = False

    @property
    def resident(self) -> int:
        """Memory that stays for the whole run."""
        return sum(line.num_bytes for line in self.stays)

    @cached_property
    def worst(self) -> Moment:
        """Moment that takes the most."""
        return max(self.moments, key=lambda m: m.num_bytes)

    @property
    def peak(self) -> int:
        """Largest memory of a rank at any moment."""
        return self.resident + self.worst.num_bytes

    @property
    def graphs(self) -> int:
        """Bytes of the pool of captured steps, which are part of the peak: all that a step allocates."""
        return self.worst.num_bytes if self.is_captured else 0

    def peak_of(self, phase: str) -> int:
        """Return the peak within a phase: forward, backward or update."""
        return self.resident + max(m.num_bytes for m in self.moments if m.phase == phase)

    def text(self) -> str:
        """Return a table in MiB, one line per kind of tensor: the resident memory and that of the peak."""
        rows = [("stays", self.stays), (f"at the peak: {self.worst.phase}, {self.worst.name}", self.worst.lines)]
        made = []
        for title, lines in rows:
            made.append(f"{title}: {sum(line.num_bytes for line in lines) / _MIB:.2f} MiB")
            made += [f"  {line.num_bytes / _MIB:10.2f}  {line.name}" for line in lines if line.num_bytes]
        if self.graphs:
            made.append(f"in the pool of captured steps, which nothing else uses: {self.graphs / _MIB:.2f} MiB of it")
        return "\n".join([*made, f"peak: {self.peak / _MIB:.2f} MiB"])

    def as_dict(self) -> dict[str, Any]:
        """Plan for ``--dry-run json``."""
        return {
            "resident": self.resident, "peak": self.peak, "host": self.host, "optimizer_host": self.optimizer_host,
            "graphs": self.graphs,
            "phases": {p: self.peak_of(p) for p in ("forward", "backward", "update")},
            "stays": {line.name: line.num_bytes for line in self.stays},
            "worst": {"phase": self.worst.phase, "name": self.worst.name, **{line.name: line.num_bytes for line in self.worst.lines}},
        }  # fmt: skip


def total(lines: Sequence[Line]) -> int:
    """Return the bytes of all lines."""
    return sum(line.num_bytes for line in lines)


def merged(lines: Sequence[Line]) -> list[Line]:
    """Merge lines of the same name."""
    names = list(dict.fromkeys(line.name for line in lines))
    return [Line(name, sum(line.num_bytes for line in lines if line.name == name)) for name in names]
