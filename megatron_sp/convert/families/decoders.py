"""Families of decoders: GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, and Llama's with experts: Mixtral, Qwen3-MoE, OLMoE.

GPT-2's projections are Conv1D, stored [in, out], with q, k and v concatenated. GPT-NeoX's fused projection has the
query, key and value of each head in turn, as ours. Llama and its relatives have separate projections. Files have a
tensor for each expert; transformers stacks them in memory, and stacked files are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from megatron_sp.config.schema import ModelConfig
from megatron_sp.config.schema_model import MOST_LAYERS
from megatron_sp.convert.copies import Copy, Index, View
from megatron_sp.convert.families.family import ALL, BIAS, BOTH, HIDDEN_ACT, SIZES, WEIGHT, Entry, Family, Settings

from megatron_sp.convert.families.family import Sizes, Tensors, blocks, fused_parts, gate_up, kinds  # isort: skip
from megatron_sp.convert.families.family import of_layer_norm, pattern_of, rotary_entries, same  # isort: skip
from megatron_sp.convert.families.family import separate_qkv, set_activation, set_biases  # isort: skip
from megatron_sp.utils.errors import CheckpointError

_MASK, _FREQUENCIES = "the causal mask, which is not a weight", "rotary frequencies, which are worked out"
_TURNED = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}


class GPT2(Family):
    """transformers' GPT-2."""

    model_type, prefix, name, head, is_tied = "gpt2", "transformer.", "GPT2", "LMHeadModel", True
    ignored: Mapping[str, str] = {r"transformer\.h\.\d+\.attn\.(masked_)?bias": _MASK}
    entries = (
        Entry("n_layer", "num_layers"), Entry("n_embd", "hidden_size"), Entry("n_head", "num_attention_heads"),
        Entry("n_positions", "max_position_embeddings"), Entry("n_inner", "ffn_hidden_size", None),
        Entry("vocab_size", "vocab_size"), Entry("layer_norm_epsilon", "norm_epsilon", 1e-5, float),
        Entry("attn_pdrop", "attention_dropout", 0.1, float), Entry("resid_pdrop", "hidden_dropout", 0.1, float),
        Entry("initializer_range", "init_method_std", 0.02, float),
    )  # fmt: skip

    def complete(self, config: ModelConfig, settings: Settings, tensors: Tensors) -> None:
        settings.require("scale_attn_weights", True, "leaves attention scores as they are")
        why = "divides attention scores by the number of the layer"
        settings.require("scale_attn_by_inverse_layer_idx", False, why)
        settings.require("add_cross_attention", False, "attends to another model")
        config.seq_length = config.max_position_embeddings
        config.ffn_hidden_size = config.ffn_hidden_size or 4 * (config.hidden_size or 0)
        set_activation(config, settings, "activation_function", "gelu_new")

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "activation_function": HIDDEN_ACT[config.activation], "embd_pdrop": config.hidden_dropout,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        }  # fmt: skip

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_family": "gpt", "position_embedding_type": "learned_absolute", "swiglu": False,
            "disable_bias_linear": False, **of_layer_norm(config),
        }  # fmt: skip

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "transformer.wte")
        yield from same("embedding.position_embeddings", "transformer.wpe")
        for i, ours in blocks(config):
            theirs = f"transformer.h.{i}."
            yield from same(f"{ours}input_layernorm", f"{theirs}ln_1", BOTH)
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", BOTH)
            biases, weights = (fused_parts(f"{ours}self_attention.linear_qkv", s, kind) for kind in (BIAS, WEIGHT))
            for part in range(3):
                heads = (s.n, s.d) if part else (s.g, s.r, s.d)
                bias = View(f"{theirs}attn.c_attn.bias", (3, *heads), (part,), stored=(3 * s.h,))
                turned, stored = (*range(1, len(heads) + 1), 0), (s.h, 3 * s.h)
                weight = View(f"{theirs}attn.c_attn.weight", (s.h, 3, *heads), (ALL, part), turned, stored)
                yield from (Copy(biases[part], bias), Copy(weights[part], weight))
            for a, b in _TURNED.items():
                yield from same(f"{ours}{a}", f"{theirs}{b}", (BIAS,))
                yield Copy(View(f"{ours}{a}.weight"), View(f"{theirs}{b}.weight", order=(1, 0)))
        yield from same("decoder.final_layernorm", "transformer.ln_f", BOTH)
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "lm_head")


