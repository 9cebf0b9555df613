"""Choice of kernels as a run makes it (--fused-kernels): which are there, and computing with them for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from first_light.records import NotThereError
from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
from megatron_sp.ops.kernels.launch import using_triton
from megatron_sp.ops.norm import NormSpec

KERNELS = ("torch", "triton", "apex")
"""Values of --fused-kernels that name somebody's kernels."""


def require(
    kernel: str, device: torch.device, dtype: torch.dtype, norm: NormSpec | None = None, adamw: bool = False
) -> None:
    """Raise NotThereError, with the reason, unless the kernels can be used here."""
    try:
        # elementwise operations of ours are in models with norms of ours
        given = norm or (NormSpec("RMSNorm", 1e-5) if kernel == "triton" else None)
        choose_fused_kernels(kernel, KernelUse(device, dtype, adamw=adamw, norm=given))
    except RuntimeError as error:
        raise NotThereError(str(error).partition(". Use ")[0]) from None


def available(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Return those of torch and triton that can be used; triton is what a run takes by default where it is there."""
    try:
        require("triton", device, dtype)
    except NotThereError:
        return ["torch"]
    return ["torch", "triton"]


@contextlib.contextmanager
def using(kernel: str) -> Iterator[None]:
    """Compute elementwise operations and norms with these kernels; apex's norms are chosen by their spec."""
    with using_triton(kernel == "triton"):
        yield
