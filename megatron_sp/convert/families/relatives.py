"""Families that differ from Llama, or from its relatives with experts, in few entries, names and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, View
from megatron_sp.convert.families.decoders import Experts, Llama, Qwen2, everywhere
from megatron_sp.convert.families.family import BOTH, Settings, Sizes, kinds, pattern_of, same

from megatron_sp.convert.families.family import fused_parts, gate_up, set_biases  # isort: skip
from megatron_sp.utils.errors import CheckpointError

_NO_BIASES = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}


class Qwen3(Qwen2):
    """Qwen3 (0.6B to 32B): Qwen2 with norms on query and key heads, and a width of heads of its own."""

    model_type, name, head_dim_if_absent = "qwen3", "Qwen3", 128
    wants: Mapping[str, Any] = {"qk_layernorm": True, "mlp_bias": False}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        set_biases(config, attention=settings.get("attention_bias", bool, False), mlp=False)
        config.qk_layernorm = True
        self.take_window(config, settings)

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().more_entries(config), "attention_bias": config.qkv_bias}


class SeedOss(Llama):
    """Seed-OSS: biases on queries, keys and values, and perhaps on the output of attention.

    Its dropout of block outputs is ours of embeddings, too.
    """

    model_type, name, free, head_dim_if_absent = "seed_oss", "SeedOss", ("proj_bias",), 128

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        attention, out = settings.get("attention_bias", bool, True), settings.get("attention_out_bias", bool, False)
        set_biases(config, attention=attention, proj=out, mlp=settings.get("mlp_bias", bool, False))
        config.hidden_dropout = settings.get("residual_dropout", float, 0.1)
        config.attention_dropout = settings.get("attention_dropout", float, 0.1)

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": config.qkv_bias, "attention_out_bias": config.proj_bias, "mlp_bias": config.mlp_bias,
            "residual_dropout": config.hidden_dropout,
        }  # fmt: skip


class Arcee(Llama):
    """Arcee (AFM): Llama with a squared ReLU in place of a gate."""

    model_type, name, activation, acts, eps_if_absent = "arcee", "Arcee", "squared_relu", ("relu2",), 1e-5


class Ernie(Llama):
    """ERNIE 4.5, dense: all linear layers have biases or none, and rotary positions turn neighbouring channels."""

    model_type, name, is_tied, turns_pairs = "ernie4_5", "Ernie4_5", True, True
    theta_if_absent, eps_if_absent, head_dim_if_absent, groups_if_absent = 500000.0, 1e-5, 128, 2

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        has_biases = settings.get("use_bias", bool, False)
        set_biases(config, attention=has_biases, mlp=has_biases)

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().wanted(config), "mlp_bias": config.qkv_bias}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {"use_bias": config.qkv_bias}


class Phi3(Llama):
    """Phi-3 and Phi-4: Llama whose file has one tensor for q, k and v, and one for gate and up."""

    model_type, name, free, share_if_absent, eps_if_absent = "phi3", "Phi3", ("window_size",), 1.0, 1e-5
    wants: Mapping[str, Any] = _NO_BIASES

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        config.hidden_dropout = settings.get("resid_pdrop", float, 0.0)
        config.window_size = settings.count("sliding_window", None)

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        assert config.hidden_size and config.num_attention_heads
        return {**super().wanted(config), "head_dim": config.hidden_size // config.num_attention_heads}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "sliding_window": config.window_size, "resid_pdrop": config.hidden_dropout, "embd_pdrop": 0.0,
            "original_max_position_embeddings": config.max_positions,
        }  # fmt: skip

    def of_attention(self, config: ModelConfig, s: Sizes, ours: str, theirs: str) -> Iterable[Copy]:
        # [q of all heads | k of all groups | v of all groups]: a group's queries are r heads in a row
        name, heads = f"{theirs}qkv_proj.weight", (s.n + 2 * s.g, s.d, s.h)
        for number, part in enumerate(fused_parts(f"{ours}linear_qkv", s, "weight")):
            for group in range(s.g):
                first = s.n + (number - 1) * s.g + group
                rows: Any = first if number else slice(group * s.r, (group + 1) * s.r)
                own = View(part.name, part.shape, (group, part.index[1]))
                yield Copy(own, View(name, heads, (rows,), stored=(heads[0] * s.d, s.h)))
        yield from same(f"{ours}linear_proj", f"{theirs}o_proj")

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        yield from same(f"{ours}linear_fc1", f"{theirs}mlp.gate_up_proj")
        yield from same(f"{ours}linear_fc2", f"{theirs}mlp.down_proj")


class Starcoder2(Llama):
    """StarCoder2: LayerNorm, GELU and biases everywhere, a sliding window in all layers or in none."""

    model_type, name, is_tied, free = "starcoder2", "Starcoder2", True, ("window_size",)
    normalization, norms, eps_entry, eps_if_absent, groups_if_absent = "LayerNorm", BOTH, "norm_epsilon", 1e-5, 2
    activation, acts = "gelu_tanh", ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        has_biases = settings.get("use_bias", bool, True)
        set_biases(config, attention=has_biases, mlp=has_biases)
        config.gelu_approximate = "tanh"
        config.hidden_dropout = settings.get("residual_dropout", float, 0.0)
        config.window_size = settings.count("sliding_window", None)

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().wanted(config), "mlp_bias": config.qkv_bias}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        dropout = {"residual_dropout": config.hidden_dropout, "embedding_dropout": config.hidden_dropout}
        return {"use_bias": config.qkv_bias, "sliding_window": config.window_size, **dropout}

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        for own, other in (("linear_fc1", "c_fc"), ("linear_fc2", "c_proj")):
            yield from same(f"{ours}{own}", f"{theirs}mlp.{other}", kinds(config.mlp_bias))


class Nemotron(Llama):
    """Nemotron-4 and Minitron: LayerNorm stored as (weight - 1), squared ReLU, half of each head turned."""

    model_type, name, share_if_absent = "nemotron", "Nemotron", 0.5
    normalization, norms, eps_entry, eps_if_absent = "LayerNorm", BOTH, "norm_eps", 1e-5
    activation, acts = "squared_relu", ("relu2",)
    wants: Mapping[str, Any] = {"apply_layernorm_1p": True}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        super().take_own(config, settings)
        config.apply_layernorm_1p = True


class _SigmoidExperts(Experts):
    """Experts by sigmoid scores with a bias for the choice alone, and perhaps shared ones (DeepSeek-V3)."""

    num_experts, expert_width, aux_coeff = "n_routed_experts", "moe_intermediate_size", 0.0
    bias, shared, scaling, num_shared = (
        "gate.e_score_correction_bias",
        "shared_experts.",
        "routed_scaling_factor",
        "n_shared_experts",
    )
    dense_first_if_absent, o_has_bias = 1, False
    qk_norms: bool | None = True  # None: some have them
    wants: Mapping[str, Any] = {
        "has_experts": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "mlp_bias": False,
    }  # fmt: skip

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        super().take_own(config, settings)
        config.moe_router_score_function, config.moe_router_enable_expert_bias = "sigmoid", True
        attention = settings.get("attention_bias", bool, False)
        set_biases(config, attention=attention, proj=attention and self.o_has_bias, mlp=False)
        config.qk_layernorm = bool(self.qk_norms)
        shared = settings.get(self.num_shared, int, 0) if self.num_shared else 0
        config.moe_shared_expert_intermediate_size = shared * config.expert_ffn_size or None
        factor = settings.get(self.scaling, float, 1.0) if self.scaling else 1.0
        config.moe_router_topk_scaling_factor = None if factor == 1.0 else factor
        if settings.count("n_group", 1) > 1:
            config.moe_router_num_groups = settings.count("n_group")
            config.moe_router_group_topk = settings.count("topk_group", 1)
        config.moe_layer_freq = pattern_of(self.with_experts(config, settings))
        if "1" not in config.moe_layer_freq:
            raise CheckpointError(f"{settings.where} leaves no layer with experts: it is not a mixture")
        if problem := self._of_router(config):
            raise CheckpointError(f"{settings.where}: {problem}")

    def with_experts(self, config: ModelConfig, settings: Settings) -> list[bool]:
        """Return which layers have experts."""
        first = settings.get("first_k_dense_replace", int, self.dense_first_if_absent)
        return [i >= first for i in range(config.num_layers or 0)]

    def _of_router(self, config: ModelConfig) -> str | None:
        # what this router and that of transformers compute differently
        top, groups = config.moe_router_topk, config.moe_router_group_topk or 1
        if top == 1:
            return "moe_router_topk is 1, whose weight is 1 there and the sigmoid here: two or more can be converted"
        if (config.moe_router_num_groups or 1) > 1 and top != 2 * groups:
            return (f"groups of experts are ranked by their best 2 there and by their best {top // groups} here:"
                    f" {top} experts of {top // 2} groups can be converted")  # fmt: skip
        return None

    def fits(self, config: ModelConfig) -> str | None:
        return super().fits(config) or self._of_router(config) or self._of_layers(config)

    def _of_layers(self, config: ModelConfig) -> str | None:
        layers, has = config.num_layers or 0, config.expert_layers(config.num_layers or 0)
        if list(has) != list(range(layers - len(has), layers)):
            return f"layers {', '.join(map(str, has))[:60]} of {layers} have experts, not all from a first one on"
        return self._of_shared(config)

    def _of_shared(self, config: ModelConfig) -> str | None:
        size, of_each = config.shared_expert_size, config.expert_ffn_size
        return f"the shared expert is {size} wide, which is no multiple of {of_each}" if size % of_each else None

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        qk = config.qk_layernorm if self.qk_norms is None else self.qk_norms
        return {**super().wanted(config), "qk_layernorm": qk, "proj_bias": config.qkv_bias and self.o_has_bias}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        layers = config.num_layers or 0
        entries = {
            **super().more_entries(config), "attention_bias": config.qkv_bias, "norm_topk_prob": True,
            "first_k_dense_replace": layers - len(config.expert_layers(layers)),
            "n_group": config.moe_router_num_groups or 1, "topk_group": config.moe_router_group_topk or 1,
        }  # fmt: skip
        if not config.moe_aux_loss_coeff:
            entries.pop("router_aux_loss_coef")
        if self.num_shared:
            entries[self.num_shared] = config.shared_expert_size // config.expert_ffn_size
        if self.scaling:
            entries[self.scaling] = config.moe_router_topk_scaling_factor or 1.0
        return entries

    def passed_over(self, config: ModelConfig) -> dict[str, str]:
        # layers of multi-token prediction follow the last one
        layers = config.num_layers or 0
        numbers = "|".join(str(layers + i) for i in range(8))
        return {**super().passed_over(config), rf"model\.layers\.({numbers})\..*": "a layer of multi-token prediction"}

    def renamed(self, name: str) -> str:
        # as transformers names them in memory
        name = re.sub(r"(model\.layers\.\d+\.)mlp\.shared_experts\.", rf"\1{self.inside}{self.shared}", name)
        bias = r"(model\.layers\.\d+\.)mlp\.(gate\.)?e_score_correction_bias"
        return re.sub(bias, rf"\1{self.inside}{self.bias}", super().renamed(name))

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        yield from super().of_mlp(config, layer, ours, theirs)
        if layer in config.expert_layers(config.num_layers or 0):
            inside = f"{theirs}{self.inside}"
            yield Copy(View(f"{ours}router.expert_bias"), View(f"{inside}{self.bias}"))
            if size := config.shared_expert_size:
                one, name = f"{ours}shared_experts.", f"{inside}{self.shared}"
                yield from gate_up(f"{one}linear_fc1", f"{name}gate_proj", f"{name}up_proj", size)
                yield from same(f"{one}linear_fc2", f"{name}down_proj")


class Glm4Moe(_SigmoidExperts):
    """GLM-4.5 to 4.7, without their layers of multi-token prediction."""

    model_type, name, share_if_absent, eps_if_absent, groups_if_absent = "glm4_moe", "Glm4Moe", 0.5, 1e-5, 8
    qk_norms = None

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("norm_topk_prob", True, "leaves the weights of experts as they are")
        super().take_own(config, settings)
        config.qk_layernorm = settings.get("use_qk_norm", bool, False)

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        entries = {**super().more_entries(config), "use_qk_norm": config.qk_layernorm, "num_nextn_predict_layers": 0}
        return {**entries, "intermediate_size": config.ffn_size}


class Dots1(_SigmoidExperts):
    """dots.llm1: norms on query and key heads, the same window in all layers or in none."""

    model_type, name, o_has_bias, dense_first_if_absent = "dots1", "Dots1", True, 0

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        if not settings.get("norm_topk_prob", bool, False):
            raise CheckpointError(f"{settings.where}: norm_topk_prob is false, which leaves the weights of experts as"
                                  " they are: only true can be converted")  # fmt: skip
        kinds_of = set(settings.get("layer_types", list, []))
        if kinds_of - {"full_attention"}:
            raise CheckpointError(f"{settings.where}: layer_types has {str(sorted(map(str, kinds_of)))[:100]}: only"
                                  " 'full_attention' can be converted")  # fmt: skip
        super().take_own(config, settings)

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        layers = ["full_attention"] * (config.num_layers or 0)
        return {**super().more_entries(config), "intermediate_size": config.ffn_size, "layer_types": layers}


class SolarOpen(_SigmoidExperts):
    """Solar-Open: experts in all layers, no norms on heads."""

    model_type, name, qk_norms, theta_if_absent, eps_if_absent = "solar_open", "SolarOpen", False, 1e6, 1e-5
    head_dim_if_absent, groups_if_absent, dense_first_if_absent = 128, 8, 0
    share_if_absent = 1.0
    entries = (*(entry for entry in Llama.entries if entry.name != "intermediate_size"),)

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("norm_topk_prob", True, "leaves the weights of experts as they are")
        super().take_own(config, settings)
        config.ffn_hidden_size = config.moe_ffn_hidden_size
        config.moe_layer_freq = "1"

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().wanted(config), "moe_layer_freq": everywhere(config)}


class MiniMaxM2(_SigmoidExperts):
    """MiniMax-M2: norms over all queries and all keys of a token, a part of each head turned."""

    model_type, name, theta_if_absent, share_if_absent = "minimax_m2", "MiniMaxM2", 5e6, 1.0
    inside, gate, up, down, bias = "block_sparse_moe.", "w1", "w3", "w2", "e_score_correction_bias"
    num_experts, expert_width, num_shared, scaling = "num_local_experts", "intermediate_size", "", ""
    head_dim_if_absent, groups_if_absent, dense_first_if_absent, aux_coeff = 128, 8, 0, 0.001
    wants: Mapping[str, Any] = {
        **_SigmoidExperts.wants, "qk_layernorm_scope": "all", "shared_expert_size": 0, "qkv_bias": False,
        "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    }  # fmt: skip

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("router_jitter_noise", 0.0, "disturbs the input of the router")
        super().take_own(config, settings)
        config.qk_layernorm_scope = "all"
        if (turned := settings.count("rotary_dim", None)) is not None:  # as published files have it
            config.rotary_percent = turned / config.head_dim

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().wanted(config), "moe_layer_freq": everywhere(config)}

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {"router_aux_loss_coef": config.moe_aux_loss_coeff, **super().more_entries(config),
                "rotary_dim": config.rotary_dim}  # fmt: skip


class HunYuan3(_SigmoidExperts):
    """Hy3: norms on query and key heads, which layers have experts by name."""

    model_type, name, theta_if_absent, eps_if_absent, o_has_bias = "hy_v3", "HYV3", 11158840.0, 1e-5, True
    router, bias, shared = "router.gate", "expert_bias", "shared_mlp."
    num_experts, num_shared, scaling = "num_experts", "num_shared_experts", "router_scaling_factor"
    head_dim_if_absent, groups_if_absent = 128, 8
    wants: Mapping[str, Any] = {**_SigmoidExperts.wants, "moe_router_num_groups": None}

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("mlp_bias", False, "gives experts biases")
        super().take_own(config, settings)

    def with_experts(self, config: ModelConfig, settings: Settings) -> list[bool]:
        layers = config.num_layers or 0
        usual = ["dense", *["sparse"] * (layers - 1)]
        types = [str(kind) for kind in settings.get("mlp_layer_types", list, usual)]
        if len(types) != layers or set(types) - {"dense", "sparse"}:
            raise CheckpointError(f"{settings.where}: mlp_layer_types must give each of {layers} layers 'dense' or"
                                  f" 'sparse', found {str(types)[:100]}")  # fmt: skip
        return [kind == "sparse" for kind in types]

    def _of_layers(self, config: ModelConfig) -> str | None:
        return self._of_shared(config)  # any layers may have experts

    def more_entries(self, config: ModelConfig) -> dict[str, Any]:
        layers = config.num_layers or 0
        types = ["sparse" if i in config.expert_layers(layers) else "dense" for i in range(layers)]
        entries = {**super().more_entries(config), "mlp_bias": False, "mlp_layer_types": types}
        return {
            name: value
            for name, value in entries.items()
            if name not in ("first_k_dense_replace", "n_group", "topk_group")
        }
