"""A ``flash_attn`` for machines without a GPU, over torch's fused CPU kernel, so that ring-flash-attention and USP train there.

It has what those two call, under the signatures of flash-attn 2.8: forward and backward of one block, and of packed
documents one after another. Windows mean what they mean in flash-attn: with fewer queries than keys the last query
belongs to the last key. ``install`` also puts an empty module in the place of ring-flash-attention's adapters for
transformers, which are not for this use and need a version of it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"


def install() -> None:
    """Let ``import flash_attn`` find this module's functions."""
    interface = _module("flash_attn.flash_attn_interface")
    package = _module("flash_attn", __version__=VERSION, flash_attn_interface=interface, __path__=[])
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):  # named on import, not called
        setattr(package, name, _not_called)
        setattr(interface, name, _not_called)
    _module("ring_flash_attn.adapters", substitute_hf_flash_attn=_not_called, update_ring_flash_attn_params=_not_called)


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


def _not_called(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "the flash_attn of benchmarks/flash_attn_cpu.py has the functions of ring attention alone"
    )


def _mask(queries: int, keys: int, causal: bool, left: int, right: int, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask [queries, keys] of a window; None without one."""
    if left < 0 and right < 0:
        assert not causal or queries == keys, "the kernel's causal mask is for as many queries as keys"
        return None
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return out [b, s, n, d] and lse [b, n, s] for q, k, v [b, s, n, d]."""
    assert dropout_p == 0 and not softcap and alibi_slopes is None
    mask = _mask(q.shape[1], k.shape[1], causal, window_size_left, window_size_right, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        causal and mask is None,
        attn_mask=mask,
        scale=softmax_scale,
    )
    if mask is not None:  # the kernel gives a query without keys 0
        nothing = (mask == -torch.inf).all(1)
        lse, out = lse.masked_fill(nothing, -torch.inf), out.masked_fill(nothing[:, None], 0)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients into dq, dk and dv, all [b, s, n, d]."""
    assert dropout_p == 0 and not softcap and alibi_slopes is None
    mask = _mask(q.shape[1], k.shape[1], causal, window_size_left, window_size_right, q.dtype)
    operands = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, softmax_lse, 0.0, causal and mask is None, attn_mask=mask, scale=softmax_scale
    )
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient.transpose(1, 2))


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return out [tokens, n, d] and lse [n, tokens] for packed q, k, v [tokens, n, d]."""
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        found, sums, _, _ = _flash_attn_forward(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            dropout_p,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
        )
        out[rows], lse[:, rows] = found[0], sums[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients into dq, dk and dv, all [tokens, n, d]."""
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        _flash_attn_backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], softmax_lse[None, :, rows].contiguous(),
            dq[None, rows], dk[None, keys], dv[None, keys], dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        )  # fmt: skip


def _documents(ends_of_queries: Tensor, ends_of_keys: Tensor) -> list[tuple[slice, slice]]:
    rows, keys = ends_of_queries.tolist(), ends_of_keys.tolist()
    return [(slice(*rows[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(rows) - 1)]
