"""Choice and launch of Triton's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.kernels import direct

DEVICE = "cuda"  # type of the device that the kernels run on; under Triton's interpreter tests set it to the CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192  # elements of a row that a program holds in registers; it loops over wider ones

_in_use = False  # by this process (--fused-kernels): an operation, its backward and its recomputation must agree


@dataclass(slots=True)
class Launch:
    """A kernel ready to be queued."""

    kernel: Any  # a function that ``triton.jit`` has decorated
    grid: tuple[int, ...]  # programs along each axis; none of them is 0
    arguments: Sequence[Any]  # tensors and numbers, in order
    reads: Sequence[Tensor]  # of the tensors; one changed in place is also in ``writes``
    writes: Sequence[Tensor]
    constants: dict[str, Any] = field(default_factory=dict)  # compile-time arguments
    warps: int = 4
    stages: int | None = None  # steps of a loop whose operands are on their way at a time; None: Triton's default

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def options(self) -> dict[str, Any]:
        # products and sums are not contracted: a sum of products is rounded as in the plain form, on every chip alike
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return options if self.stages is None else {**options, "num_stages": self.stages}


def _run(launch: Launch) -> None:
    direct.run(launch.kernel, launch.grid, launch.arguments, launch.constants, launch.options)


launcher: Callable[[Launch], None] = _run  # what launches kernels


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], *, reads: Sequence[Tensor], writes: Sequence[Tensor],
    warps: int = 4, stages: int | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel; see ``Launch``."""
    launcher(Launch(kernel, grid, arguments, reads, writes, constants, warps, stages))


def use_triton(yes: bool) -> None:
    """Compute with Triton's kernels from now on, or with plain torch."""
    global _in_use
    _in_use = yes


@contextlib.contextmanager
def using_triton(yes: bool = True) -> Iterator[None]:
    """Compute with Triton's kernels, or without, for a while."""
    before = _in_use
    use_triton(yes)
    try:
        yield
    finally:
        use_triton(before)


def is_fused(x: Tensor) -> bool:
    """Return whether Triton computes an operation on x."""
    return _in_use and x.device.type == DEVICE and x.dtype in DTYPES and x.numel() > 0


def is_fused_on(device: torch.device) -> bool:
    """Return whether Triton's kernels are in use on a device."""
    return _in_use and device.type == DEVICE


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def warps_of(elements: int) -> int:
    # of a program that works on so many elements at a time: 16 for each thread
    return min(max(elements // 512, 4), 16)
