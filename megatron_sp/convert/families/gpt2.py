"""GPT-2: ``GPT2LMHeadModel``. Its projections are Conv1D, stored [in, out], with q, k and v concatenated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index, View
from megatron_sp.convert.families.family import Tensors, misfit
from megatron_sp.convert.families.parts import ALL, BIAS, WEIGHT, Sizes, blocks, key, query, same, value
from megatron_sp.convert.families.settings import ACTIVATIONS, Settings, set_activation, word_of

_TURNED = (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc1", "mlp.c_fc"), ("mlp.linear_fc2", "mlp.c_proj"))


class GPT2:
    """transformers' GPT-2."""

    model_type, prefix = "gpt2", "transformer."

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        settings.require("scale_attn_weights", True, "leaves attention scores as they are")
        settings.require("scale_attn_by_inverse_layer_idx", False, "divides attention scores by the number of the layer")
        settings.require("add_cross_attention", False, "attends to another model")
        hidden = settings.count("n_embd")
        config = ModelConfig(
            num_layers=settings.count("n_layer"), hidden_size=hidden, num_attention_heads=settings.count("n_head"),
            seq_length=settings.count("n_positions"), max_position_embeddings=settings.count("n_positions"),
            ffn_hidden_size=settings.count("n_inner", None) or 4 * hidden, vocab_size=settings.count("vocab_size"),
            norm_epsilon=settings.get("layer_norm_epsilon", float, 1e-5),
            untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", bool, True),
            attention_dropout=settings.get("attn_pdrop", float, 0.1), hidden_dropout=settings.get("resid_pdrop", float, 0.1),
            init_method_std=settings.get("initializer_range", float, 0.02),
        )  # fmt: skip
        set_activation(config, settings.choice("activation_function", ACTIVATIONS, "gelu_new"))
        return config

    def renamed(self, name: str) -> str:
        return name

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        return {r"transformer\.h\.\d+\.attn\.(masked_)?bias": "the causal mask, which is not a weight"}

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "transformer.wte")
        yield from same("embedding.position_embeddings", "transformer.wpe")
        for i, ours in blocks(config):
            theirs = f"transformer.h.{i}."
            yield from same(f"{ours}input_layernorm", f"{theirs}ln_1", (WEIGHT, BIAS))
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", (WEIGHT, BIAS))
            for part, rows in enumerate((query, key, value)):
                wide = (s.g, s.r, s.d) if part == 0 else (s.n, s.d)
                bias = View(f"{theirs}attn.c_attn.bias", (3, *wide), (part,), stored=(3 * s.h,))
                turned = (*range(1, len(wide) + 1), 0)
                weight = View(f"{theirs}attn.c_attn.weight", (s.h, 3, *wide), (ALL, part), turned, stored=(s.h, 3 * s.h))
                yield Copy(rows(f"{ours}self_attention.linear_qkv", s, BIAS), bias)
                yield Copy(rows(f"{ours}self_attention.linear_qkv", s, WEIGHT), weight)
            for a, b in _TURNED:
                yield from same(f"{ours}{a}", f"{theirs}{b}", (BIAS,))
                yield Copy(View(f"{ours}{a}.weight"), View(f"{theirs}{b}.weight", order=(1, 0)))
        yield from same("decoder.final_layernorm", "transformer.ln_f", (WEIGHT, BIAS))
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "lm_head")

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        return "GPT2LMHeadModel"

    def num_classes(self, tensors: Tensors) -> int:
        return 0

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        return {}

    def fits(self, config: ModelConfig) -> str | None:
        assert config.num_attention_heads
        return misfit(
            config, model_family="gpt", position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False,
            relu=config.relu, squared_relu=False, disable_bias_linear=False, qk_layernorm=False, apply_layernorm_1p=False,
            num_groups=config.num_attention_heads, head_dim=(config.hidden_size or 0) // config.num_attention_heads,
        )  # fmt: skip

    def document(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_head": config.num_attention_heads,
            "n_positions": config.max_positions, "n_inner": config.ffn_size, "vocab_size": config.vocab_size,
            "activation_function": word_of(config.activation),
            "layer_norm_epsilon": config.norm_epsilon, "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "attn_pdrop": config.attention_dropout, "resid_pdrop": config.hidden_dropout, "embd_pdrop": config.hidden_dropout,
            "initializer_range": config.init_method_std, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        }  # fmt: skip
