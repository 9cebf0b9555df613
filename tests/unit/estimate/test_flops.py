"""The closed formula against torch's own count of the matrix products of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from torch.utils.flop_counter import FlopCounterMode

from megatron_sp.estimate.flops import (
    PEAK_TFLOPS,
    forward_flops_per_token,
    layer_shares,
    mlp_sizes,
    peak_tflops,
    seen_share,
    step_flops_per_token,
)

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries": {"num_query_groups": 2},
    "swiglu, untied": {"swiglu": True, "untie_embeddings_and_output_weights": True},
    "gated GELU, parallel residual": {"geglu": True, "use_parallel_residual": True},
    "window": {"window_size": 3},
    "rotary, no biases": {"position_embedding_type": "rope", "disable_bias_linear": True},
    "experts": {"num_experts": 6, "moe_ffn_hidden_size": 5},
    "experts in some layers, shared ones": {
        "num_experts": 4,
        "moe_layer_freq": "[0,1,1]",
        "moe_shared_expert_intermediate_size": 7,
        "swiglu": True,
        "moe_router_topk": 3,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_against_the_counter(name: str) -> None:
    """The reference attention computes the full square of scores, forward once and backward twice, as the *full* convention counts.

    Neither side counts norms, activations, dropout, the softmax, the embedding look-up, or the optimizer. What ours
    leaves out on purpose is computed here with sizes that make it vanish: rows that pad the vocabulary (none),
    recomputation (off).
    """
    config = tiny.shape(**{"vocab_size": 48, **SHAPES[name]})
    model = tiny.make_model(config, attention_backend="unfused")
    batch = tiny.make_batch(config)
    with FlopCounterMode(display=False) as counter:
        tiny.loss_of(model, batch, kernel="reference").backward()
    dense, scores = forward_flops_per_token(config)
    tokens = tiny.B * tiny.S
    assert counter.get_total_flops() == step_flops_per_token(config)[1] * tokens == 3 * (dense + scores) * tokens


def test_layers_that_differ() -> None:
    config = tiny.shape(num_layers=4, num_experts=6, moe_ffn_hidden_size=30, moe_layer_freq="[0,1,0,1]")
    assert mlp_sizes(config) == [2 * 14 * 10, 14 * 6 + 2 * 2 * 14 * 30] * 2
    shares = layer_shares(config)
    assert sum(shares) == pytest.approx(4) and shares[0] == shares[2] < 1 < shares[1] == shares[3]
    dense, scores = forward_flops_per_token(config, 0.0)
    assert (shares[1] - shares[0]) * (dense + scores / 2) / 4 == pytest.approx(2 * (mlp_sizes(config)[1] - mlp_sizes(config)[0]))
    assert layer_shares(tiny.shape(num_experts=6)) == layer_shares(tiny.BASE) == [1.0] * 3


def test_causal_halves_the_scores_alone() -> None:
    dense, scores = forward_flops_per_token(tiny.BASE)
    causal, full = step_flops_per_token(tiny.BASE)
    assert full - causal == 1.5 * scores and causal == 3 * dense + 1.5 * scores and scores > 0


def test_a_window_leaves_the_pairs_in_it() -> None:
    """Counted pair by pair for a long sequence; a window as long as the sequence is none."""
    s, w = 512, 96
    pairs = sum(min(i + 1, w) for i in range(s))
    assert seen_share(tiny.shape(seq_length=s, window_size=w)) == pytest.approx(pairs / s**2, rel=0.01)
    assert seen_share(tiny.shape(window_size=8)) == seen_share(tiny.shape(window_size=9)) == seen_share(tiny.BASE) == 0.5
    assert seen_share(tiny.shape(model_family="bert")) == 1.0


def test_six_times_the_parameters() -> None:
    """The rule of thumb 6 N holds for the matrices of a wide model."""
    config = tiny.shape(num_layers=2, hidden_size=512, num_attention_heads=8, kv_channels=None, ffn_hidden_size=None, seq_length=8)
    matrices = 2 * 12 * 512 * 512 + 512 * 37
    assert step_flops_per_token(config)[0] == pytest.approx(6 * matrices, rel=0.02)


def test_peaks() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops("h100-bf16", cpu, torch.float32) == (989.0, "h100-bf16")
    assert peak_tflops("12.5", cpu, torch.float32) == (12.5, "12.5 TFLOP/s")
    measured, name = peak_tflops(None, cpu, torch.float32)
    assert 1e-4 < measured < 100 and name == "measured matmul"
    assert all(peak > 50 for peak in PEAK_TFLOPS.values())


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", "h100-bf16"), ("NVIDIA H100 PCIe", "h100-pcie-bf16"), ("NVIDIA A100-SXM4-80GB", "a100-bf16"),
    ("NVIDIA H200", "h200-bf16"), ("NVIDIA A10G", "a10-bf16"), ("Tesla V100-SXM2-16GB", "v100-fp16"),
])  # fmt: skip
def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch, name: str, peak: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_tflops(None, torch.device("cuda"), torch.bfloat16) == (PEAK_TFLOPS[peak], peak)


def test_an_unknown_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Future Card")
    assert peak_tflops(None, torch.device("cuda"), torch.bfloat16) == (0.0, "unknown")
