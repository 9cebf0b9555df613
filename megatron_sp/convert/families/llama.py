"""Llama and models with the same tensors: ``LlamaForCausalLM``, ``MistralForCausalLM``, ``Qwen2ForCausalLM``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index
from megatron_sp.convert.families.family import Tensors, misfit
from megatron_sp.convert.families.parts import Sizes, blocks, gate_up, kinds, same, separate_qkv
from megatron_sp.convert.families.settings import Settings, set_biases
from megatron_sp.utils.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROTARY = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


class Llama:
    """transformers' Llama 1 to 3.2; base of the families that differ from it in few entries."""

    model_type, prefix, name = "llama", "model.", "Llama"
    groups_if_absent: int | None = None
    eps_if_absent, theta_if_absent = 1e-6, 10000.0

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        heads, hidden = settings.count("num_attention_heads"), settings.count("hidden_size")
        settings.choice("hidden_act", dict.fromkeys(("silu", "swish")), "silu")  # two names of one function
        config = ModelConfig(
            num_layers=settings.count("num_hidden_layers"), hidden_size=hidden, num_attention_heads=heads,
            num_query_groups=self._groups(settings, heads), kv_channels=settings.count("head_dim", hidden // heads),
            seq_length=settings.count("max_position_embeddings", 2048), ffn_hidden_size=settings.count("intermediate_size"),
            vocab_size=settings.count("vocab_size"), position_embedding_type="rope", normalization="RMSNorm",
            norm_epsilon=settings.get("rms_norm_eps", float, self.eps_if_absent), swiglu=True, disable_bias_linear=True,
            untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", bool, False),
            attention_dropout=settings.get("attention_dropout", float, 0.0), hidden_dropout=0.0,
            init_method_std=settings.get("initializer_range", float, 0.02),
        )  # fmt: skip
        settings.take_rotary(config, theta=self.theta_if_absent)
        self.take_own(config, settings)
        return config

    def _groups(self, settings: Settings, heads: int) -> int:
        """Return the number of query groups: that of the heads for null, and for a missing entry unless the class has its own default."""
        absent = "num_key_value_heads" not in settings.document
        return int(settings.count("num_key_value_heads", (absent and self.groups_if_absent) or heads))

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        """Set the fields that are specific to this member of the family."""
        attention = settings.get("attention_bias", bool, False)
        set_biases(config, qkv=attention, proj=attention, mlp=settings.get("mlp_bias", bool, False))

    def renamed(self, name: str) -> str:
        return name

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        return {_ROTARY: "rotary frequencies, which are worked out"}

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "model.embed_tokens")
        for i, ours in blocks(config):
            theirs = f"model.layers.{i}."
            attention = f"{theirs}self_attn."
            qkv = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
            yield from same(f"{ours}input_layernorm", f"{theirs}input_layernorm")
            yield from separate_qkv(f"{ours}self_attention.linear_qkv", qkv, s, kinds(config.qkv_bias))
            yield from same(f"{ours}self_attention.linear_proj", f"{theirs}self_attn.o_proj", kinds(config.proj_bias))
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm")
            yield from self.of_mlp(config, i, f"{ours}mlp.", f"{theirs}mlp.")
            if config.qk_layernorm:
                yield from same(f"{ours}self_attention.q_layernorm", f"{attention}q_norm")
                yield from same(f"{ours}self_attention.k_layernorm", f"{attention}k_norm")
        yield from same("decoder.final_layernorm", "model.norm")
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "lm_head")

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        """Yield the copies of a layer's MLP; the arguments are the prefixes of the names."""
        which = kinds(config.mlp_bias)
        yield from gate_up(f"{ours}linear_fc1", f"{theirs}gate_proj", f"{theirs}up_proj", config.ffn_size, which)
        yield from same(f"{ours}linear_fc2", f"{theirs}down_proj", which)

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        return f"{self.name}ForCausalLM"

    def num_classes(self, tensors: Tensors) -> int:
        return 0

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        return {}

    def fits(self, config: ModelConfig) -> str | None:
        wanted = {
            "model_family": "gpt", "position_embedding_type": "rope", "rotary_percent": 1.0, "normalization": "RMSNorm", "swiglu": True,
            "qk_layernorm": False, "apply_layernorm_1p": False, "rope_scaling": config.rope_scaling,
            "rotary_seq_len_interpolation_factor": config.rotary_seq_len_interpolation_factor,
        }  # fmt: skip
        return misfit(config, **{**wanted, **self.own(config)})

    def own(self, config: ModelConfig) -> dict[str, Any]:
        """Return the required values of the fields that are specific to this member of the family."""
        return {"proj_bias": config.qkv_bias}

    def document(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size, "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_groups, "head_dim": config.head_dim, "intermediate_size": config.ffn_size,
            "max_position_embeddings": config.max_positions, "vocab_size": config.vocab_size, "hidden_act": "silu",
            "rms_norm_eps": config.norm_epsilon, "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "attention_dropout": config.attention_dropout, "initializer_range": config.init_method_std, **Settings.rotary(config),
            **self.own_entries(config),
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of config.json that are specific to this member of the family."""
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


class Mistral(Llama):
    """Llama with a sliding window and without biases."""

    model_type, name = "mistral", "Mistral"
    groups_if_absent = 8

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        """Set the window: null means none, a missing entry means 4096, the default of transformers."""
        config.window_size = settings.count("sliding_window", None) if "sliding_window" in settings.document else 4096

    def own(self, config: ModelConfig) -> dict[str, Any]:
        return {"window_size": config.window_size, "qkv_bias": False, "proj_bias": False, "mlp_bias": False}

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": config.window_size}


class Qwen2(Llama):
    """Llama with biases on queries, keys and values only, and a sliding window in all layers or in none."""

    model_type, name = "qwen2", "Qwen2"
    groups_if_absent = 32

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        absent = "sliding_window" not in settings.document  # null means no window
        window = settings.count("sliding_window", 4096 if absent else None) if settings.get("use_sliding_window", bool, False) else None
        config.window_size = self._window(settings, window, settings.count("num_hidden_layers"))
        set_biases(config, qkv=True, proj=False, mlp=False)

    def _window(self, settings: Settings, window: int | None, layers: int) -> int | None:
        """Return the window of all layers. Raises CheckpointError: the layers differ or are unsupported, or the window size is missing."""
        first, where = settings.get("max_window_layers", int, 28), settings.where
        usual = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]
        kinds = [str(kind) for kind in settings.get("layer_types", list, usual)]
        if others := set(kinds) - {_FULL, _SLIDING}:
            raise CheckpointError(
                f"{where}: layer_types has {', '.join(sorted(others))[:100]!r}, which is another attention: only {_FULL!r} and {_SLIDING!r}"
                " can be converted"
            )
        if len(kinds) != layers:
            raise CheckpointError(f"{where}: layer_types has {len(kinds)} entries, and there are {layers} layers")
        if len(set(kinds)) > 1:
            raise CheckpointError(
                f"{where}: {kinds.count(_SLIDING)} of {layers} layers have a window (max_window_layers {first}, layer_types), and a model"
                " here has one in all of its layers or in none: it cannot be converted"
            )
        if kinds[0] == _FULL:
            return None
        if window is None:
            raise CheckpointError(f"{where}: layer_types gives every layer a window, and use_sliding_window and sliding_window give none")
        return window

    def own(self, config: ModelConfig) -> dict[str, Any]:
        return {"window_size": config.window_size, "qkv_bias": True, "proj_bias": False, "mlp_bias": False}

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        if config.window_size is None:
            return {"use_sliding_window": False}
        return {"use_sliding_window": True, "sliding_window": config.window_size, "max_window_layers": 0}
