"""Parameters of a model and FLOPs of a training step in closed form, and peak rates for MFU."""

# FLOPs are counted in the two common conventions: *full* counts every attention score, *causal* only those that a
# causal mask needs (half of them, fewer in a sliding window), which is what a good kernel computes, and the fairer
# figure for long sequences. Both count matrix products only, 2 FLOP per multiply-add, the backward pass as twice the
# forward pass, and no recomputation (model FLOPs, as in PaLM, arXiv:2204.02311 appendix B). Of experts those count that
# a token has chosen, and the router.

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron_sp.config.schema import PEAK_TFLOPS, Config, ModelConfig
from megatron_sp.utils.format import format_count, format_parameters

if TYPE_CHECKING:
    import torch

_NAME_TO_PEAK = (
    ("H100 PCIe", "h100-pcie-bf16"), ("H100", "h100-bf16"), ("H200", "h200-bf16"), ("H800", "h800-bf16"),
    ("A100", "a100-bf16"),
    ("B200", "b200-bf16"), ("L40S", "l40s-bf16"), ("A10", "a10-bf16"), ("V100", "v100-fp16"), ("4090", "rtx4090-bf16"),
    ("MI300X", "mi300x-bf16"),
)  # fmt: skip


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without rows that pad the vocabulary."""
    return _count(model, model.num_experts or 0)


def count_active_parameters(model: ModelConfig) -> int:
    """Parameters that a token uses: all but the experts that it does not choose."""
    return _count(model, model.moe_router_topk)


def describe_parameters(model: ModelConfig) -> str:
    """Text about the size of a model, such as '6.92 B parameters, 1.28 B active'."""
    active = f", {format_count(count_active_parameters(model))} active" if model.has_experts else ""
    return f"{format_parameters(count_parameters(model))} parameters{active}"


def _count(model: ModelConfig, experts: int) -> int:
    # with so many experts in each layer that has any
    assert model.num_layers and model.hidden_size and model.num_attention_heads and model.vocab_size
    h, d, n, g = model.hidden_size, model.head_dim, model.num_attention_heads, model.num_groups
    norms = 2 if model.normalization == "LayerNorm" else 1
    rows = (n + 2 * g) * d
    block = rows * h + h * n * d + 2 * norms * h + norms * sum(norm_widths(model))
    block += rows * model.qkv_bias + h * model.proj_bias
    has_table = model.position_embedding_type == "learned_absolute"
    ends = model.vocab_size * h + (model.max_positions * h if has_table else 0)
    ends += norms * h + (model.vocab_size * h if model.untie_embeddings_and_output_weights else 0)
    if model.is_bert:  # token types, the LM head's dense layer, norm and bias, pooler and order head
        ends += model.token_types * h + h * h + h + norms * h + model.vocab_size
        ends += (h * h + h + 2 * h + 2) * model.has_order_head
    of_experts = len(model.expert_layers(model.num_layers))
    mlps = (model.num_layers - of_experts) * mlp_parameters(model, model.ffn_size)
    if of_experts:
        shared = mlp_parameters(model, model.shared_expert_size) if model.shared_expert_size else 0
        of_each = mlp_parameters(model, model.expert_ffn_size)
        mlps += of_experts * ((model.num_experts or 0) * h + experts * of_each + shared)
    return model.num_layers * block + mlps + ends


def mlp_parameters(model: ModelConfig, width: int) -> int:
    """Parameters of an MLP, or of an expert, of this width."""
    assert model.hidden_size
    h, wide = model.hidden_size, width * (2 if model.is_gated else 1)
    return wide * h + h * width + (wide + h) * model.mlp_bias


def norm_widths(model: ModelConfig) -> tuple[int, ...]:
    if not model.qk_layernorm:
        return ()
    assert model.num_attention_heads
    queries, keys = (model.num_attention_heads, model.num_groups) if model.qk_layernorm_scope == "all" else (1, 1)
    return queries * model.head_dim, keys * model.head_dim


def forward_flops_per_token(config: ModelConfig, head_share: float = 1.0) -> tuple[float, float]:
    """Return forward FLOPs for one token of a full sequence: (all but attention scores, scores without a mask)."""
    layers, h, s = config.num_layers, config.hidden_size, config.seq_length
    assert layers and h and s and config.num_attention_heads and config.vocab_size
    heads_width, kv_width = config.num_attention_heads * config.head_dim, config.num_groups * config.head_dim
    dense: float = layers * h * (2 * heads_width + 2 * kv_width) + sum(mlp_sizes(config))
    dense += head_share * h * (config.vocab_size + (h if config.is_bert else 0))
    scores = layers * 2 * s * heads_width  # q k^T and probabilities times v
    return 2.0 * dense, 2.0 * scores


def mlp_sizes(config: ModelConfig) -> list[int]:
    """Multiply-adds of each layer's MLP for one token; with experts of the router and of those it takes."""
    assert config.num_layers and config.hidden_size
    each = config.hidden_size * (3 if config.is_gated else 2)
    found = [each * config.ffn_size] * config.num_layers
    for layer in config.expert_layers(config.num_layers):
        widths = config.moe_router_topk * config.expert_ffn_size + config.shared_expert_size
        found[layer] = (config.num_experts or 0) * config.hidden_size + each * widths
    return found


