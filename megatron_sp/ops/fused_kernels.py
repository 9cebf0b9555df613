"""Whose fused kernels compute AdamW, the norms and elementwise operations (--fused-kernels).

Elementwise operations (dropout, activation, rotary, cross entropy) are Triton's, which are ours (``ops/kernels/``), or plain
torch. The norms may be apex's, too, AdamW torch's or apex's:

    --fused-kernels    elementwise    norms                        AdamW (fp32 state on a GPU)    fp64, on a CPU; AdamW on the host
    auto               Triton         Triton, else apex            apex                           torch
    triton             Triton         Triton                       torch                          an error; torch
    apex               Triton         apex                         apex                           an error
    torch              torch          torch                        torch                          torch

auto means what is found and loses nothing. Triton's norms come first: they add the residual's gradient and sum those of
the parameters in fp32. Of apex's: torch's LayerNorm is one kernel too, and rounds a 16-bit result once where apex's
rounds three times; RMSNorm with --apply-layernorm-1p would round 1 + weight to 16 bits. With --deterministic-mode auto
means torch instead of apex, since it vouches for its own kernels only; apex's use no atomics and repeat to the last bit
as well, and may be asked for. Triton's have no atomics, either.

Before a kernel is used it computes a small example here: builds for another GPU or another torch, and a Triton without
a C compiler, fail at that, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.adamw import AdamStep, adamw_
from megatron_sp.ops.attention import split_qkv
from megatron_sp.ops.backward import gradients_of
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.ops.kernels import launch
from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward

FusedKernelName = Literal["torch", "apex", "triton"]
ELEMENTWISE = "elementwise operations"
_OLDEST_TRITON, _OLDEST_GPU = (3, 6), (8, 0)  # the Triton of torch 2.10; Ampere, which has bf16
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the examples: some roundings of results of about 1


@dataclass(frozen=True)
class FusedKernel:
    """Whose kernel computes an op, and why."""

    op: str
    name: FusedKernelName
    reason: str


@dataclass(frozen=True)
class FusedKernels:
    """Chosen kernels: of AdamW (None with another optimizer), of norms and elementwise operations (None for a model not ours)."""

    adamw: FusedKernel | None
    norm: FusedKernel | None
    elementwise: FusedKernel | None = None

    @property
    def chosen(self) -> list[FusedKernel]:
        """Kernels of the ops that this run has."""
        return [kernel for kernel in (self.adamw, self.norm, self.elementwise) if kernel is not None]

    def describe(self) -> str:
        """Return the choice and its reasons in a line; ops with the same answer share it."""
        ops: dict[tuple[str, str], list[str]] = {}
        for kernel in self.chosen:
            ops.setdefault((kernel.name, kernel.reason), []).append(kernel.op)
        lists = {answer: " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) for answer, names in ops.items()}
        return ", ".join(f"{names} by {name} ({reason})" for (name, reason), names in lists.items())

    def agreed(self, of_ranks: Sequence[Sequence[tuple[str, str]]]) -> FusedKernels:
        """Return the choice of all ranks: torch where any needs it or two differ: copies of a parameter must stay equal to the last bit.

        Args:
            of_ranks: (name, reason) of each of ``chosen``, by rank.
        """
        agreed: dict[str, FusedKernel] = {}
        for index, kernel in enumerate(self.chosen):
            others = [(rank, choices[index][1]) for rank, choices in enumerate(of_ranks) if choices[index][0] == "torch"]
            apart = [
                (rank, f"{choices[index][0]}, not {of_ranks[0][index][0]}")
                for rank, choices in enumerate(of_ranks)
                if choices[index][0] != of_ranks[0][index][0]
            ]  # apex's norms where Triton lacks
            rank, why = (others or apart or [(0, "")])[0]
            agrees = kernel.name == "torch" or not (others or apart)
            agreed[kernel.op] = kernel if agrees else FusedKernel(kernel.op, "torch", f"rank {rank}: {why}")
        return FusedKernels(*(None if kernel is None else agreed[kernel.op] for kernel in (self.adamw, self.norm, self.elementwise)))


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
        asked: auto, torch, apex or triton; with torch nothing of the others is imported.
    Raises:
        RuntimeError: apex or triton was asked for and cannot be used.
    """
    if use.norm is None and asked == "triton":
        raise RuntimeError("--fused-kernels triton cannot be used: the model is not ours, and has operations of its own. Use auto")
    if asked == "torch" or use.norm is None:
        lack = ""
    else:
        lack = _lack_of_triton(use) or _trial(_elementwise_example, "Triton", replace(use, norm=None, offload=False, deterministic=False))
        lack = lack or _trial(_triton_norm_example, "Triton", use)
    if asked == "triton" and lack:
        raise RuntimeError(
            f"--fused-kernels triton cannot be used: {lack}. Use --fused-kernels auto, which takes torch's kernels then, or install the"
            " Triton that this torch asks for (it comes with torch's CUDA wheels; see `megatron-sp doctor`)"
        )
    by_triton = asked != "torch" and not lack
    why = "asked for" if asked in ("torch", "triton") else "found" if by_triton else f"Triton not used: {lack}"
    elementwise = FusedKernel(ELEMENTWISE, "triton" if by_triton else "torch", why)
    adamw = _Candidate(
        "AdamW", "amp_C", cannot="with --offload-optimizer the update runs on the host" if use.offload else "", better_not="",
        example=_adamw_example,
    )  # fmt: skip
    of_adamw = _choose("torch" if asked == "triton" else asked, use, adamw) if use.adamw else None
    if use.norm is None:
        return FusedKernels(of_adamw, None)
    if by_triton and asked != "apex":
        return FusedKernels(of_adamw, FusedKernel(use.norm.kind, "triton", why), elementwise)
    norm = _Candidate(use.norm.kind, "fused_layer_norm_cuda", "", _norm_doubt(use.norm, use.dtype), _norm_example)
    return FusedKernels(of_adamw, _choose(asked, use, norm), elementwise)


