"""Attention kernels of a GPU that give the log of the sums (lse), as ``attention_kernels.LseKernel``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from megatron_sp.ops import flash_packages
from megatron_sp.ops.allocator import to_device
from megatron_sp.ops.attention_kernels import Gradients, by_head, empty_gradients, same_widths
from megatron_sp.ops.attention_pieces import AttentionPiece
from megatron_sp.ops.flash_packages import FlashName, Lengths, Pairs

Tensors = tuple[Tensor, Tensor, Tensor]


# kernel          lse, fp32                                      of a query without keys     causal mask ends at
# TorchFlash      [m, r, s_q]; packed [heads, tokens]            +inf, as flash2             the last query and key
# PackageFlash    [m, r, s_q]; packed [heads, tokens]            flash2 +inf; others -inf    the last query and key
# CUDNN           [m, r, s_q], of cuDNN itself [m, r, s_q, 1]    not known                   the first query and key
#
# Backward takes any output and lse of these shapes, such as those over more keys than these: a query with +inf or with
# an lse far above its own adds nothing; -inf would give infinite probabilities.
class FlashKernel(Protocol):
    """Interface of a flash kernel; tensors are [b, s, heads, d], or packed [tokens, heads, d], k and v with fewer."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the output and lse."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs,
        allocate: Callable[[], Tensors],
    ) -> Tensors:  # fmt: skip
        """Return the gradients of q, k and v, made by ``allocate`` or by the kernel."""