_LINEAR = (
    ("self_attention.linear_qkv", "attention.query_key_value", "qkv_bias"),
    ("self_attention.linear_proj", "attention.dense", "proj_bias"), ("mlp.linear_fc1", "mlp.dense_h_to_4h", "mlp_bias"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h", "mlp_bias"),
)  # fmt: skip
_DROPOUT = Entry("attention_dropout", "attention_dropout", 0.0, float)


class GPTNeoX(Family):
    """transformers' GPT-NeoX (Pythia)."""

    model_type, prefix, name, is_tied = "gpt_neox", "gpt_neox.", "GPTNeoX", False
    ignored: Mapping[str, str] = {
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": _MASK,
        r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq": _FREQUENCIES,
    }
    entries = (
        *SIZES, Entry("max_position_embeddings", "seq_length", 2048),
        Entry("layer_norm_eps", "norm_epsilon", 1e-5, float), _DROPOUT,
        Entry("hidden_dropout", "hidden_dropout", 0.0, float),
        Entry("use_parallel_residual", "use_parallel_residual", True, bool),
    )  # fmt: skip

    def complete(self, config: ModelConfig, settings: Settings, tensors: Tensors) -> None:
        config.position_embedding_type = "rope"
        set_activation(config, settings, "hidden_act", "gelu")
        set_biases(config, attention=settings.get("attention_bias", bool, True), mlp=True)
        settings.take_rotary(config, share=0.25, base="rotary_emb_base", percent="rotary_pct")

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        rotary = rotary_entries(config, base="rotary_emb_base", percent="rotary_pct")
        return {"hidden_act": HIDDEN_ACT[config.activation], "attention_bias": config.qkv_bias, **rotary}

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_family": "gpt", "position_embedding_type": "rope", "is_gated": False, **of_layer_norm(config),
            "mlp_bias": True, "proj_bias": config.qkv_bias, "use_parallel_residual": config.use_parallel_residual,
            "rope_scaling": config.rope_scaling,
            "rotary_seq_len_interpolation_factor": config.rotary_seq_len_interpolation_factor,
        }  # fmt: skip

    def renamed(self, name: str) -> str:
        return "embed_out.weight" if name == "lm_head.weight" else name  # the class and its files name it differently

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        yield from same("embedding.word_embeddings", "gpt_neox.embed_in")
        for i, ours in blocks(config):
            theirs = f"gpt_neox.layers.{i}."
            yield from same(f"{ours}input_layernorm", f"{theirs}input_layernorm", BOTH)
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm", BOTH)
            for a, b, bias in _LINEAR:
                yield from same(f"{ours}{a}", f"{theirs}{b}", kinds(getattr(config, bias)))
        yield from same("decoder.final_layernorm", "gpt_neox.final_layer_norm", BOTH)
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "embed_out")


_FULL, _SLIDING = "full_attention", "sliding_attention"


