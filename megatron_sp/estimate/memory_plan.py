"""Memory plan of a rank as data: kinds of tensors, moments of a step, and the peak; and the workspaces of cuBLAS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

Device = Literal["cpu", "cuda"]
Phase = Literal["forward", "backward", "update"]

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = "workspaces of cuBLAS"
_KIB = 1024
_HANDLES = 2
_HOPPER, _HOPPER_BYTES = (9, 0), 32 * _KIB**2
_OTHER_BYTES = (2 * 4096 + 8 * 16) * _KIB  # ":4096:2:16:8"


class Line(NamedTuple):
    """One kind of tensor: its name and the bytes of all its tensors."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """Memory at one place of a phase, in addition to the resident memory."""

    phase: Phase
    name: str
    lines: tuple[Line, ...]

    @cached_property
    def num_bytes(self) -> int:
        # memory that is taken at this moment beside what stays
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank in bytes: what is held for the whole run, and the moments of a step that can be the peak."""

    stays: tuple[Line, ...]
    moments: tuple[Moment, ...]
    host: int = 0  # offloaded activations in host memory (on a CPU also in ``stays``); on a GPU also a save's copy
    optimizer_host: int = 0  # master weights, optimizer state and copies in a GPU's host memory (--offload-optimizer)
    is_captured: bool = False  # steps are captured in graphs (--cuda-graphs), whose memory nothing else uses

    @property
    def resident(self) -> int:
        # memory that stays for the whole run
        return sum(line.num_bytes for line in self.stays)

    @cached_property
    def worst(self) -> Moment:
        # moment that takes the most
        return max(self.moments, key=lambda m: m.num_bytes)

    @property
    def peak(self) -> int:
        # largest memory of a rank at any moment
        return self.resident + self.worst.num_bytes

    @property
    def graphs(self) -> int:
        # bytes of the pool of captured steps, which are part of the peak: all that a step allocates
        return self.worst.num_bytes if self.is_captured else 0

    def peak_of(self, phase: str) -> int:
        # peak within a phase
        return self.resident + max(m.num_bytes for m in self.moments if m.phase == phase)

    def as_dict(self) -> dict[str, Any]:
        worst = {"phase": self.worst.phase, "name": self.worst.name, **dict(self.worst.lines)}
        return {
            "resident": self.resident, "peak": self.peak, "host": self.host, "optimizer_host": self.optimizer_host,
            "graphs": self.graphs, "phases": {p: self.peak_of(p) for p in ("forward", "backward", "update")},
            "stays": dict(self.stays), "worst": worst,
        }  # fmt: skip


def cublas_workspaces(capability: tuple[int, int], setting: str = "") -> Line:
    """Return the bytes of a process's workspaces, which torch allocates beside all tensors, and which stay.

    ``setting`` is CUBLAS_WORKSPACE_CONFIG, which --deterministic-mode sets: pairs of KiB and a number, ":4096:8".
    """
    # There is one for each handle and stream (PyTorch: aten/src/ATen/cuda/CublasHandlePool.cpp ::
    # parseChosenWorkspaceSize). A handle belongs to a thread: the program has one and so has autograd, which runs the
    # backward pass, and both launch products on the compute stream. cublasLt works in the same memory.
    pairs = re.findall(r":([0-9]+):([0-9]+)", setting)
    default = _HOPPER_BYTES if capability == _HOPPER else _OTHER_BYTES
    each = sum(int(size) * int(count) for size, count in pairs) * _KIB if pairs else default
    return Line(CUBLAS_WORKSPACES, _HANDLES * each)
