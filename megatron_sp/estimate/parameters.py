"""Number of parameters of a model in closed form."""

from __future__ import annotations

from megatron_sp.config.schema import ModelConfig


def count_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model, as in a checkpoint: without padding rows of the vocabulary."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads and model.vocab_size
    h, d, n, g = model.hidden_size, model.head_dim, model.num_attention_heads, model.num_groups
    norms = 2 if model.normalization == "LayerNorm" else 1
    rows, ffn_rows = (n + 2 * g) * d, model.ffn_size * (2 if model.is_gated else 1)
    block = rows * h + h * n * d + ffn_rows * h + h * model.ffn_size + 2 * norms * h + norms * sum(norm_widths(model))
    block += rows * model.qkv_bias + h * model.proj_bias + (ffn_rows + h) * model.mlp_bias
    embedding = model.vocab_size * h + (model.max_positions * h if model.position_embedding_type == "learned_absolute" else 0)
    head = norms * h + (model.vocab_size * h if model.untie_embeddings_and_output_weights else 0)
    return model.num_layers * block + embedding + head + (_of_bert(model, norms) if model.is_bert else 0)


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
