"""Number of parameters of a model in closed form: of all of it, and of what one token uses."""

from __future__ import annotations

from megatron_sp.config.schema import ModelConfig
from megatron_sp.utils.format import format_count, format_parameters


def count_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model, as in a checkpoint: without padding rows of the vocabulary."""
    return _count(model, model.num_experts or 0)


def count_active_parameters(model: ModelConfig) -> int:
    """Return the number of parameters that a token uses: all but the experts that it does not choose."""
    return _count(model, model.moe_router_topk)


def describe_parameters(model: ModelConfig) -> str:
    """Return the number of parameters in words, of a model with experts with those that a token uses."""
    active = f", {format_count(count_active_parameters(model))} active" if model.has_experts else ""
    return f"{format_parameters(count_parameters(model))} parameters{active}"


def _count(model: ModelConfig, experts: int) -> int:
    """Return the number of parameters with so many experts in each layer that has any."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads and model.vocab_size
    h, d, n, g = model.hidden_size, model.head_dim, model.num_attention_heads, model.num_groups
    norms = 2 if model.normalization == "LayerNorm" else 1
    rows = (n + 2 * g) * d
    block = rows * h + h * n * d + 2 * norms * h + norms * sum(norm_widths(model))
    block += rows * model.qkv_bias + h * model.proj_bias
    embedding = model.vocab_size * h + (
        model.max_positions * h if model.position_embedding_type == "learned_absolute" else 0
    )
    head = norms * h + (model.vocab_size * h if model.untie_embeddings_and_output_weights else 0)
    of_experts = len(model.expert_layers(model.num_layers))
    mlps = (model.num_layers - of_experts) * mlp_parameters(model, model.ffn_size)
    if of_experts:
        shared = mlp_parameters(model, model.shared_expert_size) if model.shared_expert_size else 0
        mlps += of_experts * (
            (model.num_experts or 0) * h + experts * mlp_parameters(model, model.expert_ffn_size) + shared
        )
    return model.num_layers * block + mlps + embedding + head + (_of_bert(model, norms) if model.is_bert else 0)


def mlp_parameters(model: ModelConfig, width: int) -> int:
    """Return the parameters of an MLP or an expert of this width."""
    assert model.hidden_size
    h, wide = model.hidden_size, width * (2 if model.is_gated else 1)
    return wide * h + h * width + (wide + h) * model.mlp_bias


def norm_widths(model: ModelConfig) -> tuple[int, ...]:
    """Return the widths of the norms of queries and keys in a block."""
    if not model.qk_layernorm:
        return ()
    assert model.num_attention_heads
    queries, keys = (model.num_attention_heads, model.num_groups) if model.qk_layernorm_scope == "all" else (1, 1)
    return queries * model.head_dim, keys * model.head_dim


def _of_bert(model: ModelConfig, norms: int) -> int:
    """Return the additional parameters of a BERT: token types; dense layer, norm and output bias of the LM head; pooler and order head."""
    assert model.hidden_size and model.vocab_size
    h = model.hidden_size
    masked = h * h + h + norms * h + model.vocab_size
    return model.token_types * h + masked + (h * h + h + 2 * h + 2) * model.has_order_head
