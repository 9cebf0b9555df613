"""Candidates for the attention kernel (--attention-backend), each tried on a small example before it is used.

The example is forward and backward of what the run will ask for: builds for another GPU or another torch fail there,
with a reason. ``training/kernel_selection.py`` times those that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

import torch
import torch.nn.attention as attention_of_torch
from torch import Tensor

from megatron_sp.ops import attention as attention_kernels
from megatron_sp.ops import availability
from megatron_sp.ops.attention import AttentionMask, KernelName, core_attention
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.flash_packages import FLASH_NAMES, MOST_HEAD_DIM, PACKAGES, lse_lack

ALL_SCORES = "the scores of all pairs of tokens are in memory"
# best guess first; "unfused" and "local" are the reference, other names that kernel alone. A CPU has torch's and the
# plain one
_GROUPS: dict[str, tuple[KernelName, ...]] = {
    "auto": ("flash4", "flash3", "cudnn", "flash2", "sdpa"), "flash": ("flash4", "flash3", "flash2"),
    "fused": ("sdpa",),
}  # fmt: skip
# where a package's own function fails, its kernels may still work through torch, which calls other parts of it: their
# name then, and what torch calls it
_THROUGH_TORCH: dict[KernelName, tuple[KernelName, str]] = {
    "flash4": ("sdpa-fa4", "FA4"),
    "flash3": ("sdpa-fa3", "FA3"),
}
# of the largest element; fp32 may be TF32 inside
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.05, torch.float16: 0.01}
_16_BIT = (torch.bfloat16, torch.float16)

# the GPU's fused kernels with which context parallelism computes (``ops/gpu_partial_attention.py``)
IN_PIECES: tuple[KernelName, ...] = ("sdpa", *FLASH_NAMES, "cudnn")


@dataclass(frozen=True)
class AttentionKernel:
    """The chosen kernel, and the reason for the choice."""

    name: KernelName
    reason: str


@dataclass(frozen=True)
class AttentionUse:
    """Requirements of a run on its attention kernel."""

    device: torch.device
    dtype: torch.dtype  # of the activations
    dropout: float = 0.0  # of the probabilities, in training
    head_dim: int = 64
    queries_per_group: int = 1
    causal: bool = True
    window: int | None = None  # keys that a query attends to, itself included; None: all before it
    documents: bool = False  # sequences are packed documents (--reset-attention-mask)
    deterministic: bool = False
    # keys come in parts whose results are merged: with context parallelism, or slices of a sequence
    context: bool = False


@dataclass(frozen=True)
class Candidates:
    """Kernels that work here, best guess first, and why the others do not."""

    names: tuple[KernelName, ...]  # at least one
    reason: str  # why the first is taken if it is not timed
    lacks: dict[str, str] = field(default_factory=dict)  # by kernel, why it is not a candidate


def choose_kernel(
    backend: str, device_type: str, dtype: torch.dtype, dropout: float = 0.0, use: AttentionUse | None = None
) -> AttentionKernel:
    """Choose the first candidate for --attention-backend, without timing; RuntimeError if there is none."""
    found = find_candidates(backend, use or AttentionUse(torch.device(device_type), dtype, dropout))
    return chosen(found.names[0], found.reason, dropout)


def chosen(name: KernelName, reason: str, dropout: float) -> AttentionKernel:
    """Return the choice; with attention dropout inside a kernel its reason says so."""
    if dropout > 0 and name != "reference":
        reason += "; attention dropout's masks depend on the layout in it"
    return AttentionKernel(name, reason)


def find_candidates(backend: str, use: AttentionUse) -> Candidates:
    """Return the kernels that can be used here for --attention-backend; RuntimeError if there is none."""
    if backend in ("unfused", "local"):
        return Candidates(("reference",), "asked for")
    wanted = _GROUPS.get(backend, (cast(KernelName, backend),))
    if use.device.type != availability.GPU and backend in ("auto", "fused"):
        if backend == "auto" and use.dropout > 0:
            reason = "attention dropout on CPU: torch's fused kernel falls back to a slower path with it"
            return Candidates(("reference",), reason)
        cost = f"; with attention dropout on a CPU {ALL_SCORES}" if use.dropout > 0 else ""
        return Candidates(
            ("sdpa",), f"asked for{cost}" if backend == "fused" else "flash-attn not used: it needs a GPU"
        )
    names: list[KernelName] = []
    lacks: dict[str, str] = {}
    for name in wanted:
        through_torch = _THROUGH_TORCH[name][:1] if name in _THROUGH_TORCH and not known_lack(name, use) else ()
        for way in (name, *through_torch):
            lacks[way] = lack(way, use)
            if not lacks[way]:
                names.append(way)
                break
    reasons = {name: why for name, why in lacks.items() if why}
    if names:
        others = {name: why for name, why in reasons.items() if name not in names}
        reason = f"not used: {_listed(others)}" if others else "the fastest by reputation"
        return Candidates(tuple(names), "asked for" if backend not in ("auto", "flash") else reason, reasons)
    if "sdpa" in wanted:
        return Candidates(("reference",), f"no fused kernel works here ({_listed(lacks)}): {ALL_SCORES}", reasons)
    raise RuntimeError(f"--attention-backend {backend} cannot be used: {_listed(lacks)}. Use --attention-backend auto.")


def _listed(lacks: dict[str, str]) -> str:
    # kernels and why each is not used; kernels with the same reason share it
    by_reason: dict[str, list[str]] = {}
    for name, why in lacks.items():
        if why:
            by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())


def lack(name: KernelName, use: AttentionUse) -> str:
    """Return why a kernel cannot be used for this; empty if it can. What the device rules out is not imported."""
    return known_lack(name, use) or _trial(name, replace(use, dropout=0.0))


def known_lack(name: KernelName, use: AttentionUse) -> str:
    """Return why a kernel cannot be used for this, as far as that is known without trying it."""
    general = (
        "it needs a GPU" if use.device.type != availability.GPU
        else "no fused kernel computes in float64" if use.dtype == torch.float64
        else _context_lack(name, use) if use.context and _context_lack(name, use)
        else "" if name == "sdpa"
        else f"it needs bf16 or fp16, not {str(use.dtype).removeprefix('torch.')}" if use.dtype not in _16_BIT
        else f"it takes heads up to {MOST_HEAD_DIM} wide, not {use.head_dim}" if use.head_dim > MOST_HEAD_DIM
        else ""
    )  # fmt: skip
    lacks = general or _own_lack(name, use)
    return lse_lack(name) if not lacks and use.context and name in FLASH_NAMES else lacks


def _context_lack(name: KernelName, use: AttentionUse) -> str:
    if use.dropout > 0:
        return "its dropout would depend on how context parallelism cuts the sequence"
    if use.dtype not in _16_BIT:
        dtype = str(use.dtype).removeprefix("torch.")
        return f"it gives no log-sum-exp in {dtype}, by which context parallelism merges parts"
    if name not in IN_PIECES:
        return "it takes no keys in parts, as context parallelism has them"
    if use.head_dim > MOST_HEAD_DIM or use.head_dim % 8:
        return f"in parts it takes heads up to {MOST_HEAD_DIM} wide, in multiples of 8, not {use.head_dim}"
    if name == "sdpa" and compute_capability(use.device) < (8, 0):
        return "torch's flash kernel needs compute capability 8.0"
    return ""


def _own_lack(name: KernelName, use: AttentionUse) -> str:
    if name == "cudnn":
        return _cudnn_lack(use)
    package = next(
        (p for p in (name, *(n for n, way in _THROUGH_TORCH.items() if way[0] == name)) if p in PACKAGES), None
    )
    if package is None:
        return ""
    flash = PACKAGES[package]  # type: ignore[index]
    capability = compute_capability(use.device)
    if capability[0] not in flash.majors:
        return f"it has no kernels for compute capability {capability[0]}.{capability[1]}"
    if use.dropout > 0 and not flash.has_dropout:
        return "it has no attention dropout"
    return availability.find(flash.package).reason


def _cudnn_lack(use: AttentionUse) -> str:
    if use.deterministic:
        return "SDPA refuses it with --deterministic-mode"
    if use.window is not None or use.documents:
        return f"SDPA cannot give it {'windows' if use.window is not None else 'documents'}"
    if not torch.backends.cudnn.is_available():
        return "torch has no cuDNN here"
    q, k = (torch.empty(1, n, 64, use.head_dim, device=use.device, dtype=use.dtype) for n in (use.queries_per_group, 1))
    params = torch.backends.cuda.SDPAParams(q, k, k, None, use.dropout, use.causal, use.queries_per_group > 1)
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return ""
    capability = ".".join(map(str, compute_capability(use.device)))
    return f"SDPA does not take it on compute capability {capability} for heads like these"


def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def activate(name: KernelName) -> None:
    """Put the flash kernel of ``name`` into torch's dispatcher, or torch's own back; for the whole process."""
    wanted = next((impl for way, impl in _THROUGH_TORCH.values() if way == name), None)
    current = getattr(attention_of_torch, "current_flash_attention_impl", lambda: None)()
    if current == wanted:
        return
    restore = getattr(attention_of_torch, "restore_flash_attention_impl", None)
    if restore is None or (wanted is not None and wanted not in attention_of_torch.list_flash_attention_impls()):
        raise RuntimeError(f"torch {torch.__version__} cannot take {wanted or 'its own kernel'} for its flash kernel")
    if wanted is None:
        restore()
    else:
        attention_of_torch.activate_flash_attention_impl(wanted)


def why_repeated(name: KernelName, use: AttentionUse) -> str:
    """Return why a recomputation repeats attention with this kernel; empty if its results can be kept.

    On a GPU the example is tried with kept results, too: that calls other functions than the kernel's users do.
    """
    if use.context:  # attention in pieces gives it with every kernel
        return ""
    lacks = attention_kernels.why_repeated(name, use.device, use.dtype, use.head_dim, use.dropout)
    return lacks or (_trial(name, use, kept=True) if use.device.type == availability.GPU else "")


@cache
def _trial(name: KernelName, use: AttentionUse, kept: bool = False) -> str:
    # what goes wrong with a small example; ``kept``: in a second pass with what a first one has kept
    try:
        activate(name)
        error = example_error(name, use, kept)
    except Exception as failure:  # foreign code: the run goes on without it, or ends with this reason
        return f"it fails here: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    finally:
        activate("sdpa")
    if error <= _TOLERANCE[use.dtype]:
        return ""
    return f"it is wrong here: an example differs from the plain kernel's result by {error:.2g}"


def example_error(name: KernelName, use: AttentionUse, keeps: bool = False) -> float:
    s, m, r, d = 80, 2, use.queries_per_group, use.head_dim
    documents = ((30, 31, s),) if use.documents else None
    window = None if use.window is None else min(use.window, 17)
    mask = AttentionMask(use.causal, documents=documents, window=window)
    grad = _wave(s, m, r, d, use=use, phase=3)
    results: list[list[Tensor]] = []
    names: tuple[KernelName, ...] = (name, "reference")
    for kernel in names:
        if use.context and kernel == name:
            from megatron_sp.ops.gpu_partial_attention import example_in_pieces

            q, k, v = (_wave(s, m, n, d, use=use, phase=i) for i, n in enumerate((r, 1, 1)))
            results.append(example_in_pieces(name, q, k, v, grad, mask))
            continue
        q, k, v = (_wave(s, m, n, d, use=use, phase=i).requires_grad_() for i, n in enumerate((r, 1, 1)))
        kept = KeptTensors() if keeps and kernel == name else None
        if kept is not None:
            with torch.no_grad():
                core_attention(q, k, v, mask, kernel=kernel, kept=kept)
            kept.restore(kept.release())
        with torch.enable_grad():
            out = core_attention(q, k, v, mask, kernel=kernel, kept=kept)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
    pairs = zip(*results, strict=True)
    return max(float((got.double() - want.double()).abs().max() / want.double().abs().max()) for got, want in pairs)


def _wave(*shape: int, use: AttentionUse, phase: float) -> Tensor:
    at = torch.arange(1, 1 + torch.Size(shape).numel(), device=use.device, dtype=torch.float32)
    return torch.sin(at * 1.7 + phase).view(shape).to(use.dtype)