class Llama(Family):
    """transformers' Llama 1 to 3.2; base of the families that differ from it in few entries."""

    model_type, prefix, name, is_tied = "llama", "model.", "Llama", False
    ignored: Mapping[str, str] = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": _FREQUENCIES}
    entries: tuple[Entry, ...] = (*SIZES, Entry("max_position_embeddings", "seq_length", 2048), _DROPOUT)
    wants: Mapping[str, Any] = {}  # what fields must be in this family
    free: tuple[str, ...] = ()  # fields that may be anything in this family
    groups_if_absent: int | None = None  # key/value heads where the entry is missing; None: as many as query heads
    head_dim_if_absent: int | None = None  # None: hidden size / heads
    share_if_absent: float | None = None  # rotated part of a head; None: all of it, always
    turns_pairs = False  # rotary positions turn neighbouring channels, not one of each half
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    eps_entry, activation = "rms_norm_eps", "swiglu"
    norms: tuple[str, ...] = (WEIGHT,)  # the tensors of a norm
    acts: tuple[str, ...] = ("silu", "swish")  # names of the activation in files
    eps_if_absent, theta_if_absent = 1e-6, 10000.0

    def complete(self, config: ModelConfig, settings: Settings, tensors: Tensors) -> None:
        heads, hidden = config.num_attention_heads or 1, config.hidden_size or 0
        settings.choice("hidden_act", dict.fromkeys(self.acts), self.acts[0])
        absent = "num_key_value_heads" not in settings.document  # null means as many as query heads
        groups = settings.count("num_key_value_heads", (absent and self.groups_if_absent) or heads)
        config.num_query_groups = int(groups)
        config.kv_channels = settings.count("head_dim", self.head_dim_if_absent or hidden // heads)
        config.norm_epsilon = settings.get(self.eps_entry, float, self.eps_if_absent)
        config.position_embedding_type, config.normalization = "rope", self.normalization
        config.swiglu, config.squared_relu = self.activation == "swiglu", self.activation == "squared_relu"
        config.disable_bias_linear, config.hidden_dropout = True, 0.0
        settings.take_rotary(
            config, theta=self.theta_if_absent, share=self.share_if_absent or 1.0, percent=self._percent
        )
        self.take_own(config, settings)

    @property
    def _percent(self) -> str | None:
        return None if self.share_if_absent is None else "partial_rotary_factor"

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        """Set the fields that are specific to this family."""
        attention, mlp = settings.get("attention_bias", bool, False), settings.get("mlp_bias", bool, False)
        set_biases(config, attention=attention, mlp=mlp)

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_family": "gpt", "position_embedding_type": "rope", "normalization": self.normalization,
            "rotary_percent": 1.0 if self.share_if_absent is None else config.rotary_percent,
            "activation": self.activation, "qk_layernorm": False, "apply_layernorm_1p": False,
            "rope_scaling": config.rope_scaling,
            "rotary_seq_len_interpolation_factor": config.rotary_seq_len_interpolation_factor,
            "proj_bias": config.qkv_bias, **{field: getattr(config, field) for field in self.free}, **self.wants,
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "num_key_value_heads": config.num_groups, "head_dim": config.head_dim, "hidden_act": self.acts[0],
            self.eps_entry: config.norm_epsilon, **rotary_entries(config, percent=self._percent),
            **self.more_entries(config),
        }  # fmt: skip

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of config.json that are specific to this family."""
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "model.embed_tokens")
        for i, ours in blocks(config):
            theirs = f"model.layers.{i}."
            yield from same(f"{ours}input_layernorm", f"{theirs}input_layernorm", self.norms)
            yield from self.of_attention(config, s, f"{ours}self_attention.", f"{theirs}self_attn.")
            yield from same(f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm", self.norms)
            yield from self.of_mlp(config, i, f"{ours}mlp.", theirs)
        yield from same("decoder.final_layernorm", "model.norm", self.norms)
        if config.untie_embeddings_and_output_weights:
            yield from same("output_layer", "lm_head")

    def of_attention(self, config: ModelConfig, s: Sizes, ours: str, theirs: str) -> Iterable[Copy]:
        """Yield the copies of a layer's projections, and of the norms on its heads."""
        qkv = (f"{theirs}q_proj", f"{theirs}k_proj", f"{theirs}v_proj")
        rotary = config.rotary_dim if self.turns_pairs else 0
        yield from separate_qkv(f"{ours}linear_qkv", qkv, s, kinds(config.qkv_bias), rotary)
        yield from same(f"{ours}linear_proj", f"{theirs}o_proj", kinds(config.proj_bias))
        if config.qk_layernorm:
            yield from same(f"{ours}q_layernorm", f"{theirs}q_norm")
            yield from same(f"{ours}k_layernorm", f"{theirs}k_norm")

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        """Yield the copies of a layer's MLP, given the prefix of our names of it and of their names of the layer."""
        which, theirs = kinds(config.mlp_bias), f"{theirs}mlp."
        if config.is_gated:
            yield from gate_up(f"{ours}linear_fc1", f"{theirs}gate_proj", f"{theirs}up_proj", config.ffn_size, which)
        else:
            yield from same(f"{ours}linear_fc1", f"{theirs}up_proj", which)
        yield from same(f"{ours}linear_fc2", f"{theirs}down_proj", which)


class Mistral(Llama):
    """Llama with a sliding window and without biases."""

    model_type, name, groups_if_absent, free = "mistral", "Mistral", 8, ("window_size",)
    wants: Mapping[str, Any] = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        """Set the window: null means none, a missing entry means 4096, the default of transformers."""
        config.window_size = settings.count("sliding_window", None) if "sliding_window" in settings.document else 4096

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": config.window_size}


