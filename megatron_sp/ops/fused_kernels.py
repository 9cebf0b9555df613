"""Whose fused kernels compute AdamW and the norms (--fused-kernels): torch's, or NVIDIA apex's where they are found.

    --fused-kernels    AdamW (fp32 state on a GPU)    RMSNorm    LayerNorm in fp32    LayerNorm in 16 bits    fp64, on the host, on a CPU
    auto               apex                           apex       apex                 torch                   torch
    apex               apex                           apex       apex                 apex                    an error
    torch              torch                          torch      torch                torch                   torch

auto means apex where apex is found and nothing is lost by it: torch's LayerNorm is one kernel too, and rounds a 16-bit
result once where apex's rounds three times; RMSNorm with --apply-layernorm-1p would round 1 + weight to 16 bits. With
--deterministic-mode auto means torch, which vouches for its own kernels only; apex's use no atomics and repeat to the
last bit as well, and may be asked for.

Before a kernel of apex's is used it computes a small example here: builds for another GPU or another torch fail at
that, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.adamw import AdamStep, adamw_
from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward

FusedKernelName = Literal["torch", "apex"]
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the examples: some roundings of results of about 1


@dataclass(frozen=True)
class FusedKernel:
    """Whose kernel computes an op, and why."""

    op: str
    name: FusedKernelName
    reason: str


@dataclass(frozen=True)
class FusedKernels:
    """Chosen kernels: one for AdamW (None with another optimizer), one for the norms (None for a model without norms of ours)."""

    adamw: FusedKernel | None
    norm: FusedKernel | None

    @property
    def chosen(self) -> list[FusedKernel]:
        """Kernels of the ops that this run has."""
        return [kernel for kernel in (self.adamw, self.norm) if kernel is not None]

    def describe(self) -> str:
        """Return the choice and its reasons in a line; ops with the same answer share it."""
        ops: dict[tuple[str, str], list[str]] = {}
        for kernel in self.chosen:
            ops.setdefault((kernel.name, kernel.reason), []).append(kernel.op)
        return ", ".join(f"{' and '.join(names)} by {name} ({reason})" for (name, reason), names in ops.items())

    def agreed(self, of_ranks: Sequence[Sequence[tuple[str, str]]]) -> FusedKernels:
        """Return the choice of all ranks: torch where any of them needs it, since copies of a parameter must stay equal to the last bit.

        Args:
            of_ranks: (name, reason) of each of ``chosen``, by rank.
        """
        agreed: dict[str, FusedKernel] = {}
        for index, kernel in enumerate(self.chosen):
            others = [(rank, choices[index][1]) for rank, choices in enumerate(of_ranks) if choices[index][0] == "torch"]
            why = f"rank {others[0][0]}: {others[0][1]}" if others else ""
            agreed[kernel.op] = FusedKernel(kernel.op, "torch", why) if others and kernel.name == "apex" else kernel
        return FusedKernels(*(None if kernel is None else agreed[kernel.op] for kernel in (self.adamw, self.norm)))


@dataclass(frozen=True)
class KernelUse:
    """Purpose of fused kernels in a run: device, dtype and the ops that have some.

    Attributes:
        device: device of the model.
        dtype: dtype of its parameters.
        adamw: the optimizer is AdamW.
        offload: its state is in host memory (--offload-optimizer).
        norm: the model's norm, if it has one of ours.
        deterministic: --deterministic-mode.
    """

    device: torch.device
    dtype: torch.dtype
    adamw: bool = True
    offload: bool = False
    norm: NormSpec | None = None
    deterministic: bool = False


def choose_fused_kernels(asked: str, use: KernelUse) -> FusedKernels:
    """Choose the kernels for --fused-kernels.

    Args:
        asked: auto, torch or apex; with torch nothing of apex's is imported.
    Raises:
        RuntimeError: apex was asked for and cannot be used.
    """
    adamw = _Candidate(
        "AdamW", "amp_C", cannot="with --offload-optimizer the update runs on the host" if use.offload else "", better_not="",
        example=_adamw_example,
    )  # fmt: skip
    norm = _Candidate(use.norm.kind, "fused_layer_norm_cuda", "", _norm_doubt(use.norm, use.dtype), _norm_example) if use.norm else None
    return FusedKernels(_choose(asked, use, adamw) if use.adamw else None, _choose(asked, use, norm) if norm else None)


@dataclass(frozen=True)
class _Candidate:
    """Kernel of apex's for an op: its extension module, why it cannot run here, why auto does not take it, and its example."""

    op: str
    extension: str
    cannot: str
    better_not: str
    example: Callable[[KernelUse], float]