def _lack_of_triton(use: KernelUse) -> str:
    if use.device.type != launch.DEVICE:
        return "it needs a GPU"
    if use.dtype not in launch.DTYPES:
        return f"it computes in fp32, not in {str(use.dtype).removeprefix('torch.')}"
    triton = availability.installed("triton")
    if not triton.available:
        return triton.reason
    name = triton.version
    if not name and availability.find("triton").available:  # a distribution of another name, such as that of torch's ROCm wheels
        name = availability.load("triton").__version__
    if name and tuple(int(part) for part in re.findall(r"\d+", name)[:2]) < _OLDEST_TRITON:
        return f"Triton {name} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
    if use.device.type == "cuda" and torch.cuda.get_device_capability(use.device) < _OLDEST_GPU:
        have = ".".join(map(str, torch.cuda.get_device_capability(use.device)))
        return f"it needs a GPU of compute capability {'.'.join(map(str, _OLDEST_GPU))} or later, and this one has {have}"
    return availability.find("triton").reason


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
    """Return what goes wrong with a small example on the device; empty if the result is torch's."""
    try:
        error = example(use)
    except Exception as failure:  # foreign code: the run goes on without it, or ends with this reason
        what = "a kernel of it" if op == "Triton" else f"its {op}"
        return f"{what} fails here: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    tolerance = _TOLERANCE[torch.float32 if op == "AdamW" else use.dtype]
    what = "a kernel of it" if op == "Triton" else f"its {op}"
    return "" if error <= tolerance else f"{what} is wrong here: an example differs from torch's result by {error:.2g}"


def _wave(*shape: int, use: KernelUse, dtype: torch.dtype, phase: float) -> Tensor:
    """Return numbers of about 1 with either sign, without drawing from a generator."""
    return torch.sin(torch.arange(1, 1 + torch.Size(shape).numel(), device=use.device) * 1.7 + phase).view(shape).to(dtype)


