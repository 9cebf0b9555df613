"""FlashAttention's packages played on the CPU: versions 2, 3 and 4 with their names, signatures, checks and results.

Facts from Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (2.8),
hopper/flash_attn_interface.py and hopper/flash_api.cpp, flash_attn/cute/interface.py (4.0.0b36), which is alone in its
package: flash_attn is then a folder without ``__init__.py``. Arguments that have a default there and are of no use here
are left out. Numbers are computed in fp32 and rounded once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sp.ops import attention_choice, availability, flash_packages

FLASH2 = "from support.flash_stand_in import flash2_func as flash_attn_func, flash2_varlen_func as flash_attn_varlen_func\n"
FLASH3 = (
    "from support.flash_stand_in import flash3_func as flash_attn_func, flash3_varlen_func as flash_attn_varlen_func\n"
    "from support.flash_stand_in import flash3_forward as _flash_attn_forward, flash3_backward as _flash_attn_backward\n"
)
FLASH4 = "from support.flash_stand_in import flash4_func as flash_attn_func, flash4_varlen_func as flash_attn_varlen_func\n"
UNDER_FLASH2 = (
    "from support.flash_stand_in import flash2_forward as _flash_attn_forward, flash2_backward as _flash_attn_backward\n"
    "from support.flash_stand_in import flash2_varlen_forward as _flash_attn_varlen_forward\n"
    "from support.flash_stand_in import flash2_varlen_backward as _flash_attn_varlen_backward\n"
)
UNDER_FLASH4 = "from support.flash_stand_in import flash4_fwd as _flash_attn_fwd, flash4_bwd as _flash_attn_bwd\n"
calls: list[tuple[str, bool]] = []
"""Names of the functions that were called, and whether the deterministic backward was asked for."""


def _pairs(s_q: int, s_k: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Which query attends to which key: aligned at the end, a window counted in keys before and after."""
    distance = torch.arange(s_k) - torch.arange(s_q)[:, None] - (s_k - s_q)
    allowed = torch.ones(s_q, s_k, dtype=torch.bool)
    if causal:
        right = 0
    if right is not None:
        allowed &= distance <= right
    if left is not None:
        allowed &= distance >= -left
    return allowed


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """[b, s, heads, d] with [b, s, groups, d]."""
    r = q.shape[2] // k.shape[2]
    wide = [t.float().repeat_interleave(n, 2).transpose(1, 2) for t, n in ((q, 1), (k, r), (v, r))]
    scores = (wide[0] @ wide[1].transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e30)
    return (torch.softmax(scores, -1) * allowed @ wide[2]).transpose(1, 2).to(q.dtype)


def _checked(q: Tensor, k: Tensor, v: Tensor, dim: int, multiple: int) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.dim() != dim or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise RuntimeError("q, k and v must have matching shapes")
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-1] > 256 or q.shape[-1] % multiple:
        raise RuntimeError(f"head_size should be a multiple of {multiple} and at most 256")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def _dense(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Any, deterministic: bool, none: Any, multiple: int) -> Tensor:
    calls.append((name, deterministic))
    _checked(q, k, v, 4, multiple)
    left, right = (None if side == none else side for side in window)
    return _attend(q, k, v, _pairs(q.shape[1], k.shape[1], causal, left, right))


def _packed(
    name: str, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, window: Any, deterministic: bool, none: Any
) -> Tensor:
    calls.append((name, deterministic))
    _checked(q, k, v, 3, 8)
    if ends.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    places = ends.tolist()
    assert places[0] == 0 and places[-1] == q.shape[0] and max(b - a for a, b in pairwise(places)) == longest
    left, right = (None if side == none else side for side in window)
    parts = [_attend(q[None, a:b], k[None, a:b], v[None, a:b], _pairs(b - a, b - a, causal, left, right))[0] for a, b in pairwise(places)]
    return torch.cat(parts)


def _scaled(q: Tensor, softmax_scale: float | None) -> Tensor:
    return q if softmax_scale is None else q * (softmax_scale * q.shape[-1] ** 0.5)


