"""Attention by several kernels behind one call: ``core_attention`` on q, k and v of independent groups of heads.

Groups are folded into the batch ([s, b*g, r, d], r queries to one key and value), so grouped-query attention needs
neither a copy nor a special case. Packed documents, padding and windows are pieces of the square of queries and keys
(``ops/attention_pieces.py``), and only these are computed: on the CPU by ``TiledAttention``, on a GPU by one call of a
flash kernel for packed sequences, or a call for each piece. ``ops/attention_choice.py`` chooses the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_sp.ops import flash_packages
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.attention_kernels import DenseCPU, KeptTensors, LseKernel, attend_with, by_head, same_widths
from megatron_sp.ops.attention_pieces import (
    AttentionPiece,
    Stage,
    pieces_of_documents,
    pieces_of_lengths,
    stage_of,
    tiles_of,
)
from megatron_sp.ops.dropout import fold32, keep_mask
from megatron_sp.ops.flash_packages import FLASH_NAMES, MOST_HEAD_DIM, lse_lack
from megatron_sp.ops.gpu_kernels import Dense, PackageFlash, Packed, TorchFlash, takes_cudnn, varlen
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.partial_attention import one_by_one
from megatron_sp.ops.rotary import rotate_
from megatron_sp.ops.tiled_attention import TiledAttention, band_mask

# flash2, flash3, flash4    packages of FlashAttention, on a GPU (``ops/flash_packages.py``)
# sdpa                      torch's scaled_dot_product_attention, with its fused kernels for CPU and GPU
# cudnn                     the same with cuDNN's kernel before its others, where that knows the mask
# sdpa-fa3, sdpa-fa4        the same after FlashAttention 3 or 4 has taken the place of its flash kernel
# reference                 plain matrix products; the only one whose dropout is the same in every parallel layout
KernelName = Literal["flash2", "flash3", "flash4", "cudnn", "sdpa", "sdpa-fa3", "sdpa-fa4", "reference"]
Rotary = tuple[Tensor, Tensor]  # cos and sin
Pieces = tuple[AttentionPiece, ...]

_MASK_ELEMENTS = 2**24
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_HAS_CPU_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")


@dataclass(frozen=True)
class AttentionMask:
    """Attention mask as a small object instead of an s x s tensor."""

    causal: bool = True  # with fewer queries than keys the *last* query attends to all keys
    key_lengths: Tensor | None = None  # int64 [b]; keys at or beyond a sequence's length are padding
    # for each of the b sequences the ends of its documents, of which a query sees its own; not with ``key_lengths``
    documents: tuple[tuple[int, ...], ...] | None = None
    # ``key_lengths`` on the host, so that kernels compute real keys only; None: read, for which the host waits
    lengths: tuple[int, ...] | None = None
    window: int | None = None  # keys that a query attends to, itself included; for causal masks
    bias: Tensor | None = None  # [b, 1, 1, s_k], added to the scores of one query per sequence; replaces all others

    def lengths_on_host(self) -> tuple[int, ...] | None:
        """Return the key lengths, or None if getting them would mean waiting for a device."""
        if self.lengths is not None or self.key_lengths is None or self.key_lengths.device.type != "cpu":
            return self.lengths
        return tuple(self.key_lengths.tolist())


def attention(
    qkv: Tensor, queries_per_group: int, head_dim: int, mask: AttentionMask, *, kernel: KernelName = "sdpa",
    dropout: float = 0.0, dropout_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(d)) v from ``qkv`` [s, b, g * (r + 2) * d], rows in group order: [s, b, g * r * d].

    ``dropout_rows``: int32 [s, b], the tokens' keys for dropout by hash (the reference kernel's).
    """
    s, b, width = qkv.shape
    groups = width // ((queries_per_group + 2) * head_dim)
    q, k, v = split_qkv(qkv, queries_per_group, head_dim)
    rows = None if dropout_rows is None else head_row_keys(dropout_rows, groups, queries_per_group)
    out = core_attention(q, k, v, fold_mask(mask, groups), kernel=kernel, dropout=dropout, dropout_rows=rows)
    return out.reshape(s, b, groups * queries_per_group * head_dim)