def _difference(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    return float(torch.stack([(g - w).abs().max() / w.abs().max() for g, w in pairs]).max())  # NaN stays, which max() of floats may drop


def _adamw_example(use: KernelUse) -> float:
    step = AdamStep(count=3, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1)
    names: tuple[Literal["apex", "torch"], ...] = ("apex", "torch")
    results = []
    for name in names:
        params, grads, exp_avg, exp_avg_sq = (_wave(70, use=use, dtype=torch.float32, phase=i) for i in range(4))
        adamw_([params], [grads], [exp_avg], [exp_avg_sq.square_()], step, name)
        results.append([params, exp_avg, exp_avg_sq])
    return _difference(*results)


def _norm_example(use: KernelUse) -> float:
    assert use.norm is not None
    return _difference(_norm_results(use, replace(use.norm, kernel="apex")), _norm_results(use, replace(use.norm, kernel="torch")))


def _norm_results(use: KernelUse, spec: NormSpec) -> list[Tensor | None]:
    x, grad, add = (_wave(6, 5, 64, use=use, dtype=use.dtype, phase=i) for i in range(3))
    weight, shift = (_wave(64, use=use, dtype=use.dtype, phase=3 + i) for i in range(2))
    bias = shift if spec.kind == "LayerNorm" else None
    y, stats = norm_forward(x, weight, bias, spec)
    return [y, *norm_backward(grad, x, weight, bias, stats, spec, (True, True, bias is not None), add)]


def _triton_norm_example(use: KernelUse) -> float:
    assert use.norm is not None
    results = []
    for yes in (True, False):
        with launch.using_triton(yes):
            results.append(_norm_results(use, replace(use.norm, kernel="torch")))
    return _difference(*results)


def _elementwise_example(use: KernelUse) -> float:
    results: list[list[Tensor | None]] = []
    for yes in (True, False):
        with launch.using_triton(yes):
            results.append(_elementwise_results(use))
    return _difference(*results)


def _elementwise_results(use: KernelUse) -> list[Tensor | None]:
    """Return results and gradients of each kind of elementwise operation on small examples."""
    tokens = torch.arange(6, device=use.device)
    keys, site = DropoutKeys.create(1, 2, tokens[:2], tokens).rows(3, 0)
    x, residual, grad = (_wave(6, 2, 48, use=use, dtype=use.dtype, phase=i) for i in range(3))
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    out = hash_dropout(x, 0.25, keys, site=site, residual=residual)
    found: list[Tensor | None] = [out.detach(), *gradients_of(leaves, [out], [grad])]
    activation = Activation("swiglu")
    u = _wave(6, 96, use=use, dtype=use.dtype, phase=4)
    found += [activation.forward(u), activation.backward_(_wave(6, 48, use=use, dtype=use.dtype, phase=5), u)]
    table = _wave(6, 8, use=use, dtype=torch.float32, phase=6)
    fused = _wave(6, 2, 2 * 3 * 16, use=use, dtype=use.dtype, phase=7).requires_grad_()
    heads = split_qkv(fused.clone(), 1, 16, (table.cos(), table.sin()))
    found += [part.detach().clone() for part in heads]
    found += gradients_of([fused], heads, [_wave(6, 4, 1, 16, use=use, dtype=use.dtype, phase=8 + i) for i in range(3)])
    return found + _cross_entropy_results(use)


def _cross_entropy_results(use: KernelUse) -> list[Tensor | None]:
    """Return statistics and gradient of a chunk of logits, of whose 48 rows 41 count (``parallel/lm_head.py`` is above this folder)."""
    logits, labels, valid = _wave(6, 48, use=use, dtype=torch.float32, phase=11), torch.arange(6, device=use.device) * 7, 41
    if launch.is_fused(logits):
        from megatron_sp.ops.kernels import cross_entropy

        stats = cross_entropy.statistics(logits, labels, valid)
        return [stats, cross_entropy.gradient(logits, labels, stats, torch.ones(6, device=use.device), valid, use.dtype)]
    real = logits[:, :valid]
    maximum, at_label = real.amax(1), real.gather(1, labels[:, None])[:, 0]
    gradient = torch.zeros_like(logits)
    gradient[:, :valid] = real.softmax(1)
    gradient.scatter_add_(1, labels[:, None], torch.full_like(at_label, -1.0)[:, None])
    return [torch.stack([maximum, (real - maximum[:, None]).exp().sum(1), at_label]), gradient.to(use.dtype)]
