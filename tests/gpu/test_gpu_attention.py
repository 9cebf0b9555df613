"""Attention kernels of the GPU against the plain reference on the CPU: every backend of torch's SDPA, and flash-attn where it is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.errors import FP32, assert_law
from support.op_checks import randn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_sp.ops.attention import AttentionMask, KernelName, attention
from megatron_sp.ops.attention_choice import AttentionUse, find_candidates, lack
from megatron_sp.ops.flash_packages import FLASH_NAMES

pytestmark = pytest.mark.gpu
S, B, G, D = 96, 2, 2, 64
BF16 = 2e-2  # operands, probabilities and output are rounded at 2^-9 each
MASKS = {
    "causal": AttentionMask(), "all": AttentionMask(False), "window": AttentionMask(window=20), "window of one": AttentionMask(window=1),
    "padding": AttentionMask(False, torch.tensor([S, 50])), "causal padding": AttentionMask(True, torch.tensor([S, 50])),
    "lengths on the host": AttentionMask(False, torch.tensor([S, 50]), lengths=(S, 50)),
    "documents": AttentionMask(documents=((30, 31, S), (S,))), "documents, all": AttentionMask(False, documents=((30, 31, S), (1, 95, S))),
    "documents, window": AttentionMask(documents=((30, 31, S), (S,)), window=20),
}  # fmt: skip


def run(qkv: Tensor, grad: Tensor, r: int, mask: AttentionMask, kernel: KernelName) -> dict[str, Tensor | None]:
    qkv = qkv.detach().requires_grad_()
    lengths = None if mask.key_lengths is None else mask.key_lengths.to(qkv.device)
    out = attention(qkv, r, D, replace(mask, key_lengths=lengths), kernel=kernel)
    out.backward(grad.to(out))
    assert qkv.grad is not None
    return {"out": out.detach().cpu(), "qkv": qkv.grad.cpu()}


def compare(dtype: torch.dtype, r: int, mask: AttentionMask, kernel: KernelName, tolerance: float) -> None:
    qkv, grad = randn(S, B, G * (r + 2) * D).to(dtype), randn(S, B, G * r * D).to(dtype)
    want = run(qkv.double(), grad.double(), r, mask, "reference")
    assert_law(run(qkv.cuda(), grad.cuda(), r, mask, kernel), want, tolerance)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_torchs_choice(dtype: torch.dtype, tolerance: float, r: int, mask: str) -> None:
    compare(dtype, r, MASKS[mask], "sdpa", tolerance)


@pytest.mark.parametrize("mask", MASKS)
def test_the_plain_reference(mask: str) -> None:
    compare(torch.float32, 3, MASKS[mask], "reference", FP32)


@pytest.mark.parametrize("mask", ["causal", "all"])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_each_backend(backend: SDPBackend, r: int, mask: str) -> None:
    with sdpa_kernel(backend):
        compare(torch.bfloat16, r, MASKS[mask], "sdpa", BF16)


@pytest.mark.parametrize("mask", ["causal", "all"])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_the_efficient_backend(dtype: torch.dtype, tolerance: float, r: int, mask: str) -> None:
    """It knows no grouped queries: their keys are expanded."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        compare(dtype, r, MASKS[mask], "sdpa", tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_all_scores(dtype: torch.dtype) -> None:
    """Grouped queries in fp32, heads that no kernel takes as wide as they are: memory grows with s, not with its square."""
    peaks = []
    for s in (1024, 4096):
        qkv = torch.randn(s, 1, 5 * 20, device="cuda", dtype=dtype, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(qkv, 3, 20, MASKS["causal"]).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 6 * peaks[0], peaks


@pytest.mark.parametrize("mask", [AttentionMask(documents=((*range(2, S, 2), S), (S,))), MASKS["window"], MASKS["documents, window"]])
def test_documents_and_windows_are_one_call_and_the_host_does_not_wait(mask: AttentionMask) -> None:
    """However many documents they are; and nobody asks the GPU how long they are."""
    qkv = randn(S, B, G * 5 * D).to(torch.bfloat16).cuda().requires_grad_()
    attention(qkv, 3, D, mask).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            attention(qkv, 3, D, mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::_flash_attention_forward") == 1 and calls.get("aten::_flash_attention_backward") == 1, calls


def use(r: int, **more: Any) -> AttentionUse:
    return AttentionUse(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, head_dim=D, queries_per_group=r, **more)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("name", [*FLASH_NAMES, "cudnn"])
def test_each_kernel_that_is_here(name: KernelName, r: int, mask: str) -> None:
    """Of those that a run may choose; the others say why they are not."""
    if reason := lack(name, use(r)):
        pytest.skip(reason)
    compare(torch.bfloat16, r, MASKS[mask], name, BF16)


@pytest.mark.parametrize("name", [*FLASH_NAMES, "sdpa"])
def test_deterministic_backward(name: KernelName) -> None:
    """Bit for bit the same twice, with keys that many queries share."""
    torch.use_deterministic_algorithms(True)
    try:
        if reason := lack(name, use(3, deterministic=True)):
            pytest.skip(reason)
        qkv, grad = torch.randn(2048, 1, 5 * D).bfloat16().cuda(), torch.randn(2048, 1, 3 * D)
        runs = [run(qkv, grad, 3, MASKS["causal"], name) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in ("out", "qkv"))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}, {"window": 20}, {"documents": True}, {"deterministic": True}])
def test_torchs_own_is_always_a_candidate(more: dict[str, Any]) -> None:
    found = find_candidates("auto", use(3, **more))
    assert "sdpa" in found.names, (found.names, found.lacks)
    assert all(found.lacks[name] for name in ("flash4", "flash3", "flash2", "cudnn") if name not in found.names)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_the_output_is_the_send_buffer(backend: SDPBackend) -> None:
    """[s, b, heads] as it leaves the kernel: no copy stands between the attention and the exchange back."""
    qkv = randn(S, B, G * 3 * D).to(torch.bfloat16).cuda()
    with sdpa_kernel(backend), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(qkv, 1, D, MASKS["causal"])
    copies = [event.key for event in profile.key_averages() if event.key in ("aten::copy_", "aten::clone", "aten::contiguous")]
    assert "aten::copy_" not in copies, copies
