"""Ways into SDPA on a GPU, tried on the CPU: its kernel that holds all scores stays off, grouped keys are expanded, masks are narrow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.errors import FP64, assert_law
from support.op_checks import gradients, leaves, randn
from torch import Tensor

import megatron_sp.ops.attention as attention_module
from megatron_sp.ops.attention import AttentionMask, core_attention

S, M = 7, 4


def operands(r: int, d: int, s_q: int = S, s_k: int = S) -> dict[str, Tensor]:
    return leaves(q=randn(s_q, M, r, d), k=randn(s_k, M, 1, d, seed=1), v=randn(s_k, M, 1, d, seed=2))


def expected(i: dict[str, Tensor], mask: AttentionMask, grad: Tensor) -> dict[str, Tensor | None]:
    return gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel="reference"), i, grad)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for GPUs would ask the driver, which need not be there."""
    for name in ("can_use_flash_attention", "can_use_cudnn_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda _params: False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What SDPA is called with, and whether its plain form is on."""
    found: list[dict[str, Any]] = []
    plain = F.scaled_dot_product_attention

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        found.append({"q": q, "k": k, "math": torch.backends.cuda.math_sdp_enabled(), **options})
        return plain(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    # float64 has no fused kernel on a GPU, but one on a CPU
    monkeypatch.setattr(attention_module, "_any_sdpa", attention_module._fused_sdpa)
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", False)
    return found


@pytest.mark.parametrize("d", [8, 6])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(False), AttentionMask(window=3)])
def test_without_flash_keys_are_expanded_and_widths_padded(calls: list[dict[str, Any]], mask: AttentionMask, r: int, d: int) -> None:
    i, grad = operands(r, d), randn(S, M, r, d, seed=3)
    got = gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel="sdpa"), i, grad)
    assert_law(got, expected(i, mask, grad), FP64)
    assert calls and torch.backends.cuda.math_sdp_enabled(), "switched on again"
    for call in calls:
        assert not call["math"] and not call["enable_gqa"]
        assert call["k"].shape[:2] == (M, r) and call["k"].stride(1) == (0 if r > 1 else call["k"].stride(1)), "no copy"
        assert call["q"].shape[-1] % 8 == 0


@pytest.mark.parametrize("masked", [False, True])
def test_flash_takes_groups_as_they_are_but_no_mask(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: params.enable_gqa)
    r, s_q = 3, S - 2 if masked else S
    i, grad = operands(r, 8, s_q), randn(s_q, M, r, 8, seed=3)
    got = gradients(lambda i: core_attention(i["q"], i["k"], i["v"], AttentionMask(), kernel="sdpa"), i, grad)
    assert_law(got, expected(i, AttentionMask(), grad), FP64)
    (call,) = calls
    assert call["enable_gqa"] == (not masked) and call["k"].shape[1] == (r if masked else 1)
    assert (call["attn_mask"] is None) == (not masked)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("s_q, s_k", [(7, 9), (9, 7), (2, 40)])
def test_masks_are_made_for_some_queries_at_a_time(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, s_q: int, s_k: int, window: int | None
) -> None:
    monkeypatch.setattr(attention_module, "_MASK_ELEMENTS", 20)
    mask, r = AttentionMask(window=window), 2
    i, grad = operands(r, 8, s_q, s_k), randn(s_q, M, r, 8, seed=3)
    got = gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel="sdpa"), i, grad)
    assert_law(got, expected(i, mask, grad), FP64)
    masks = [call["attn_mask"] for call in calls if call["attn_mask"] is not None]
    assert masks and all(m.numel() <= max(20, m.shape[-1]) for m in masks)
    assert window is None or max(m.shape[-1] for m in masks) <= window + 20 // 7


def test_lengths_and_windows_together(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_MASK_ELEMENTS", 1)
    mask = AttentionMask(window=3, key_lengths=torch.tensor([7, 3, 1, 6]))
    i, grad = operands(1, 8), randn(S, M, 1, 8, seed=3)
    got = core_attention(i["q"], i["k"], i["v"], mask, kernel="sdpa")
    want = core_attention(i["q"], i["k"], i["v"], mask, kernel="reference")
    seen = torch.arange(S)[:, None] < mask.key_lengths + 2  # type: ignore[operator]  # the others see nothing
    assert_law({"out": got[seen]}, {"out": want[seen]}, FP64)
    assert grad is not None and max(call["k"].shape[2] for call in calls) == 3


def test_lengths_that_only_the_device_knows_are_read(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for them: a mask would be as large as the scores."""
    monkeypatch.setattr(AttentionMask, "lengths_on_host", lambda _: None)
    mask = AttentionMask(False, torch.tensor([7, 3, 1, 6]))
    i, grad = operands(2, 8), randn(S, M, 2, 8, seed=3)
    got = gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel="sdpa"), i, grad)
    assert_law(got, expected(i, mask, grad), FP64)
    assert len(calls) == 4 and all(call["attn_mask"] is None for call in calls)


def test_cudnn_comes_before_torchs_other_kernels(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there for masks that it does not take."""
    inside: list[list[str]] = []

    @contextlib.contextmanager
    def first(kernels: list[Any], set_priority: bool) -> Iterator[None]:
        inside.append([kernel.name for kernel in kernels] if set_priority else [])
        before = len(calls)
        yield
        assert len(calls) > before, "SDPA is called inside"

    monkeypatch.setattr(attention_module, "sdpa_kernel", first)
    i, grad = operands(2, 8), randn(S, M, 2, 8, seed=3)
    got = gradients(lambda i: core_attention(i["q"], i["k"], i["v"], AttentionMask(), kernel="cudnn"), i, grad)
    assert_law(got, expected(i, AttentionMask(), grad), FP64)
    assert inside == [["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]]


def test_tiles_of_a_window_share_their_mask(calls: list[dict[str, Any]]) -> None:
    """What autograd keeps for backward is then one tensor."""
    i = operands(2, 8, 40, 40)
    core_attention(i["q"], i["k"], i["v"], AttentionMask(window=3), kernel="sdpa")
    masks = {call["attn_mask"].data_ptr() for call in calls if call["attn_mask"] is not None}
    assert calls[0]["is_causal"] and calls[0]["attn_mask"] is None
    assert len(calls) > 10 and len(masks) <= 2


def test_a_gpu_without_any_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    i = operands(2, 8)
    with pytest.raises(RuntimeError, match=r"no fused kernel of torch computes attention in float64 with heads 8 wide.*unfused"):
        attention_module._fused_sdpa(i["q"], i["k"], i["v"], None, 0.0, True)
    assert torch.backends.cuda.math_sdp_enabled()