def flash2_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """The output alone; heads of any width are padded."""
    out = _dense("flash2", _scaled(q, softmax_scale), k, v, causal, window_size, deterministic, -1, 1)
    return torch.nn.functional.dropout(out, dropout_p) if dropout_p else out


def flash2_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """The output alone."""
    return _packed("flash2 packed", _scaled(q, softmax_scale), k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, -1)


def flash3_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """No dropout."""
    return _dense("flash3", _scaled(q, softmax_scale), k, v, causal, window_size, deterministic, -1, 8)


def flash3_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Lengths before the scale, as in version 2."""
    return _packed("flash3 packed", _scaled(q, softmax_scale), k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, -1)


def flash4_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
    deterministic: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output, and the log of the sums if asked for; no window is (None, None)."""
    return _dense("flash4", _scaled(q, softmax_scale), k, v, causal, window_size, deterministic, None, 8), None


def flash4_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None), deterministic: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A tensor before the lengths."""
    return _packed(
        "flash4 packed", _scaled(q, softmax_scale), k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, None
    ), None


# under the public functions: forward with the log of the sums, backward from it; no autograd


def forward_of(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, empty: float, scale: float) -> tuple[Tensor, Tensor]:
    """[b, s, heads, d] with [b, s, groups, d]: the output, and lse [b, heads, s]; ``empty``: of a query without keys."""
    q, k, v, dtype = *_wide(q, k, v), q.dtype
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    blind = lse == -torch.inf
    probabilities = (scores - lse.masked_fill(blind, 0.0)[..., None]).exp()
    return (probabilities @ v).transpose(1, 2).to(dtype), lse.masked_fill(blind, empty).float()


def backward_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from any output and lse; keys and values have one for each of their queries, summed at the end."""
    groups, dtype = k.shape[2], q.dtype
    wide_q, wide_k, wide_v = _wide(q, k, v)
    dout, out = dout.to(wide_q.dtype).transpose(1, 2), out.to(wide_q.dtype).transpose(1, 2)
    p = ((wide_q @ wide_k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf) - lse[..., None]).exp()
    ds = p * (dout @ wide_v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ wide_k, ds.transpose(-1, -2) @ wide_q, p.transpose(-1, -2) @ dout
    dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
    return tuple(t.transpose(1, 2).to(dtype) for t in (dq, dk, dv))  # type: ignore[return-value]


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r = q.shape[2] // k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    return tuple(t.to(dtype).repeat_interleave(n, 2).transpose(1, 2) for t, n in ((q, 1), (k, r), (v, r)))  # type: ignore[return-value]


def _spans(cu_q: Tensor | None, cu_k: Tensor | None, max_q: Any, max_k: Any, q: Tensor) -> list[tuple[slice, slice]]:
    """The rows of each packed sequence, whose ends are checked."""
    if cu_q is None or cu_k is None:
        assert cu_q is None and cu_k is None and q.dim() == 4
        return []
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert q.dim() == 3 and ends_q[0] == ends_k[0] == 0 and ends_q[-1] == q.shape[0]
    assert max_q == max(b - a for a, b in pairwise(ends_q)) and max_k == max(b - a for a, b in pairwise(ends_k))
    return [(slice(*at), slice(*of)) for at, of in zip(pairwise(ends_q), pairwise(ends_k), strict=True)]


def lse_forward(
    q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[slice, slice]], causal: bool, left: int | None, right: int | None, scale: float,
    empty: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense, or packed: then lse is [heads, tokens]."""
    assert not any(t.requires_grad for t in (q, k, v)) or not torch.is_grad_enabled(), "no autograd here"
    if not spans:
        return forward_of(q, k, v, _pairs(q.shape[1], k.shape[1], causal, left, right), empty, scale)
    parts = []
    for at, of in spans:
        allowed = _pairs(at.stop - at.start, of.stop - of.start, causal, left, right)
        parts.append(forward_of(q[None, at], k[None, of], v[None, of], allowed, empty, scale))
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def lse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: list[tuple[slice, slice]], causal: bool,
    left: int | None, right: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Dense, or packed."""
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise RuntimeError("lse must be contiguous, and float32")
    if out.shape != q.shape or dout.shape != q.shape:
        raise RuntimeError("out and its gradient must have the shape of q")
    if lse.shape != ((q.shape[1], q.shape[0]) if spans else (q.shape[0], q.shape[2], q.shape[1])):
        raise RuntimeError("lse has another shape than here")
    if not spans:
        return backward_of(dout, q, k, v, out, lse, _pairs(q.shape[1], k.shape[1], causal, left, right), scale)
    grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for at, of in spans:
        allowed = _pairs(at.stop - at.start, of.stop - of.start, causal, left, right)
        found = backward_of(dout[None, at], q[None, at], k[None, of], v[None, of], out[None, at], lse[None, :, at], allowed, scale)
        for into, rows, of_part in zip(grads, (at, of, of), found, strict=True):
            into[rows] += of_part[0]
    return grads


def _write(into: tuple[Any, Any, Any], found: tuple[Tensor, Tensor, Tensor]) -> None:
    for grad, value in zip(into, found, strict=True):
        if grad.stride(-1) != 1 or grad.dtype != value.dtype:
            raise RuntimeError("dq must have contiguous last dimension, and the same dtype as q")
        grad.copy_(value)


def _sides(left: Any, right: Any, none: Any) -> tuple[int | None, int | None]:
    known = (-1,) if none == -1 else (None,)
    if any(side not in known and (not isinstance(side, int) or side < 0) for side in (left, right)):
        raise TypeError(f"a side of a window is {none} or a number of keys, not {left}, {right}")
    return None if left == none else left, None if right == none else right


def flash2_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, lse, the dropped probabilities, the generator's state."""
    calls.append(("flash2 forward", False))
    _checked(q, k, v, 4, 8)
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    sides = _sides(window_size_left, window_size_right, -1)
    return *lse_forward(q, k, v, [], causal, *sides, softmax_scale, torch.inf), torch.empty(0), torch.empty(2)


def flash2_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of packed sequences."""
    calls.append(("flash2 packed forward", False))
    _checked(q, k, v, 3, 8)
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    sides = _sides(window_size_left, window_size_right, -1)
    return *lse_forward(q, k, v, spans, causal, *sides, softmax_scale, torch.inf), torch.empty(0), torch.empty(2)


def flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradients into what it is given."""
    calls.append(("flash2 backward", deterministic))
    sides = _sides(window_size_left, window_size_right, -1)
    _write((dq, dk, dv), lse_backward(dout, q, k, v, out, softmax_lse, [], causal, *sides, softmax_scale))
    return torch.empty(0)


def flash2_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The same of packed sequences."""
    calls.append(("flash2 packed backward", deterministic))
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    sides = _sides(window_size_left, window_size_right, -1)
    _write((dq, dk, dv), lse_backward(dout, q, k, v, out, softmax_lse, spans, causal, *sides, softmax_scale))
    return torch.empty(0)


def flash3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any, v_new: Any, qv: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, cu_seqlens_k_new: Any,
    seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, page_table: Any, kv_batch_idx: Any, leftpad_k: Any,
    rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any, q_descale: Any, k_descale: Any, v_descale: Any, softmax_scale: float,
    causal: bool, window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Any, Any]:  # fmt: skip
    """Dense or packed; the early form, in which most arguments had no default. Its results are in an order of their own."""
    calls.append(("flash3 forward" if cu_seqlens_q is None else "flash3 packed forward", False))
    _checked(q, k, v, 4 if cu_seqlens_q is None else 3, 8)
    assert all(t is None for t in (k_new, v_new, qv, out, page_table, leftpad_k, rotary_cos, q_descale, seqused_q, seqused_k))
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    result, lse = lse_forward(q, k, v, spans, causal, *_sides(*window_size, -1), softmax_scale, -torch.inf)
    return result.contiguous(), lse, None, None


def flash3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    sequed_q: Any = None, sequed_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """The late form."""
    calls.append(("flash3 backward" if cu_seqlens_q is None else "flash3 packed backward", deterministic))
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    assert softmax_scale is not None
    sides = _sides(window_size_left, window_size_right, -1)
    _write((dq, dk, dv), lse_backward(dout, q, k, v, out, softmax_lse, spans, is_causal, *sides, softmax_scale))
    return torch.empty(0)


def flash4_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    softmax_scale: Any = None, causal: bool = False, window_size_left: Any = None, window_size_right: Any = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Dense or packed; lse if it is asked for."""
    calls.append(("flash4 forward" if cu_seqlens_q is None else "flash4 packed forward", False))
    _checked(q, k, v, 4 if cu_seqlens_q is None else 3, 8)
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    sides = _sides(window_size_left, window_size_right, None)
    result, sums = lse_forward(q, k, v, spans, causal, *sides, softmax_scale or q.shape[-1] ** -0.5, -torch.inf)
    return result.contiguous(), sums if return_lse else None


def flash4_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: Any = None, causal: bool = False,
    window_size_left: Any = None, window_size_right: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Another order than the others'; it makes the gradients."""
    calls.append(("flash4 backward" if cu_seqlens_q is None else "flash4 packed backward", deterministic))
    spans = _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q)
    sides = _sides(window_size_left, window_size_right, None)
    return lse_backward(dout, q, k, v, out, lse, spans, causal, *sides, softmax_scale or q.shape[-1] ** -0.5)


