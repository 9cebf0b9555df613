"""Attention's results kept for a recomputation, on a GPU: the output and all gradients are those of a pass that kept nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.op_checks import randn
from test_gpu_attention import BF16, MASKS, use
from torch import Tensor

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask, KernelName, core_attention
from megatron_sp.ops.attention_choice import activate, lack, why_repeated
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.flash_packages import FLASH_NAMES
from megatron_sp.ops.gpu_kernels import CUDNN, Dense, PackageFlash, TorchFlash, takes_cudnn
from megatron_sp.parallel.forward_context import ForwardContext

pytestmark = pytest.mark.gpu
S, M, D = 96, 4, 64
KERNELS: tuple[KernelName, ...] = (*FLASH_NAMES, "sdpa", "cudnn", "sdpa-fa3", "sdpa-fa4")
KEPT_MASKS = [name for name in MASKS if name != "causal padding"]  # no model has it


def require(name: KernelName, r: int, **more: Any) -> None:
    """Skip where the kernel, or its results, cannot be had; torch's kernels must be there."""
    if reason := lack(name, use(r, **more)):
        pytest.skip(reason)
    reason = why_repeated(name, use(r, **more))
    assert not reason or name not in ("sdpa", "cudnn"), reason
    if reason:
        pytest.skip(reason)


def operands(r: int, s_k: int = S) -> list[Tensor]:
    return [randn(n, M, heads, D, seed=i).bfloat16().cuda() for i, (n, heads) in enumerate(((S, r), (s_k, 1), (s_k, 1)))]


def close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Compare with the largest element of all: a window of one has no gradient of q and k."""
    largest = max(float(t.double().abs().max()) for t in want)
    for mine, other in zip(got, want, strict=True):
        error = float((mine.double() - other.double()).abs().max()) / largest
        assert error <= tolerance, error


@pytest.mark.parametrize("mask", KEPT_MASKS)
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_what_is_kept_is_what_would_be_computed_again(name: KernelName, r: int, mask: str) -> None:
    """Against the same kernel, and against fp64; the second pass calls no forward kernel."""
    require(name, r, causal=MASKS[mask].causal)
    activate(name)
    try:
        lengths = MASKS[mask].key_lengths
        given = replace(MASKS[mask], key_lengths=None if lengths is None else lengths.repeat_interleave(M // 2).cuda(), lengths=None)
        inputs, grad = operands(r), randn(S, M, r, D, seed=4).bfloat16().cuda()
        kept = KeptTensors()
        with torch.no_grad():
            core_attention(*inputs, given, kernel=name, kept=kept)
        kept.restore(kept.release())
        results = []
        for second in (kept, None):
            leaves = [t.detach().requires_grad_() for t in inputs]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                out = core_attention(*leaves, given, kernel=name, kept=second)
            assert second is None or not any("attention_forward" in e.key or "product" in e.key for e in profile.key_averages())
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        close(results[0], results[1], BF16)
        exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
        host = replace(given, key_lengths=None if given.key_lengths is None else given.key_lengths.cpu())
        out = core_attention(*exact, host, kernel="reference")
        want = [out.detach(), *torch.autograd.grad(out, exact, grad.cpu().double())]
        close([t.cpu() for t in results[0]], want, BF16)
    finally:
        activate("sdpa")


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("name", ["torch", "cudnn", *FLASH_NAMES])
def test_lse_is_the_natural_log_and_backward_takes_one_over_more_keys(name: str, r: int) -> None:
    """Keys in two parts; what context parallelism asks of a kernel. A constant of another base or scale would show here."""
    q, k, v = operands(r, 2 * S)
    grad = randn(S, M, r, D, seed=4).bfloat16().cuda()
    if name == "cudnn":
        found = takes_cudnn(q, k[:S], v[:S], causal=False)
        if found is None:
            pytest.skip("SDPA does not give this to cuDNN here")
        kernel: CUDNN | Dense = found
    else:
        require("sdpa" if name == "torch" else name, r, causal=False)  # type: ignore[arg-type]
        kernel = Dense(TorchFlash() if name == "torch" else PackageFlash(name), False)  # type: ignore[arg-type]
    parts = slice(0, S), slice(S, 2 * S)
    results = [kernel.forward(q, k[part], v[part]) for part in parts]
    scores = torch.einsum("smrd,tmxd->mrst", q.double(), k.double()) / D**0.5
    for (_, lse), part in zip(results, parts, strict=True):
        torch.testing.assert_close(lse.double(), torch.logsumexp(scores[..., part], -1), rtol=1e-3, atol=1e-2)
    lse = torch.logaddexp(results[0][1], results[1][1])
    first, second = (out.float() * (mine - lse).exp().permute(2, 0, 1)[..., None] for out, mine in results)
    out = (first + second).bfloat16()
    grads = [kernel.backward(grad, q, k[part], v[part], out, lse) for part in parts]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = core_attention(*leaves, AttentionMask(False), kernel="reference")
    want = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.double())]
    of_q = grads[0].q.float() + grads[1].q.float()
    close([out, of_q, torch.cat([g.k for g in grads]), torch.cat([g.v for g in grads])], want, BF16)


@pytest.mark.parametrize("more", [{}, {"window_size": 20}, {"group_query_attention": True, "num_query_groups": 2}])
def test_blocks_recomputed_with_and_without(more: dict[str, Any]) -> None:
    """Loss gradients of a model's blocks are the same, and memory that is kept is freed."""
    config = ModelConfig(
        num_layers=2, hidden_size=4 * D, num_attention_heads=4, seq_length=S, vocab_size=128, attention_dropout=0.0,
        hidden_dropout=0.0, **more,
    )  # fmt: skip
    tokens = (torch.arange(S)[None] % 128).cuda()
    found = []
    for again in ("none", "full"):
        kernels = KernelConfig(recompute_granularity="full", recompute_attention=again)  # type: ignore[arg-type]
        model = GPTModel(config, kernels, seed=1, dtype=torch.bfloat16).cuda()
        model.hidden(tokens, ForwardContext(AttentionMask())).float().square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    close(found[0], found[1], BF16)
