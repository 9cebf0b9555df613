"""Attention kernels that return the log of the sums of exponentials (lse), and whose backward takes any output and lse.

That is all that a backward needs of its forward pass, so a recomputation (``parallel/recompute.py``) that has kept
(output, lse) builds the same autograd node without computing attention again (DistFlashAttn, arXiv:2310.03294).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.ops.allocator import blocks, empty, is_small

Tensors = tuple[Tensor, Tensor, Tensor]


class KeptTensors:
    """Tensors of a forward pass that its recomputation takes instead of computing them again.

    Both passes come by the same places in the same order, and the names of entries are compared. An entry may be a
    section with entries of its own, which can be read later than what follows it.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[str, tuple[Tensor, ...] | KeptTensors]] = deque()
        self._layout: list[tuple[str, int | KeptTensors]] = []
        self.replays = False

    def keep(self, name: str, *tensors: Tensor) -> None:
        self._entries.append((name, tensors))

    def section(self, name: str) -> KeptTensors:
        # a new one in the first pass, the next entry in the second one
        if self.replays:
            section = self._next(name)
            assert isinstance(section, KeptTensors)
        else:
            section = KeptTensors()
            self._entries.append((name, section))
        return section

    def take(self, name: str) -> tuple[Tensor, ...]:
        # the next entry, in the second pass, which is forgotten
        tensors = self._next(name)
        assert isinstance(tensors, tuple)
        return tensors

    def find(self, name: str) -> tuple[Tensor, ...]:
        # the first entry of this name, which stays; nothing if there is none
        return next((entry for known, entry in self._entries if known == name and isinstance(entry, tuple)), ())

    def _next(self, name: str) -> tuple[Tensor, ...] | KeptTensors:
        known, entry = self._entries.popleft() if self._entries else ("nothing", ())
        if known != name:
            raise RuntimeError(f"the recomputation asks for {name} where the forward pass has kept {known}")
        return entry

    def release(self) -> list[Tensor]:
        # ends the first pass: hands out all tensors, to be saved until the second one
        self._layout, released = [], list[Tensor]()
        for name, entry in self._entries:
            if isinstance(entry, KeptTensors):
                self._layout.append((name, entry))
                released += entry.release()
            else:
                self._layout.append((name, len(entry)))
                released += entry
        self._entries.clear()
        return released

    def restore(self, tensors: Iterable[Tensor]) -> None:
        # begins the second pass with the tensors that ``release`` handed out
        remaining = iter(tensors)
        self._entries, self.replays = deque(), True
        for name, layout in self._layout:
            if isinstance(layout, KeptTensors):
                layout.restore(remaining)
                self._entries.append((name, layout))
            else:
                self._entries.append((name, tuple(next(remaining) for _ in range(layout))))


class Gradients(NamedTuple):
    # of q, k and v

    q: Tensor
    k: Tensor
    v: Tensor


