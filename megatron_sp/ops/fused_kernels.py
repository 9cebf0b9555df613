"""Whose fused kernels compute AdamW, the norms and elementwise operations (--fused-kernels).

Before a kernel is used it computes a small example here, at which builds for another GPU or another torch, and a Triton
without a C compiler, fail with a reason.
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
from megatron_sp.ops.custom_backward import gradients_of
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.ops.kernels import launch
from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward

FusedKernelName = Literal["torch", "apex", "triton"]
ELEMENTWISE = "elementwise operations"
_OLDEST_TRITON, _OLDEST_GPU = (3, 6), (8, 0)  # the Triton of torch 2.10; Ampere, which has bf16
# of the examples: some roundings of results of about 1
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True)
class FusedKernel:
    """Whose kernel computes an op, and why."""

    op: str
    name: FusedKernelName
    reason: str


@dataclass(frozen=True)
class FusedKernels:
    """The chosen kernels."""

    adamw: FusedKernel | None  # None with another optimizer
    norm: FusedKernel | None  # None, as elementwise, if the model is not ours
    elementwise: FusedKernel | None = None

    @property
    def chosen(self) -> list[FusedKernel]:
        return [kernel for kernel in (self.adamw, self.norm, self.elementwise) if kernel is not None]

    def describe(self) -> str:
        """Return the choice and its reasons in a line; ops with the same answer share it."""
        ops: dict[tuple[str, str], list[str]] = {}
        for kernel in self.chosen:
            ops.setdefault((kernel.name, kernel.reason), []).append(kernel.op)
        parts = []
        for (name, reason), names in ops.items():
            listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            parts.append(f"{listed} by {name} ({reason})")
        return ", ".join(parts)

    def agreed(self, of_ranks: Sequence[Sequence[tuple[str, str]]]) -> FusedKernels:
        """Return the choice of all ranks, given (name, reason) of each of ``chosen`` by rank: torch if two differ."""
        # copies of a parameter must stay equal to the last bit
        agreed: dict[str, FusedKernel] = {}
        for index, kernel in enumerate(self.chosen):
            names = [choices[index] for choices in of_ranks]
            first = names[0][0]
            doubts = [(rank, reason) for rank, (name, reason) in enumerate(names) if name == "torch"]
            # such as apex's norms where Triton lacks
            doubts += [(rank, f"{name}, not {first}") for rank, (name, _) in enumerate(names) if name != first]
            agreed[kernel.op] = kernel
            if kernel.name != "torch" and doubts:
                agreed[kernel.op] = FusedKernel(kernel.op, "torch", f"rank {doubts[0][0]}: {doubts[0][1]}")
        ops = (self.adamw, self.norm, self.elementwise)
        return FusedKernels(*(None if kernel is None else agreed[kernel.op] for kernel in ops))


@dataclass(frozen=True)
class KernelUse:
    """Purpose of fused kernels in a run: device, dtype and the ops that have some."""

    device: torch.device
    dtype: torch.dtype
    adamw: bool = True  # the optimizer
    offload: bool = False  # its state is in host memory (--offload-optimizer)
    norm: NormSpec | None = None  # the model's, if it has one of ours
    deterministic: bool = False  # --deterministic-mode


# --fused-kernels    elementwise    norms                        AdamW (fp32 state on a GPU)    fp64, on a CPU
# auto               Triton         Triton, else apex            apex                           torch
# triton             Triton         Triton                       torch                          an error; torch
# apex               Triton         apex                         apex                           an error
# torch              torch          torch                        torch                          torch
# auto: what is found and loses nothing
def choose_fused_kernels(asked: str, use: KernelUse) -> FusedKernels:
    """Choose the kernels for --fused-kernels; with ``asked`` "torch" nothing of the others is imported.

    Raises:
        RuntimeError: apex or triton was asked for and cannot be used.
    """
    if use.norm is None and asked == "triton":
        why = "the model is not ours, and has operations of its own"
        raise RuntimeError(f"--fused-kernels triton cannot be used: {why}. Use auto")
    if asked == "torch" or use.norm is None:
        lack = ""
    else:
        lack = _lack_of_triton(use) or _trial(
            _triton_example, "Triton", replace(use, offload=False, deterministic=False)
        )
    if asked == "triton" and lack:
        raise RuntimeError(
            f"--fused-kernels triton cannot be used: {lack}. Use --fused-kernels auto, which takes torch's kernels"
            " then, or install the Triton that this torch asks for (it comes with torch's CUDA wheels; see"
            " `megatron-sp doctor`)"
        )
    by_triton = asked != "torch" and not lack
    why = "asked for" if asked in ("torch", "triton") else "found" if by_triton else f"Triton not used: {lack}"
    elementwise = FusedKernel(ELEMENTWISE, "triton" if by_triton else "torch", why)
    of_adamw = None
    if use.adamw:
        cannot = "with --offload-optimizer the update runs on the host" if use.offload else ""
        asked_of_apex = "torch" if asked == "triton" else asked
        of_adamw = _choose(asked_of_apex, use, "AdamW", "amp_C", _adamw_example, cannot=cannot)
    if use.norm is None:
        return FusedKernels(of_adamw, None)
    if by_triton and asked != "apex":
        return FusedKernels(of_adamw, FusedKernel(use.norm.kind, "triton", why), elementwise)
    # Triton's norms come first: they add the residual's gradient and sum those of the parameters in fp32. What a 16-bit
    # norm of apex's would lose:
    better_not = ""
    if use.dtype != torch.float32 and use.norm.kind == "LayerNorm":
        better_not = "torch's LayerNorm is one kernel too, and rounds a 16-bit result once, apex's three times"
    elif use.dtype != torch.float32 and use.norm.zero_centered:
        better_not = "with --apply-layernorm-1p it rounds 1 + weight to 16 bits"
    norm = _choose(asked, use, use.norm.kind, "fused_layer_norm_cuda", _norm_example, better_not=better_not)
    return FusedKernels(of_adamw, norm, elementwise)


def _lack_of_triton(use: KernelUse) -> str:
    if use.device.type != launch.DEVICE:
        return "it needs a GPU"
    if use.dtype not in launch.DTYPES:
        return f"it computes in fp32, not in {str(use.dtype).removeprefix('torch.')}"
    triton = availability.installed("triton")
    if not triton.available:
        return triton.reason
    name = triton.version
    # a distribution of another name, such as that of torch's ROCm wheels
    if not name and availability.find("triton").available:
        name = availability.load("triton").__version__
    if name and tuple(int(part) for part in re.findall(r"\d+", name)[:2]) < _OLDEST_TRITON:
        return f"Triton {name} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
    if use.device.type == "cuda" and torch.cuda.get_device_capability(use.device) < _OLDEST_GPU:
        have = ".".join(map(str, torch.cuda.get_device_capability(use.device)))
        oldest = ".".join(map(str, _OLDEST_GPU))
        return f"it needs a GPU of compute capability {oldest} or later, and this one has {have}"
    return availability.find("triton").reason


def _choose(
    asked: str, use: KernelUse, op: str, extension: str, example: Callable[[KernelUse], float], *,
    cannot: str = "", better_not: str = "",
) -> FusedKernel:  # fmt: skip
    # between torch's kernel and apex's in ``extension``, which ``cannot`` run here, or auto had ``better_not`` take
    if asked == "torch":
        return FusedKernel(op, "torch", "asked for")
    lack = cannot
    if not lack and use.device.type != availability.APEX_DEVICE:
        lack = "it needs a GPU"
    elif not lack and use.dtype not in _TOLERANCE:
        lack = f"it computes in fp32, not in {str(use.dtype).removeprefix('torch.')}"
    lack = lack or availability.find(extension).reason
    # torch vouches for its own kernels only; apex's use no atomics and repeat as well, and may be asked for
    if not lack and asked == "auto":
        lack = better_not
        if not lack and use.deterministic:
            lack = "--deterministic-mode takes torch's kernels, for which torch vouches"
    lack = lack or _trial(example, op, replace(use, offload=False, deterministic=False))
    if not lack:
        return FusedKernel(op, "apex", "asked for" if asked == "apex" else "found")
    if asked == "apex":
        raise RuntimeError(
            f"--fused-kernels apex cannot be used for {op}: {lack}. Use --fused-kernels auto, which takes torch's"
            " kernels where apex's cannot run, or build NVIDIA's apex from its repository with its C++ and CUDA"
            " extensions (see `megatron-sp doctor`)"
        )
    return FusedKernel(op, "torch", f"apex not used: {lack}")


@cache
def _trial(example: Callable[[KernelUse], float], op: str, use: KernelUse) -> str:
    # what goes wrong with a small example on the device; empty if the result is torch's
    what = "a kernel of it" if op == "Triton" else f"its {op}"
    try:
        error = example(use)
    except Exception as failure:  # foreign code: the run goes on without it, or ends with this reason
        return f"{what} fails here: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    tolerance = _TOLERANCE[torch.float32 if op == "AdamW" else use.dtype]
    return "" if error <= tolerance else f"{what} is wrong here: an example differs from torch's result by {error:.2g}"


def _wave(*shape: int, use: KernelUse, dtype: torch.dtype, phase: float) -> Tensor:
    # numbers of about 1 with either sign, without drawing from a generator
    angles = torch.arange(1, 1 + torch.Size(shape).numel(), device=use.device) * 1.7 + phase
    return torch.sin(angles).view(shape).to(dtype)


def _difference(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    # NaN stays, which max() of floats may drop
    return float(torch.stack([(g - w).abs().max() / w.abs().max() for g, w in pairs]).max())


def _adamw_example(use: KernelUse) -> float:
    step = AdamStep(count=3, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1)

    def results(kernel: Literal["apex", "torch"]) -> list[Tensor]:
        params, grads, exp_avg, exp_avg_sq = (_wave(70, use=use, dtype=torch.float32, phase=i) for i in range(4))
        adamw_([params], [grads], [exp_avg], [exp_avg_sq.square_()], step, kernel)
        return [params, exp_avg, exp_avg_sq]

    return _difference(results("apex"), results("torch"))


def _norm_example(use: KernelUse) -> float:
    return _difference(_norm_results(use, "apex"), _norm_results(use, "torch"))


def _norm_results(use: KernelUse, kernel: Literal["apex", "torch"]) -> list[Tensor | None]:
    assert use.norm is not None
    spec = replace(use.norm, kernel=kernel)
    x, grad, add = (_wave(6, 5, 64, use=use, dtype=use.dtype, phase=i) for i in range(3))
    weight, shift = (_wave(64, use=use, dtype=use.dtype, phase=3 + i) for i in range(2))
    bias = shift if spec.kind == "LayerNorm" else None
    y, stats = norm_forward(x, weight, bias, spec)
    return [y, *norm_backward(grad, x, weight, bias, stats, spec, (True, True, bias is not None), add)]


def _triton_example(use: KernelUse) -> float:
    results: list[list[Tensor | None]] = []
    for yes in (True, False):
        with launch.using_triton(yes):
            results.append([*_elementwise_results(use), *_norm_results(use, "torch")])
    return _difference(*results)


def _elementwise_results(use: KernelUse) -> list[Tensor | None]:
    tokens = torch.arange(6, device=use.device)
    keys, site = DropoutKeys.create(1, 2, tokens[:2], tokens).rows(3, 0)
    x, residual, grad = (_wave(6, 2, 48, use=use, dtype=use.dtype, phase=i) for i in range(3))
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    out = hash_dropout(x, 0.25, keys, site=site, residual=residual)
    results: list[Tensor | None] = [out.detach(), *gradients_of(leaves, [out], [grad])]
    activation = Activation("swiglu")
    u = _wave(6, 96, use=use, dtype=use.dtype, phase=4)
    results += [activation.forward(u), activation.backward_(_wave(6, 48, use=use, dtype=use.dtype, phase=5), u)]
    table = _wave(6, 8, use=use, dtype=torch.float32, phase=6)
    fused = _wave(6, 2, 2 * 3 * 16, use=use, dtype=use.dtype, phase=7).requires_grad_()
    heads = split_qkv(fused.clone(), 1, 16, (table.cos(), table.sin()))
    results += [part.detach().clone() for part in heads]
    grads = [_wave(6, 4, 1, 16, use=use, dtype=use.dtype, phase=8 + i) for i in range(3)]
    results += gradients_of([fused], heads, grads)
    # cross entropy over 48 rows of a table, of which 41 count; its plain form is in a folder above
    logits = _wave(6, 48, use=use, dtype=torch.float32, phase=11)
    labels, valid = torch.arange(6, device=use.device) * 7, 41
    if launch.is_fused(logits):
        from megatron_sp.ops.kernels import cross_entropy

        stats = cross_entropy.statistics(logits, labels, valid)
        weights = torch.ones(6, device=use.device)
        return [*results, stats, cross_entropy.gradient(logits, labels, stats, weights, valid, use.dtype)]
    real = logits[:, :valid]
    maximum, at_label = real.amax(1), real.gather(1, labels[:, None])[:, 0]
    gradient = torch.zeros_like(logits)
    gradient[:, :valid] = real.softmax(1)
    gradient.scatter_add_(1, labels[:, None], torch.full_like(at_label, -1.0)[:, None])
    stats = torch.stack([maximum, (real - maximum[:, None]).exp().sum(1), at_label])
    return [*results, stats, gradient.to(use.dtype)]
