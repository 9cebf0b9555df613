"""FlashAttention's packages played on the CPU: versions 2, 3 and 4 with their names, signatures, checks and results.

Facts from Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (2.8),
hopper/flash_attn_interface.py and hopper/flash_api.cpp, flash_attn/cute/interface.py (4.0.0b36), which is alone in its
package: flash_attn is then a folder without ``__init__.py``. Numbers are computed in fp32 and rounded once.
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

from megatron_sp.ops import attention_choice, availability

FLASH2 = "from support.flash_stand_in import flash2_func as flash_attn_func, flash2_varlen_func as flash_attn_varlen_func\n"
FLASH3 = "from support.flash_stand_in import flash3_func as flash_attn_func, flash3_varlen_func as flash_attn_varlen_func\n"
FLASH4 = "from support.flash_stand_in import flash4_func as flash_attn_func, flash4_varlen_func as flash_attn_varlen_func\n"
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


def flash2_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """The output alone; heads of any width are padded."""
    out = _dense("flash2", q, k, v, causal, window_size, deterministic, -1, 1)
    return torch.nn.functional.dropout(out, dropout_p) if dropout_p else out


def flash2_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Tensor:  # fmt: skip
    """The output alone."""
    return _packed("flash2 packed", q, k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, -1)


def flash3_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """No dropout."""
    return _dense("flash3", q, k, v, causal, window_size, deterministic, -1, 8)


def flash3_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Lengths before the scale, as in version 2."""
    return _packed("flash3 packed", q, k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, -1)


def flash4_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, gather_kv_indices: Any = None, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None,
    aux_scalars: Any = None, block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output, and the log of the sums if asked for; no window is (None, None)."""
    return _dense("flash4", q, k, v, causal, window_size, deterministic, None, 8), None


def flash4_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, gather_kv_indices: Any = None,
    page_table: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
    return_lse: bool = False, scheduler_metadata: Any = None, seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A tensor before the lengths."""
    return _packed("flash4 packed", q, k, v, cu_seqlens_q, max_seqlen_q, causal, window_size, deterministic, None), None


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
    calls.clear()


def write_packages(where: Path, flash2: str | None = None, flash3: str | None = None, flash4: str | None = None) -> Path:
    """Write the packages as pip installs them; each is the text of its module, None if it is not installed."""
    cute = where / "flash_attn" / "cute"
    if flash4 is not None:
        cute.mkdir(parents=True)
        (cute / "__init__.py").write_text(flash4)
    if flash2 is not None:
        cute.parent.mkdir(parents=True, exist_ok=True)
        (cute.parent / "__init__.py").write_text(flash2)
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
    # a build for GPUs asks the driver, which need not be there
    for name in ("can_use_flash_attention", "can_use_cudnn_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda _params: False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    yield install
    forget()