class Qwen2(Llama):
    """Llama with biases on queries, keys and values only, and a sliding window in all layers or in none."""

    model_type, name, groups_if_absent, free = "qwen2", "Qwen2", 32, ("window_size",)
    wants: Mapping[str, Any] = {"qkv_bias": True, "proj_bias": False, "mlp_bias": False}
    has_window_if_silent = False  # without an entry use_sliding_window

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        set_biases(config, attention=True, proj=False, mlp=False)
        self.take_window(config, settings)

    def take_window(self, config: ModelConfig, settings: Settings) -> None:
        absent = "sliding_window" not in settings.document  # null means no window
        window, where, layers = None, settings.where, config.num_layers or 0
        if settings.get("use_sliding_window", bool, self.has_window_if_silent):
            window = settings.count("sliding_window", 4096 if absent else None)
        first = settings.get("max_window_layers", int, 28)
        usual = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]
        types = [str(kind) for kind in settings.get("layer_types", list, usual)]
        if others := set(types) - {_FULL, _SLIDING}:
            raise CheckpointError(f"{where}: layer_types has {', '.join(sorted(others))[:100]!r}, which is another"
                                  f" attention: only {_FULL!r} and {_SLIDING!r} can be converted")  # fmt: skip
        if len(types) != layers:
            raise CheckpointError(f"{where}: layer_types has {len(types)} entries, and there are {layers} layers")
        if len(set(types)) > 1:
            raise CheckpointError(f"{where}: {types.count(_SLIDING)} of {layers} layers have a window"
                                  f" (max_window_layers {first}, layer_types), and a model here has one in all of its"
                                  " layers or in none: it cannot be converted")  # fmt: skip
        if types[0] == _SLIDING and window is None:
            raise CheckpointError(f"{where}: layer_types gives every layer a window, and use_sliding_window and"
                                  " sliding_window give none")  # fmt: skip
        config.window_size = window if types[0] == _SLIDING else None

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        if config.window_size is None:
            return {"use_sliding_window": False}
        return {"use_sliding_window": True, "sliding_window": config.window_size, "max_window_layers": 0}


_MOST_EXPERTS = 1 << 12  # of a stacked tensor of a file, whose shape is taken at its word
_STACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj")


class Experts(Llama):
    """Llama with experts in some or all layers."""

    inside, router, gate, up, down = "mlp.", "gate", "gate_proj", "up_proj", "down_proj"
    num_experts, expert_width, aux_coeff = "num_experts", "intermediate_size", 0.001
    wants: Mapping[str, Any] = {
        "has_experts": True, "shared_expert_size": 0, "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "mlp_bias": False,
    }  # fmt: skip

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        other = next(name for name in ("num_experts", "num_local_experts") if name != self.num_experts)
        config.num_experts = settings.count(self.num_experts if self.num_experts in settings.document else other)
        if config.num_experts < 2:
            raise CheckpointError(f"{settings.where}: {self.num_experts} is {config.num_experts}: a mixture has at"
                                  " least 2 experts")  # fmt: skip
        config.moe_router_topk = settings.count("num_experts_per_tok")
        config.moe_ffn_hidden_size = settings.count(self.expert_width)
        config.moe_aux_loss_coeff = settings.get("router_aux_loss_coef", float, self.aux_coeff)
        if config.moe_aux_loss_coeff < 0:
            raise CheckpointError(f"{settings.where}: router_aux_loss_coef must be at least 0, found"
                                  f" {config.moe_aux_loss_coeff:g}")  # fmt: skip
        config.moe_router_load_balancing_type = "global_aux_loss" if config.moe_aux_loss_coeff else None

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            self.num_experts: config.num_experts, "num_experts_per_tok": config.moe_router_topk,
            self.expert_width: config.expert_ffn_size, "router_aux_loss_coef": config.moe_aux_loss_coeff,
        }  # fmt: skip

    def renamed(self, name: str) -> str:
        return re.sub(r"(model\.layers\.\d+\.)mlp\.gate\.weight", rf"\1{self.inside}{self.router}.weight", name)

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        match = _STACKED.fullmatch(name)
        if match is None or len(shape) != 3 or not 1 <= shape[0] <= _MOST_EXPERTS:
            return {}
        regions: dict[str, Index] = {}
        for expert in range(shape[0]):
            prefix = f"{match[1]}{self.inside}experts.{expert}."
            if match[2] == "down":
                regions[f"{prefix}{self.down}.weight"] = (expert,)
            else:
                half = shape[1] // 2
                regions[f"{prefix}{self.gate}.weight"] = (expert, slice(0, half))
                regions[f"{prefix}{self.up}.weight"] = (expert, slice(half, None))
        return regions

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        if layer not in config.expert_layers(config.num_layers or 0):
            yield from super().of_mlp(config, layer, ours, theirs)
            return
        inside = f"{theirs}{self.inside}"
        yield from same(f"{ours}router", f"{inside}{self.router}")
        for expert in range(config.num_experts or 0):
            name = f"{inside}experts.{expert}."
            gate, up, width = f"{name}{self.gate}", f"{name}{self.up}", config.expert_ffn_size
            yield from gate_up(f"{ours}experts.linear_fc1", gate, up, width, expert=expert)
            yield Copy(View(f"{ours}experts.linear_fc2.weight", None, (expert,)), View(f"{name}{self.down}.weight"))