def _choose(asked: str, use: KernelUse, apex: _Candidate) -> FusedKernel:
    if asked == "torch":
        return FusedKernel(apex.op, "torch", "asked for")
    lack = apex.cannot or _lack(use, apex.extension)
    if not lack and asked == "auto":
        lack = apex.better_not or ("--deterministic-mode takes torch's kernels, for which torch vouches" if use.deterministic else "")
    lack = lack or _trial(apex.example, apex.op, replace(use, offload=False, deterministic=False))
    if not lack:
        return FusedKernel(apex.op, "apex", "asked for" if asked == "apex" else "found")
    if asked == "apex":
        raise RuntimeError(
            f"--fused-kernels apex cannot be used for {apex.op}: {lack}. Use --fused-kernels auto, which takes torch's kernels where"
            " apex's cannot run, or build NVIDIA's apex from its repository with its C++ and CUDA extensions (see `megatron-sp doctor`)"
        )
    return FusedKernel(apex.op, "torch", f"apex not used: {lack}")


def _lack(use: KernelUse, extension: str) -> str:
    if use.device.type != availability.APEX_DEVICE:
        return "it needs a GPU"
    if use.dtype not in _TOLERANCE:
        return f"it computes in fp32, not in {str(use.dtype).removeprefix('torch.')}"
    return availability.find(extension).reason


def _norm_doubt(norm: NormSpec, dtype: torch.dtype) -> str:
    """Return what a 16-bit norm of apex's would lose; empty if nothing."""
    if dtype == torch.float32:
        return ""
    if norm.kind == "LayerNorm":
        return "torch's LayerNorm is one kernel too, and rounds a 16-bit result once, apex's three times"
    return "with --apply-layernorm-1p it rounds 1 + weight to 16 bits" if norm.zero_centered else ""


@cache
def _trial(example: Callable[[KernelUse], float], op: str, use: KernelUse) -> str:
    """Return what goes wrong with a small example on the device; empty if apex's result is torch's."""
    try:
        error = example(use)
    except Exception as failure:  # foreign code: the run goes on without it, or ends with this reason
        return f"its {op} fails here: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    tolerance = _TOLERANCE[torch.float32 if op == "AdamW" else use.dtype]
    return "" if error <= tolerance else f"its {op} is wrong here: an example differs from torch's result by {error:.2g}"


def _wave(*shape: int, use: KernelUse, dtype: torch.dtype, phase: float) -> Tensor:
    """Return numbers of about 1 with either sign, without drawing from a generator."""
    return torch.sin(torch.arange(1, 1 + torch.Size(shape).numel(), device=use.device) * 1.7 + phase).view(shape).to(dtype)


def _difference(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    return max(float((g - w).abs().max() / w.abs().max()) for g, w in pairs)


def _adamw_example(use: KernelUse) -> float:
    step = AdamStep(count=3, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1)
    names: tuple[FusedKernelName, ...] = ("apex", "torch")
    results = []
    for name in names:
        params, grads, exp_avg, exp_avg_sq = (_wave(70, use=use, dtype=torch.float32, phase=i) for i in range(4))
        adamw_(params, grads, exp_avg, exp_avg_sq.square_(), step, name)
        results.append([params, exp_avg, exp_avg_sq])
    return _difference(*results)


def _norm_example(use: KernelUse) -> float:
    assert use.norm is not None
    x, grad, add = (_wave(6, 5, 64, use=use, dtype=use.dtype, phase=i) for i in range(3))
    weight, shift = (_wave(64, use=use, dtype=use.dtype, phase=3 + i) for i in range(2))
    bias = shift if use.norm.kind == "LayerNorm" else None
    names: tuple[FusedKernelName, ...] = ("apex", "torch")
    results: list[list[Tensor | None]] = []
    for name in names:
        spec = replace(use.norm, kernel=name)
        y, stats = norm_forward(x, weight, bias, spec)
        results.append([y, *norm_backward(grad, x, weight, bias, stats, spec, (True, True, bias is not None), add)])
    return _difference(*results)