# Sources: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp and aten/src/ATen/native/cudnn/MHA.cpp;
# torch/nn/attention/varlen.py, whose backward calls the flash kernel as this does. Torch 2.11 to 2.13 have the same
# arguments in the same order up to dropout, mask and generator; what came later is optional.
class TorchFlash:
    """torch's flash kernel; FlashAttention 2, or what ``attention_choice.activate`` has put in its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        scale, lengths = _scale(q), _lengths(q, k, pairs)
        forward, d_v = torch.ops.aten._flash_attention_forward, v.shape[-1]
        if d_v != q.shape[-1]:
            q, k, v = same_widths(q, k, v)
        out, lse = forward(q, k, v, *lengths, 0.0, pairs.causal, False, scale=scale, **_window(pairs))[:2]
        return out[..., :d_v], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs,
        allocate: Callable[[], Tensors],
    ) -> Tensors:  # fmt: skip
        generator = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, 0))  # not read
        scale, lengths = _scale(q), _lengths(q, k, pairs)
        d, d_v = q.shape[-1], v.shape[-1]
        if d_v != d:
            grad, q, k, v, out = same_widths(grad, q, k, v, out)
        of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, pairs.causal, *generator, scale=scale, **_window(pairs)
        )
        return of_q[..., :d], of_k[..., :d], of_v[..., :d_v]


@dataclass(frozen=True)
class PackageFlash:
    name: FlashName

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        if q.shape[-1] == v.shape[-1]:
            return flash_packages.forward_with_lse(self.name, q, k, v, pairs, _scale(q))
        scale, d_v = _scale(q), v.shape[-1]
        q, k, v = same_widths(q, k, v)
        out, lse = flash_packages.forward_with_lse(self.name, q, k, v, pairs, scale)
        return out[..., :d_v], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs,
        allocate: Callable[[], Tensors],
    ) -> Tensors:  # fmt: skip
        scale, d, d_v = _scale(q), q.shape[-1], v.shape[-1]
        if d == d_v:
            return flash_packages.backward_from_lse(self.name, grad, q, k, v, out, lse, pairs, allocate, scale)
        grad, q, k, v, out = same_widths(grad, q, k, v, out)

        def allocate_wide() -> Tensors:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

        operands = grad, q, k, v, out, lse, pairs, allocate_wide, scale
        of_q, of_k, of_v = flash_packages.backward_from_lse(self.name, *operands)
        return of_q[..., :d], of_k[..., :d], of_v[..., :d_v]


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _lengths(q: Tensor, k: Tensor, pairs: Pairs) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (None, None, q.shape[1], k.shape[1]) if pairs.lengths is None else pairs.lengths


def _window(pairs: Pairs) -> dict[str, int]:
    reach = pairs.reach()
    return {} if reach is None else {"window_size_left": reach[0], "window_size_right": reach[1]}


@dataclass(frozen=True)
class Dense:
    """A flash kernel on q [s_q, m, r, d], k and v [s_k, m, 1, d] (an ``LseKernel``); lse is [m, r, s_q]."""

    kernel: FlashKernel
    causal: bool
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = _by_group(q, k, v)
        out, lse = self.kernel.forward(q, k, v, Pairs(self.causal, self.window))
        # in our order at once: the output projection would copy it, twice if the blocks are recomputed
        return out.transpose(0, 1).contiguous(), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        def allocate() -> Tensors:
            return _by_group(*empty_gradients(q, k, v))

        of_q, of_k, of_v = _by_group(q, k, v)
        pairs = Pairs(self.causal, self.window)
        operands = grad.transpose(0, 1), of_q, of_k, of_v, out.transpose(0, 1), lse[0]
        return Gradients(*_by_group(*self.kernel.backward(*operands, pairs, allocate)))


def _by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    # [s, m, r|1, d] to [m, s, r|1, d], or back, without a copy
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


@dataclass(frozen=True)
class Packed:
    """A flash kernel on all documents of q [s, m, r, d], k and v [s, m, 1, d] at once; lse is [heads, tokens]."""

    kernel: FlashKernel
    documents: tuple[AttentionPiece, ...]  # their pieces, in order, which cover every row
    columns: int  # of m per sequence
    causal: bool
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(self._by_token(q), self._by_token(k), self._by_token(v), self._pairs(q))
        return self._by_position(out, q.shape[0]), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        def allocate() -> Tensors:
            return torch.empty_like(of_q), torch.empty_like(of_k), torch.empty_like(of_v)

        of_q, of_k, of_v = self._by_token(q), self._by_token(k), self._by_token(v)
        operands = self._by_token(grad), of_q, of_k, of_v, self._by_token(out), lse[0]
        grads = self.kernel.backward(*operands, self._pairs(q), allocate)
        return Gradients(*(self._by_position(t, q.shape[0]) for t in grads))

    def _by_token(self, x: Tensor) -> Tensor:
        return rearrange(x, "s (b g) r d -> (b s) (g r) d", g=self.columns)

    def _by_position(self, x: Tensor, s: int) -> Tensor:
        return rearrange(x, "(b s) (g r) d -> s (b g) r d", s=s, g=self.columns)

    def _pairs(self, q: Tensor) -> Pairs:
        return Pairs(self.causal, self.window, lengths_of(self.documents, q.shape[0], q.device))


def varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: tuple[AttentionPiece, ...], columns: int, kernel: Callable[..., Tensor]
) -> Tensor:
    # attention of q [s, m, r, d] in one call of a kernel that autograd differentiates, of q, k, v [tokens, heads, d],
    # cumulative lengths, int32 [n + 1], and the longest; ``documents`` and ``columns`` as in ``Packed``
    by_token = [rearrange(t, "s (b g) r d -> (b s) (g r) d", g=columns) for t in (q, k, v)]
    lengths = lengths_of(documents, q.shape[0], q.device)
    out = kernel(*by_token, lengths.ends_q, lengths.longest_q)
    return rearrange(out, "(b s) (g r) d -> s (b g) r d", s=q.shape[0], g=columns)


@lru_cache(maxsize=4)
def lengths_of(documents: tuple[AttentionPiece, ...], s: int, device: torch.device) -> Lengths:
    """Return the lengths of documents as a kernel takes them, the same tensor for all layers, without waiting."""
    ends = torch.tensor([0, *(piece.sequence * s + piece.q_stop for piece in documents)], dtype=torch.int32)
    longest = max(piece.q_stop - piece.q_start for piece in documents)
    ends = to_device(ends, device)
    return Lengths(ends, ends, longest, longest)


@dataclass(frozen=True)
class CUDNN:
    """cuDNN's kernel on q [s_q, m, r, d], k and v [s_k, m, 1, d] (an ``LseKernel``), if ``takes_cudnn`` allows it."""

    causal: bool
    groups: bool  # keys and values are given as they are; else once for each query

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scale, forward = _scale(q), torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse = forward(*self._operands(q, k, v), None, True, 0.0, self.causal, False, scale=scale)[:2]
        return out.permute(2, 0, 1, 3).contiguous(), lse.squeeze(3)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Gradients:
        generator = torch.empty((), dtype=torch.int64, device=q.device)  # not read without dropout
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad.permute(1, 2, 0, 3), *self._operands(q, k, v), out.permute(1, 2, 0, 3), lse[0].unsqueeze(3), generator,
            generator, None,
            None, None, q.shape[0], k.shape[0], 0.0, self.causal, scale=_scale(q),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (t.permute(2, 0, 1, 3) for t in grads)
        if grad_k.shape[2] > 1:  # the group's one key and value served all its queries
            grad_k, grad_v = grad_k.sum(2, keepdim=True), grad_v.sum(2, keepdim=True)
        return Gradients(grad_q, grad_k, grad_v)

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return _by_head_in_groups(q, k, v) if self.groups else by_head(q, k, v)


def takes_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> CUDNN | None:
    """Return cuDNN's kernel if SDPA would give it forward and backward of this, or None."""
    r = q.shape[2]
    for groups in (True, False) if r > 1 else (False,):
        operands = _by_head_in_groups(q, k, v) if groups else by_head(q, k, v)
        # in both passes alike: it takes more without gradients
        query, key, value = (t.detach().requires_grad_() for t in operands)
        params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, groups)
        if torch.backends.cuda.can_use_cudnn_attention(params):
            return CUDNN(causal, groups)
    return None


def _by_head_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    # [s, m, r|1, d] to [m, r|1, s, d] without a copy
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
