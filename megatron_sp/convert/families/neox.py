"""GPT-NeoX and Pythia: ``GPTNeoXForCausalLM``. The fused projection has the same row order as ours: q, k, v of each head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index
from megatron_sp.convert.families.family import Tensors, misfit
from megatron_sp.convert.families.parts import BIAS, WEIGHT, blocks, kinds, same
from megatron_sp.convert.families.settings import ACTIVATIONS, Settings, set_activation, set_biases, word_of

_LINEAR = (
    ("self_attention.linear_qkv", "attention.query_key_value", "qkv_bias"), ("self_attention.linear_proj", "attention.dense", "proj_bias"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h", "mlp_bias"), ("mlp.linear_fc2", "mlp.dense_4h_to_h", "mlp_bias"),
)  # fmt: skip


class GPTNeoX:
    """transformers' GPT-NeoX (Pythia)."""

    model_type, prefix = "gpt_neox", "gpt_neox."

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        positions = settings.count("max_position_embeddings", 2048)
        config = ModelConfig(
            num_layers=settings.count("num_hidden_layers"), hidden_size=settings.count("hidden_size"),
            num_attention_heads=settings.count("num_attention_heads"), ffn_hidden_size=settings.count("intermediate_size"),
            seq_length=positions, vocab_size=settings.count("vocab_size"), position_embedding_type="rope",
            norm_epsilon=settings.get("layer_norm_eps", float, 1e-5),
            use_parallel_residual=settings.get("use_parallel_residual", bool, True),
            untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", bool, False),
            attention_dropout=settings.get("attention_dropout", float, 0.0), hidden_dropout=settings.get("hidden_dropout", float, 0.0),
            init_method_std=settings.get("initializer_range", float, 0.02),
        )  # fmt: skip
        set_activation(config, settings.choice("hidden_act", ACTIVATIONS, "gelu"))
        attention = settings.get("attention_bias", bool, True)
        set_biases(config, qkv=attention, proj=attention, mlp=True)
        settings.take_rotary(config, share=0.25, base="rotary_emb_base", percent="rotary_pct")
        return config

    def renamed(self, name: str) -> str:
        return "embed_out.weight" if name == "lm_head.weight" else name  # the class and its files name it differently

    def num_classes(self, tensors: Tensors) -> int:
        return 0

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        return {
            r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": "the causal mask, which is not a weight",
            r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq": "rotary frequencies, which are worked out",
        }

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        yield from same("embedding.word_embeddings", "gpt_neox.embed_in")
        for i, ours in blocks(config):
            theirs = f"gpt_neox.layers.{i}."
            yield from same(f"{ours}input_layernorm", f"{theirs}input_layernorm", (WEIGHT, BIAS))
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm", (WEIGHT, BIAS))
            for a, b, bias in _LINEAR:
                yield from same(f"{ours}{a}", f"{theirs}{b}", kinds(getattr(config, bias)))
        yield from same("decoder.final_layernorm", "gpt_neox.final_layer_norm", (WEIGHT, BIAS))
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "embed_out")

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        return "GPTNeoXForCausalLM"

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        return {}

    def fits(self, config: ModelConfig) -> str | None:
        assert config.num_attention_heads
        return misfit(
            config, model_family="gpt", position_embedding_type="rope", normalization="LayerNorm", is_gated=False, squared_relu=False,
            relu=config.relu, qk_layernorm=False, apply_layernorm_1p=False, num_groups=config.num_attention_heads, mlp_bias=True,
            head_dim=(config.hidden_size or 0) // config.num_attention_heads, proj_bias=config.qkv_bias,
            use_parallel_residual=config.use_parallel_residual, rope_scaling=config.rope_scaling,
            rotary_seq_len_interpolation_factor=config.rotary_seq_len_interpolation_factor,
        )  # fmt: skip

    def document(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size, "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.ffn_size, "max_position_embeddings": config.max_positions, "vocab_size": config.vocab_size,
            "hidden_act": word_of(config.activation), "layer_norm_eps": config.norm_epsilon,
            "use_parallel_residual": config.use_parallel_residual, "attention_bias": config.qkv_bias,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights, "attention_dropout": config.attention_dropout,
            "hidden_dropout": config.hidden_dropout, "initializer_range": config.init_method_std,
            **Settings.rotary(config, base="rotary_emb_base", percent="rotary_pct"),
        }  # fmt: skip