def everywhere(config: ModelConfig) -> str:
    # of all spellings of "experts in every layer" the one that this model has, so that it fits
    layers = config.num_layers or 0
    return config.moe_layer_freq if len(config.expert_layers(layers)) == layers else "1"


class _NormedExperts(Experts):
    """Experts behind attention with norms on queries and keys, whose weights may not sum to 1."""

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        super().take_own(config, settings)
        set_biases(config, attention=settings.get("attention_bias", bool, False), mlp=False)
        config.qk_layernorm = True
        config.moe_router_pre_softmax = not settings.get("norm_topk_prob", bool, False)

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        normalizes = not config.moe_router_pre_softmax
        return {**super().more_entries(config), "norm_topk_prob": normalizes, "attention_bias": config.qkv_bias}


class Mixtral(Experts):
    """Mistral with experts in all layers, whose weights sum to 1."""

    model_type, name, groups_if_absent, free = "mixtral", "Mixtral", 8, ("window_size",)
    wants: Mapping[str, Any] = {
        **Experts.wants, "qkv_bias": False, "proj_bias": False, "moe_router_pre_softmax": False,
    }  # fmt: skip
    inside, gate, up, down, num_experts = "block_sparse_moe.", "w1", "w3", "w2", "num_local_experts"
    eps_if_absent, theta_if_absent = 1e-5, 1e6

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("router_jitter_noise", 0.0, "disturbs the input of the router")
        super().take_own(config, settings)
        config.window_size = settings.count("sliding_window", None)

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().wanted(config), "moe_layer_freq": everywhere(config)}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().more_entries(config), "sliding_window": config.window_size}


class Qwen3Moe(_NormedExperts):
    """Qwen3 with experts in some or all layers, norms on query and key heads, a window in all layers or in none."""

    model_type, name, groups_if_absent, free = "qwen3_moe", "Qwen3Moe", 4, ("window_size",)
    expert_width, wants = "moe_intermediate_size", {**Experts.wants, "qk_layernorm": True}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        super().take_own(config, settings)
        if settings.get("use_sliding_window", bool, False):
            absent = "sliding_window" not in settings.document
            config.window_size = settings.count("sliding_window", 4096 if absent else None)
        step, dense = settings.count("decoder_sparse_step", 1), settings.get("mlp_only_layers", list, [])
        layers = config.num_layers or 0
        if layers <= MOST_LAYERS:  # else it is refused elsewhere
            config.moe_layer_freq = pattern_of(i not in dense and (i + 1) % step == 0 for i in range(layers))
        if config.moe_layer_freq == pattern_of([False] * layers):
            raise CheckpointError(f"{settings.where}: decoder_sparse_step and mlp_only_layers leave no layer with"
                                  " experts: it is not a mixture")  # fmt: skip

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        layers = config.num_layers or 0
        dense = sorted(set(range(layers)) - set(config.expert_layers(layers)))
        window = {} if config.window_size is None else {"sliding_window": config.window_size}
        return {
            **super().more_entries(config), "decoder_sparse_step": 1, "mlp_only_layers": dense,
            "intermediate_size": config.ffn_size, "use_sliding_window": config.window_size is not None, **window,
        }  # fmt: skip


class Olmoe(_NormedExperts):
    """OLMoE: experts in all layers, norms over all queries and over all keys of a token."""

    model_type, name, aux_coeff, eps_if_absent = "olmoe", "Olmoe", 0.01, 1e-5
    wants: Mapping[str, Any] = {**Experts.wants, "qk_layernorm": True, "qk_layernorm_scope": "all"}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("clip_qkv", None, "limits queries, keys and values")
        super().take_own(config, settings)
        config.qk_layernorm_scope = "all"

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        assert config.hidden_size and config.num_attention_heads
        head_dim = config.hidden_size // config.num_attention_heads
        return {**super().wanted(config), "head_dim": head_dim, "moe_layer_freq": everywhere(config)}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().more_entries(config), "clip_qkv": None}