class LseKernel(Protocol):
    """Interface of a kernel with fixed options; q is [s_q, m, r, d], k is [s_k, m, 1, d], v is [s_k, m, 1, d_v]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the output [s_q, m, r, d_v] and the lse, in one or more tensors."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        """Return the gradients of q, k and v from that of the output."""


def attend_with(kernel: LseKernel, q: Tensor, k: Tensor, v: Tensor, kept: KeptTensors | None = None) -> Tensor:
    # attention [s_q, m, r, d_v], differentiably; ``kept`` keeps output and lse in the first of two passes, which has no
    # gradients, and has them in the second
    if kept is None or kept.replays:
        return _Attention.apply(q, k, v, kernel, None if kept is None else kept.take("attention"))
    results = kernel.forward(q, k, v)
    kept.keep("attention", *results)
    return results[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: LseKernel, results: tuple[Tensor, ...] | None
    ) -> Tensor:
        out, *lse = kernel.forward(q, k, v) if results is None else results
        out = out if results is None else out.detach()  # what was kept stays a plain tensor
        ctx.save_for_backward(q, k, v, out, *lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *ctx.kernel.backward(grad, *ctx.saved_tensors), None, None


def _is_fused(q: Tensor, k: Tensor) -> bool:
    # whether q and k are parts of one fused tensor
    return k.shape[0] == q.shape[0] and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    # for parts of a fused QKV as views of one tensor in its layout: packing them costs nothing
    s, m, r, d = q.shape
    if v.shape[3] == d and _is_fused(q, k):
        packed = empty((s, m, r + 2, d), dtype=q.dtype, device=q.device)
        return Gradients(packed[:, :, :r], packed[:, :, r : r + 1], packed[:, :, r + 1 :])
    return Gradients(*(empty(t.shape, dtype=q.dtype, device=q.device) for t in (q, k, v)))


@dataclass(frozen=True)
class DenseCPU:
    # torch's fused CPU kernel on all pairs, or on those of a causal mask. It is called directly because SDPA saves its
    # output in the kernel's layout, and the output projection a contiguous copy; here both use the copy.

    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s, m, r, d = q.shape
        d_v = v.shape[3]
        if is_small(q) and d == d_v:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            out, lse = flash(*by_head(q, k, v), 0.0, self.causal)
            return out.permute(2, 0, 1, 3).contiguous(), lse  # [m, r, s, d] -> [s, m, r, d]
        out = empty((s, m, r, d_v), dtype=q.dtype, device=q.device)
        lse = torch.empty((m, r, s), dtype=q.dtype if q.dtype == torch.float64 else torch.float32)
        for groups in blocks(m, s * r * max(d, d_v) * q.element_size(), q.device):
            of_heads, lse[groups] = cpu_flash(*by_head(q[:, groups], k[:, groups], v[:, groups]), self.causal)
            out[:, groups] = of_heads.permute(2, 0, 1, 3)  # [m, r, s, d] -> [s, m, r, d]
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        s, m, r, d = q.shape
        if is_small(q) and r == 1 and d == v.shape[3] and _is_fused(q, k):
            flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            results = out.permute(1, 2, 0, 3), lse[0]
            of_heads = flash_backward(grad.permute(1, 2, 0, 3), *by_head(q, k, v), *results, 0.0, self.causal)
            of_q, of_k, of_v = of_heads
            parts = of_q.permute(2, 0, 1, 3), of_k.permute(2, 0, 1, 3), of_v.permute(2, 0, 1, 3)
            return Gradients(*torch.cat(parts, 2).split_with_sizes((1, 1, 1), 2))  # [m, 1, s, d] -> [s, m, 3, d]
        grads = empty_gradients(q, k, v)
        for groups in blocks(m, s * r * max(d, v.shape[3]) * q.element_size(), q.device):
            operands = by_head(q[:, groups], k[:, groups], v[:, groups])
            results = out[:, groups].permute(1, 2, 0, 3), lse[0][groups]
            of_heads = cpu_flash_backward(grad[:, groups].permute(1, 2, 0, 3), *operands, *results, self.causal)
            part_q, part_k, part_v = (t.permute(2, 0, 1, 3) for t in of_heads)
            if r > 1:  # the group's one key and value served all its queries
                part_k, part_v = part_k.sum(2, keepdim=True), part_v.sum(2, keepdim=True)
            grads.q[:, groups], grads.k[:, groups], grads.v[:, groups] = part_q, part_k, part_v
        return grads


def cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # output and lse of torch's fused CPU kernel on [m, r, s, d], with v d_v wide; ``mask`` is additive
    forward, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, v.shape[3]
    scale = None if q.shape[3] == d_v else 1 / math.sqrt(q.shape[3])  # None: the kernel's own, and nothing is padded
    if scale is not None:
        q, k, v = same_widths(q, k, v)
    out, lse = forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :d_v], lse


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None = None
) -> Tensors:  # fmt: skip
    backward, d, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, q.shape[3], v.shape[3]
    scale = None if d == d_v else 1 / math.sqrt(d)
    if scale is not None:
        grad, q, k, v, out = same_widths(grad, q, k, v, out)
    of_q, of_k, of_v = backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return of_q[..., :d], of_k[..., :d], of_v[..., :d_v]


def same_widths(*tensors: Tensor) -> tuple[Tensor, ...]:
    # last dims padded with zeros to the largest, for kernels of one width: zeros change neither scores nor gradients
    widest = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == widest else F.pad(t, (0, widest - t.shape[-1])) for t in tensors)


def by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Permute [s, m, r|1, d] to [m, r, s, d] without a copy."""
    r = q.shape[2]
    q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    return (q, k, v) if r == 1 else (q, k.expand(-1, r, -1, -1), v.expand(-1, r, -1, -1))