class Registry:
    """torch.nn.attention's registry of flash kernels, which works for some; ``file`` has the current one."""

    def __init__(self, works: tuple[str, ...], file: Path | None = None) -> None:
        self.current: str | None = None
        self.works, self.file, self.history = works, file, list[str | None]()

    def _change(self, impl: str | None) -> None:
        self.current = impl
        self.history.append(impl)
        if self.file is not None:
            self.file.write_text(str(impl))

    def activate_flash_attention_impl(self, impl: str) -> None:
        if impl not in self.works:
            raise RuntimeError(f"Module does not expose {impl} kernels")
        self._change(impl)

    def restore_flash_attention_impl(self) -> None:
        self._change(None)

    def current_flash_attention_impl(self) -> str | None:
        return self.current

    def list_flash_attention_impls(self) -> list[str]:
        return ["FA3", "FA4"]


def forget() -> None:
    """Forget what was found, so that the next look is at what is there now."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]
    availability.installed.cache_clear()
    availability.find.cache_clear()
    attention_choice._trial.cache_clear()
    flash_packages.lse_lack.cache_clear()
    calls.clear()


def write_packages(
    where: Path, flash2: str | None = None, flash3: str | None = None, flash4: str | None = None, under_flash2: str = UNDER_FLASH2,
    under_flash4: str = UNDER_FLASH4,
) -> Path:  # fmt: skip
    """Write the packages as pip installs them; each is the text of its module, None if it is not installed.

    Args:
        under_flash2, under_flash4: text of the module under the package's own.
    """
    cute = where / "flash_attn" / "cute"
    if flash4 is not None:
        cute.mkdir(parents=True)
        (cute / "__init__.py").write_text(flash4)
        (cute / "interface.py").write_text(under_flash4)
    if flash2 is not None:
        cute.parent.mkdir(parents=True, exist_ok=True)
        (cute.parent / "__init__.py").write_text(flash2)
        (cute.parent / "flash_attn_interface.py").write_text(under_flash2)
    if flash3 is not None:
        where.mkdir(parents=True, exist_ok=True)
        (where / "flash_attn_interface.py").write_text(flash3)
    return where


Install = Callable[..., None]


@pytest.fixture
def install_flash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Installer of the packages for the time of a test, on the CPU, which passes for a Hopper GPU (``capability``)."""

    def install(capability: tuple[int, int] = (9, 0), **packages: str | None) -> None:
        where = tmp_path / f"site{len(list(tmp_path.glob('site*')))}"
        where.mkdir()
        monkeypatch.syspath_prepend(write_packages(where, **packages))
        monkeypatch.setattr(attention_choice, "compute_capability", lambda _device: capability)
        forget()

    monkeypatch.setattr(availability, "GPU", "cpu")
    monkeypatch.setattr(attention_choice, "attention_of_torch", Registry(()))
    # a build for GPUs asks the driver, which need not be there
    for name in ("can_use_flash_attention", "can_use_cudnn_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda _params: False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    yield install
    forget()
