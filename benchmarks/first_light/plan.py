"""The parts: in which order, and for how long each at most. What tells most comes first, so that ten minutes are useful."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from first_light.records import Context


@dataclass(frozen=True)
class Part:
    """One part of the hour.

    Attributes:
        name: on the command line and in the report.
        title: in the page.
        function: ``module:function`` in ``first_light.parts``.
        limit_s: after so long it is ended, and counts as failed.
        least_s: with less time left it is not begun.
        is_for_gpus: left out on a CPU, where another part has tried the same code with the same tiny shapes.
    """

    name: str
    title: str
    function: str
    limit_s: float
    least_s: float = 10.0
    is_for_gpus: bool = False

    def load(self) -> Callable[[Context], None]:
        """Import the part's function."""
        module, _, name = self.function.partition(":")
        found: Callable[[Context], None] = getattr(importlib.import_module(f"first_light.parts.{module}"), name)
        return found


PARTS = (
    Part("doctor", "The machine", "doctor:run", 90),
    Part("steps", "A training step of each family and mode, against the CPU", "steps:run", 300, 20),
    Part("kernels", "Kernels: what they compute, and how fast with a cold L2 cache", "kernels:run", 240, 20),
    Part("experts", "Experts: products one after another, and as one", "experts:run", 120, 20),
    Part("speed", "A step's MFU against the planner's prediction", "speed:run_small", 180, 30),
    Part("replay-1b-64k", "One rank of sp 8: 1B parameters, 64K tokens", "replay:run_1b_64k", 240, 40),
    Part("memory", "Memory of a step against the closed form", "memory_peak:run", 150, 20),
    Part("attention", "Attention kernels", "attention:run", 240, 30),
    Part("timeline", "A time line: what exchanges hide behind", "timeline:run", 150, 20),
    Part("collectives", "NCCL on all GPUs", "collectives:run", 240, 30),
    Part("replay-7b-16k", "One rank of sp 8: 7B parameters, 16K tokens", "replay:run_7b_16k", 240, 40, True),
    Part("gpu-tests", "tests/gpu", "gpu_tests:run", 900, 60),
    Part(
        "kernels-compiled",
        "The chains of the kernels by torch.compile, Liger and others",
        "kernels:run_others",
        420,
        30,
    ),
    Part("speed-large", "MFU and prediction for 1.3 B parameters", "speed:run_large", 240, 40, True),
)


def parts_for(device: str) -> list[Part]:
    """Return the parts of a device, cpu or cuda, in order."""
    return [part for part in PARTS if device == "cuda" or not part.is_for_gpus]