def layer_shares(config: ModelConfig) -> list[float]:
    """FLOPs of each layer in those of a mean one, with scores as the mask leaves them."""
    assert config.num_layers
    sizes = mlp_sizes(config)
    if len(set(sizes)) == 1:
        return [1.0] * config.num_layers
    dense, scores = forward_flops_per_token(config, 0.0)
    mean, of_mlps = (dense + scores * seen_share(config)) / config.num_layers, sum(sizes) / config.num_layers
    return [1.0 + 2.0 * (size - of_mlps) / mean for size in sizes]


def head_in_layers(config: ModelConfig, head_share: float = 1.0) -> float:
    """Return how many layers have as many FLOPs as the head."""
    assert config.num_layers and config.hidden_size and config.vocab_size
    dense, scores = forward_flops_per_token(config, head_share)
    head = 2.0 * head_share * config.hidden_size * (config.vocab_size + (config.hidden_size if config.is_bert else 0))
    return head * config.num_layers / (dense - head + scores * seen_share(config))


def pairs_per_position(config: ModelConfig) -> float:
    """Pairs of a query and a key that cost a layer as many FLOPs as all else of it at one position."""
    assert config.num_layers and config.num_attention_heads
    dense, _ = forward_flops_per_token(config, 0.0)
    return dense / config.num_layers / (4.0 * config.num_attention_heads * config.head_dim)


def step_flops_per_token(config: ModelConfig, head_share: float = 1.0) -> tuple[float, float]:
    """Return (causal, full) FLOPs of forward and backward for one token; for BERT both are the same."""
    dense, scores = forward_flops_per_token(config, head_share)
    return 3.0 * (dense + scores * seen_share(config)), 3.0 * (dense + scores)


def seen_share(config: ModelConfig) -> float:
    """Share of query-key pairs that the mask leaves, for long sequences."""
    # 1 for BERT, 1/2 for a causal mask, and r - r^2/2 for a sliding window of r = w/s of the sequence
    assert config.seq_length
    if config.is_bert:
        return 1.0
    window = 1.0 if config.window_size is None else min(1.0, config.window_size / config.seq_length)
    return window - window**2 / 2


def head_share(config: Config) -> float:
    """Share of the positions that the head processes: for BERT the masked ones, else all."""
    return config.data.mask_prob if config.model.is_bert else 1.0


def peak_tflops(choice: str | None, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak rate of a device for MFU, in TFLOP/s, and its name; (0, "unknown") for a GPU without an entry.

    ``choice`` is --peak-tflops: a number, a name in ``PEAK_TFLOPS``, or None for the device's own peak. That of a CPU
    is measured with short matrix products in ``dtype``.
    """
    if choice is not None:
        return (PEAK_TFLOPS[choice], choice) if choice in PEAK_TFLOPS else (float(choice), f"{choice} TFLOP/s")
    import torch

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        entry = next((peak for part, peak in _NAME_TO_PEAK if part in name), None)
        return (0.0, "unknown") if entry is None else (PEAK_TFLOPS[entry], entry)
    rate = 0.0
    for size in (128, 256, 512, 1024):  # up to a small one where the CPU lacks instructions for ``dtype``
        a = torch.ones(size, size, dtype=dtype)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(a, a)
            best = min(best, time.perf_counter() - start)
        rate = max(rate, 2.0 * size**3 / best / 1e12)
        if best > 0.005:
            break
    return rate, "measured matmul"