def split_qkv(
    qkv: Tensor, queries_per_group: int, head_dim: int, rotary: Rotary | None = None, v_width: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the fused tensor, q [s, b*g, r, d], k [s, b*g, 1, d] and v [s, b*g, 1, d_v].

    Backward packs the gradients once. With ``rotary`` (cos, sin) queries and keys are rotated first, in place; backward
    rotates the packed gradient in place, since nothing else uses it.
    """
    return _SplitQKV.apply(qkv, queries_per_group, head_dim, rotary, v_width)


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, queries_per_group: int, head_dim: int, rotary: Rotary | None, v_width: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, ctx.rotary = qkv.shape, rotary
        return cut_qkv(qkv, queries_per_group, head_dim, rotary, v_width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_q, grad_k, grad_v = grads
        return join_qkv(grad_q, grad_k, grad_v, ctx.shape, ctx.rotary), None, None, None, None


def cut_qkv(
    qkv: Tensor, queries_per_group: int, head_dim: int, rotary: Rotary | None, v_width: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``split_qkv`` does, without a graph."""
    (s, b, width), r, d_v = qkv.shape, queries_per_group, v_width or head_dim
    of_group = (r + 1) * head_dim + d_v
    groups = qkv.view(s, b * (width // of_group), of_group)
    heads, v = groups.split_with_sizes((of_group - d_v, d_v), 2)
    heads = heads.view(s, groups.shape[1], r + 1, head_dim)
    if rotary is not None:
        rotate_(heads, *rotary)
    q, k = heads.split_with_sizes((r, 1), 2)
    return q, k, v[:, :, None]


def join_qkv(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, shape: torch.Size, rotary: Rotary | None) -> Tensor:
    """Return the gradient of the fused tensor, in the memory of those of its parts if they are views of one tensor."""
    (s, m, r, d), d_v = grad_q.shape, grad_v.shape[3]
    if d != d_v:
        packed = empty((s, m, (r + 1) * d + d_v), dtype=grad_q.dtype, device=grad_q.device)
        heads = packed[:, :, : (r + 1) * d].view(s, m, r + 1, d)
        heads[:, :, :r], heads[:, :, r:], packed[:, :, None, (r + 1) * d :] = grad_q, grad_k, grad_v
        if rotary is not None:
            rotate_(heads, *rotary, back=True)
        return packed.view(shape)
    base = grad_q._base
    if base is None or base.shape != (s, m, r + 2, d) or base is not grad_k._base or base is not grad_v._base:
        if is_fused(grad_q):
            from megatron_sp.ops.kernels import rotary as kernels

            return kernels.pack(grad_q, grad_k, grad_v, rotary).view(shape)
        base = empty((s, m, r + 2, d), dtype=grad_q.dtype, device=grad_q.device)
        base[:, :, :r], base[:, :, -2:-1], base[:, :, -1:] = grad_q, grad_k, grad_v
    if rotary is not None:
        rotate_(base[:, :, : r + 1], *rotary, back=True)
    return base.view(shape)


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, kernel: KernelName, dropout: float = 0.0,
    dropout_rows: Tensor | None = None, kept: KeptTensors | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(d)) v of m independent groups: q [s_q, m, r, d], k and v [s_k, m, 1, d or d_v].

    Returns [s_q, m, r, d_v]; zero for a query without keys (all padding, or causal with more queries than keys). The
    mask's ``key_lengths`` are [m], ``dropout_rows`` int32 [m, r, s_q]. ``kept`` keeps the results for a recomputation,
    or has them.
    """
    kernel, mask = _settled(kernel, mask, k)
    if dropout == 0.0 and (kept is not None or _is_for_cpu_flash(q, kernel)):
        with_lse = lse_kernel(q, k, v, mask, kernel)
        if with_lse is not None:
            return attend_with(with_lse, q, k, v, kept)
    pieces, each = _pieces_of(q, k, mask, kernel)
    if pieces is not None:
        return _by_piece(q, k, v, pieces, each, mask, kernel, dropout, dropout_rows, kept)
    if kernel in FLASH_NAMES:
        if mask.key_lengths is not None or mask.bias is not None:
            return _sdpa(q, k, v, mask, dropout)  # it wants packed sequences for padding, and takes no bias
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = flash_packages.attend(kernel, q, k, v, causal=mask.causal, window=mask.window, dropout=dropout)
        return out.transpose(0, 1)  # [m, s, r, d_v] -> [s, m, r, d_v]
    if kernel == "sdpa":
        return _sdpa(q, k, v, mask, dropout)
    if kernel == "cudnn":
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            return _sdpa(q, k, v, mask, dropout)
    return _reference(q, k, v, mask, dropout, dropout_rows)


def lse_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, kernel: KernelName) -> LseKernel | None:
    """Return the kernel, with its options, that gives for ``core_attention``'s arguments what its backward needs.

    None: there is none, and ``core_attention`` computes with one that autograd differentiates.
    """
    kernel, mask = _settled(kernel, mask, k)
    if kernel == "reference" or (kernel in FLASH_NAMES and lse_lack(kernel)):
        return None
    on_cpu = _is_for_cpu_flash(q, kernel)
    pieces, each = _pieces_of(q, k, mask, kernel)
    causal, window, s_q, s_k = mask.causal, mask.window, q.shape[0], k.shape[0]
    if pieces is not None:
        if on_cpu:
            return TiledAttention(stage_of(pieces, window), q.shape[1] // each)
        if not _are_documents(pieces, each, q) or not (kernel in FLASH_NAMES or torch_has_varlen(q, v)):
            return None
        flash = PackageFlash(kernel) if kernel in FLASH_NAMES else TorchFlash()
        return Packed(flash, pieces, each, causal, window)
    if mask.key_lengths is not None or mask.bias is not None:
        return None
    if kernel in FLASH_NAMES:
        return Dense(PackageFlash(kernel), causal, window)
    aligned = causal and s_q == s_k
    if (window is not None or (causal and s_q > 1)) and not aligned:
        return None
    if on_cpu:
        return DenseCPU(aligned) if window is None else TiledAttention(_all_pairs(s_q, s_k, aligned, window), 1)
    if not torch_has_varlen(q, v):
        return None
    on_cudnn = takes_cudnn(q, k, v, aligned) if kernel == "cudnn" and window is None else None
    return on_cudnn or Dense(TorchFlash(), aligned, window)


def _is_for_cpu_flash(q: Tensor, kernel: KernelName) -> bool:
    return q.device.type == "cpu" and kernel in ("sdpa", "cudnn") and _HAS_CPU_FLASH


def _settled(kernel: KernelName, mask: AttentionMask, k: Tensor) -> tuple[KernelName, AttentionMask]:
    # a kernel by the name of those that are called alike, and a mask without a window that hides nothing
    assert mask.window is None or mask.causal, "a window is for causal attention"
    if mask.window is not None and mask.window >= k.shape[0]:
        mask = replace(mask, window=None)
    return "sdpa" if kernel in ("sdpa-fa3", "sdpa-fa4") else kernel, mask


def _all_pairs(s_q: int, s_k: int, causal: bool, window: int | None = None) -> Stage:
    return stage_of((AttentionPiece(-1, 0, s_q, 0, s_k, "diagonal" if causal else "full"),), window)


def _pieces_of(q: Tensor, k: Tensor, mask: AttentionMask, kernel: KernelName) -> tuple[Pieces | None, int]:
    # the pieces within which attention is computed, if the mask has several, and the columns of m per sequence
    if mask.documents is not None:
        return pieces_of_documents(mask.documents, mask.causal), q.shape[1] // len(mask.documents)
    if mask.key_lengths is None or kernel == "reference" or q.shape[0] != k.shape[0] or mask.window is not None:
        return None, 1
    lengths = mask.lengths_on_host()
    if lengths is None and q.shape[0] > 1:
        lengths = tuple(mask.key_lengths.tolist())  # the host waits: a mask [m, s, s] would cost more
    if lengths is None:
        return None, 1
    return pieces_of_lengths(lengths, k.shape[0], mask.causal), q.shape[1] // len(lengths)


def _are_documents(pieces: Pieces, each: int, q: Tensor) -> bool:
    # whether pieces have as many keys as queries and cover every row
    cover = each * sum(piece.q_stop - piece.q_start for piece in pieces) == q.shape[0] * q.shape[1]
    return cover and all(piece.k_stop == piece.q_stop for piece in pieces)


def why_repeated(kernel: KernelName, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> str:
    """Return why the results of ``core_attention`` cannot be kept for a recomputation; empty if they can.

    Kept are output and log of the sums of kernels whose backward takes them. Ranks may differ in it, by their packages.
    """
    if kernel == "reference":
        return "the plain form gives no log of its sums"
    if dropout > 0:
        return "with attention dropout a kernel draws its mask, which is not kept"
    if device.type == "cpu" and kernel not in FLASH_NAMES:
        lack = f"torch {torch.__version__} has no fused kernel for a CPU whose backward can be called"
        return "" if _HAS_CPU_FLASH else lack
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"torch's kernel for {name} on a GPU is not a flash kernel, and its results are not kept"
    if head_dim % 8 or head_dim > MOST_HEAD_DIM:
        return f"no flash kernel takes heads {head_dim} wide as they are (a multiple of 8, at most {MOST_HEAD_DIM})"
    if kernel in FLASH_NAMES:
        return lse_lack(kernel)
    return "" if _has_flash(device) else "torch has no flash kernel on this GPU"


def _by_piece(
    q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, each: int, mask: AttentionMask, kernel: KernelName, dropout: float,
    dropout_rows: Tensor | None, kept: KeptTensors | None,
) -> Tensor:  # fmt: skip
    # attention within pieces only; ``each``: columns of m per sequence; of ``mask``, ``causal`` and ``window`` apply
    causal, window = mask.causal, mask.window
    if _are_documents(pieces, each, q):  # a call for all of them, if a kernel takes packed sequences
        options: dict[str, Any] = {"causal": causal, "window": window, "dropout": dropout}
        if kernel in FLASH_NAMES:
            return varlen(q, k, v, pieces, each, partial(flash_packages.attend, kernel, **options))
        if kernel in ("sdpa", "cudnn") and torch_has_varlen(q, v):
            return varlen(q, k, v, pieces, each, partial(_flash_of_torch, **options))

    def attend(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece) -> Tensor:
        columns, n = slice(piece.sequence * each, (piece.sequence + 1) * each), len(k)
        if causal and n < len(q):  # kernels put the last query at the last key: these are at the first, others see all
            parts = (AttentionMask(True), q[:n]), (AttentionMask(False), q[n:])
            return torch.cat([core_attention(x, k, v, m, kernel=kernel, dropout=dropout, kept=kept) for m, x in parts])
        rows = None if dropout_rows is None else dropout_rows[columns, :, piece.q_start : piece.q_stop]
        mask = AttentionMask(causal, window=window)
        return core_attention(q, k, v, mask, kernel=kernel, dropout=dropout, dropout_rows=rows, kept=kept)

    return one_by_one(q, k, v, pieces, each, attend)


def _flash_of_torch(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, longest: int, *, causal: bool, window: int | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    # torch's flash kernel on a GPU itself, since SDPA supports neither cumulative sequence lengths nor windows
    more: dict[str, Any] = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    d_v = v.shape[-1]
    if d_v != q.shape[-1]:
        more["scale"] = 1 / math.sqrt(q.shape[-1])
        q, k, v = same_widths(q, k, v)
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, ends, ends, longest, longest, dropout, causal, False, **more)[0]
    return out if d_v == out.shape[-1] else out[..., :d_v]


def torch_has_varlen(q: Tensor, v: Tensor | None = None) -> bool:
    """Return whether torch's flash kernel takes q and v with cumulative lengths, by the conditions of SDPA."""
    width = q.shape[-1] if v is None else max(q.shape[-1], v.shape[-1])  # the narrower heads are padded
    fits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and width <= MOST_HEAD_DIM and width % 8 == 0
    return fits and _has_flash(q.device)


def _has_flash(device: torch.device) -> bool:
    return (
        torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_ends(documents: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Return the ends of each sequence's documents from the tokens' indices, int [b, s]; None if each has one."""
    b, s = documents.shape
    last = torch.ones(b, s, dtype=torch.bool, device=documents.device)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    ends: list[list[int]] = [[] for _ in range(b)]
    for sequence, position in last.nonzero().tolist():
        ends[sequence].append(position + 1)
    return None if all(len(e) <= 1 for e in ends) else tuple(tuple(e) for e in ends)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    if mask.bias is not None:
        return _any_sdpa(q, k, v, mask.bias, dropout)
    if mask.window is not None and mask.key_lengths is None:
        return _sdpa_in_windows(q, k, v, mask.window, dropout)
    s_q, s_k = q.shape[0], k.shape[0]
    aligned = mask.causal and s_q == s_k and mask.key_lengths is None
    if not aligned and (mask.key_lengths is not None or (mask.causal and s_q > 1)):
        return _sdpa_with_mask(q, k, v, mask, dropout)
    return _any_sdpa(q, k, v, None, dropout, aligned)


def _sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    # with the mask as a tensor, for some of the queries at a time, so that it is never s_q x s_k for long sequences;
    # training needs no such mask, so nothing keeps the tiles' masks for backward
    s_q, s_k = q.shape[0], k.shape[0]
    behind = s_k - s_q  # position of the first query among the keys
    blind = max(0, -behind) if mask.causal else 0  # queries before the first key
    rows = max(1, _MASK_ELEMENTS // (s_k * (1 if mask.key_lengths is None else q.shape[1])))
    tiles = [q.new_zeros((blind, *q.shape[1:3], v.shape[3]))] if blind else []
    for first in range(blind, s_q, rows):
        last = min(first + rows, s_q)
        first_key = 0 if mask.window is None else max(0, first + behind - mask.window + 1)
        keys = slice(first_key, last + behind if mask.causal else s_k)
        allowed = _allowed(mask, s_q, s_k, q.device, slice(first, last), keys)
        tiles.append(_any_sdpa(q[first:last], k[keys], v[keys], allowed, dropout))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _any_sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dropout: float, causal: bool = False) -> Tensor:
    # torch's choice of kernel; [s, m, r, d] -> [m, r, s, d] and back are views, since the kernels take strides
    if q.device.type == "cuda":
        return _fused_sdpa(q, k, v, allowed, dropout, causal)
    q, k, v = by_head(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal)
    return out.permute(2, 0, 1, 3)


def _fused_sdpa(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dropout: float, causal: bool = False
) -> Tensor:
    # SDPA on a GPU with any of its kernels but the one that writes all scores [m, r, s_q, s_k] to memory, which it
    # takes without a word where no other applies. The flash and cuDNN kernels know grouped queries; the
    # memory-efficient one (fp32, masks) does not: its keys and values are expanded with stride 0, which is right in
    # backward (pytorch #191085). It wants heads of a multiple of 16 bytes; zeros beside them change no score
    (r, d), d_v, backends = q.shape[2:], v.shape[3], torch.backends.cuda
    math_before = backends.math_sdp_enabled()
    backends.enable_math_sdp(False)  # what else may be taken stays as it is, unlike with ``sdpa_kernel``
    try:
        operands = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        params = backends.SDPAParams(*operands, None, dropout, causal, r > 1)
        takes_groups = allowed is None and (
            backends.can_use_flash_attention(params) or backends.can_use_cudnn_attention(params)
        )
        if not takes_groups:
            if d % 8 or d_v % 8:
                q, k, v = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
            operands = by_head(q, k, v)
        query, key, value = operands
        try:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=1 / math.sqrt(d),
                enable_gqa=takes_groups and r > 1,
            )  # fmt: skip
        except RuntimeError as error:
            if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                raise
            dtype = str(q.dtype).removeprefix("torch.")
            raise RuntimeError(
                f"no fused kernel of torch computes attention in {dtype} with heads {d} wide on this GPU, and the plain"
                " one holds the scores of all pairs of tokens in memory: --attention-backend unfused asks for it"
            ) from error
    finally:
        backends.enable_math_sdp(math_before)
    return out[..., :d_v].permute(2, 0, 1, 3)


def _sdpa_in_windows(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float) -> Tensor:
    # causal attention with a window shorter than the keys. Where no kernel supports windows (fp32 on a GPU, dropout on
    # the CPU), tiles of queries are computed one by one; all but the first and the last share a mask
    s_q, s_k = q.shape[0], k.shape[0]
    if s_q < s_k:  # generation: the last queries of all
        k, v = (t[max(0, s_k - s_q - window + 1) :] for t in (k, v))
        mask = AttentionMask(window=window if k.shape[0] > window else None)
        return _sdpa_with_mask(q, k, v, mask, dropout) if s_q > 1 else _any_sdpa(q, k, v, None, dropout)
    if s_q > s_k:
        return _sdpa_with_mask(q, k, v, AttentionMask(window=window), dropout)
    if torch_has_varlen(q, v):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [m, s, r, d]
        return _flash_of_torch(q, k, v, None, s_q, causal=True, window=window, dropout=dropout).transpose(0, 1)
    parts = []
    for tile in tiles_of(_all_pairs(s_q, s_k, True, window).pieces, window):
        rows, seen = slice(tile.start, tile.start + tile.queries), slice(tile.first_key, tile.first_key + tile.keys)
        allowed = band_mask(tile, window, q.dtype, q.device) if tile.kind == "band" else None
        parts.append(_any_sdpa(q[rows], k[seen], v[seen], allowed, dropout, causal=tile.kind == "diagonal"))
    return torch.cat(parts)


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float, rows: Tensor | None) -> Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [m, r|1, s, d]
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])  # [m, r, s_q, s_k]
    allowed = _allowed(mask, q.shape[2], k.shape[2], q.device)
    if mask.bias is not None:
        scores = scores + mask.bias
    if allowed is not None:
        # not -inf: a query that sees nothing would become NaN
        scores = scores.masked_fill(~allowed, torch.finfo(wide).min)
    probs = torch.softmax(scores, dim=-1)
    if allowed is not None and (mask.key_lengths is not None or q.shape[2] > k.shape[2]):
        probs = probs.masked_fill(~allowed, 0.0)  # such a query gets zero, as in the other kernels
    if dropout > 0:
        if rows is None:
            raise RuntimeError("attention dropout needs the tokens' dropout keys: pass DropoutKeys with the batch")
        probs = probs * keep_mask(rows, probs.shape[-1], dropout) * (1.0 / (1.0 - dropout))
    return torch.matmul(probs.to(v.dtype), v).permute(2, 0, 1, 3)


def _allowed(
    mask: AttentionMask, s_q: int, s_k: int, device: torch.device, queries: slice = slice(None),
    keys: slice = slice(None),
) -> Tensor | None:  # fmt: skip
    # bool, broadcastable to [m, r, queries, keys], True where allowed; None if nothing is masked
    rows = torch.arange(s_q, device=device)[queries]
    at = torch.arange(s_k, device=device)[keys]
    allowed = None
    if mask.causal:
        last = rows[:, None] + (s_k - s_q)
        allowed = at <= last
        allowed = allowed if mask.window is None else allowed & (at > last - mask.window)
    if mask.key_lengths is not None:
        inside = (at < mask.key_lengths[:, None])[:, None, None, :]
        allowed = inside if allowed is None else inside & allowed
    return allowed


def fold_mask(mask: AttentionMask, groups: int) -> AttentionMask:
    """Return the mask of b sequences expanded to their b * groups groups of heads."""
    if mask.key_lengths is None:
        return mask
    return replace(mask, key_lengths=mask.key_lengths.repeat_interleave(groups), lengths=mask.lengths_on_host())


def head_row_keys(rows: Tensor, groups: int, queries_per_group: int, first_head: int = 0) -> Tensor:
    """Return dropout keys of each query and head: int32 [s, b] -> [b*g, r, s]; heads count globally."""
    heads = torch.arange(first_head, first_head + groups * queries_per_group, device=rows.device, dtype=torch.int64)
    mixed = (rows.to(torch.int64)[..., None] * 0x10001 + heads + 1) * -7046029254386353131  # 2^64 / golden ratio, odd
    return rearrange(fold32(mixed ^ (mixed >> 29)), "s b (g r) -> (b g) r s", g=groups)
