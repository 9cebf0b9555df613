"""Llama with a mixture of experts: ``MixtralForCausalLM``, ``Qwen3MoeForCausalLM``, ``OlmoeForCausalLM``.

Files have a tensor for each expert; transformers stacks them in memory, and stacked files are read, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.config.schema_model import MOST_LAYERS
from megatron_sp.convert.copies import Copy, Index, View
from megatron_sp.convert.families.decoders import Llama
from megatron_sp.convert.families.family import Settings, gate_up, same, set_biases
from megatron_sp.utils.errors import CheckpointError

_MOST_EXPERTS = 1 << 12  # of a stacked tensor of a file, whose shape is taken at its word
_STACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj")


class _Experts(Llama):
    inside, gate, up, down = "mlp.", "gate_proj", "up_proj", "down_proj"
    num_experts, expert_width, aux_coeff = "num_experts", "intermediate_size", 0.001

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

    def renamed(self, name: str) -> str:
        return re.sub(r"(model\.layers\.\d+\.)mlp\.gate\.", rf"\1{self.inside}gate.", name)

    def of_mlp(self, config: ModelConfig, layer: int, ours: str, theirs: str) -> Iterable[Copy]:
        if layer not in config.expert_layers(config.num_layers or 0):
            yield from super().of_mlp(config, layer, ours, theirs)
            return
        inside = f"{theirs.removesuffix('mlp.')}{self.inside}"
        yield from same(f"{ours}router", f"{inside}gate")
        for expert in range(config.num_experts or 0):
            name = f"{inside}experts.{expert}."
            gate, up, width = f"{name}{self.gate}", f"{name}{self.up}", config.expert_ffn_size
            yield from gate_up(f"{ours}experts.linear_fc1", gate, up, width, expert=expert)
            yield Copy(View(f"{ours}experts.linear_fc2.weight", None, (expert,)), View(f"{name}{self.down}.weight"))

    def own(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "has_experts": True, "shared_expert_size": 0, "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "mlp_bias": False,
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            self.num_experts: config.num_experts, "num_experts_per_tok": config.moe_router_topk,
            self.expert_width: config.expert_ffn_size, "router_aux_loss_coef": config.moe_aux_loss_coeff,
        }  # fmt: skip


class Mixtral(_Experts):
    """Mistral with experts in all layers, whose weights sum to 1."""

    model_type, name = "mixtral", "Mixtral"
    groups_if_absent = 8
    inside, gate, up, down = "block_sparse_moe.", "w1", "w3", "w2"
    num_experts = "num_local_experts"
    eps_if_absent, theta_if_absent = 1e-5, 1e6

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("router_jitter_noise", 0.0, "disturbs the input of the router")
        super().take_own(config, settings)
        config.window_size = settings.count("sliding_window", None)

    def own(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().own(config), "window_size": config.window_size, "qkv_bias": False, "proj_bias": False,
            "moe_router_pre_softmax": False, "moe_layer_freq": _everywhere(config),
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().own_entries(config), "sliding_window": config.window_size}


class Qwen3Moe(_Experts):
    """Qwen3 with experts in some or all layers, norms on query and key heads, a window in all layers or in none."""

    model_type, name = "qwen3_moe", "Qwen3Moe"
    groups_if_absent = 4
    expert_width = "moe_intermediate_size"

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        super().take_own(config, settings)
        attention = settings.get("attention_bias", bool, False)
        set_biases(config, qkv=attention, proj=attention, mlp=False)
        config.qk_layernorm = True
        config.moe_router_pre_softmax = not settings.get("norm_topk_prob", bool, False)
        if settings.get("use_sliding_window", bool, False):
            absent = "sliding_window" not in settings.document
            config.window_size = settings.count("sliding_window", 4096 if absent else None)
        step, dense = settings.count("decoder_sparse_step", 1), settings.get("mlp_only_layers", list, [])
        assert config.num_layers
        if config.num_layers <= MOST_LAYERS:  # else it is refused elsewhere
            config.moe_layer_freq = _pattern([i not in dense and (i + 1) % step == 0 for i in range(config.num_layers)])
        if config.moe_layer_freq == _pattern([False] * config.num_layers):
            raise CheckpointError(f"{settings.where}: decoder_sparse_step and mlp_only_layers leave no layer with"
                                  " experts: it is not a mixture")  # fmt: skip

    def own(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().own(config), "window_size": config.window_size, "proj_bias": config.qkv_bias,
            "qk_layernorm": True,
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        layers = range(config.num_layers or 0)
        window = {} if config.window_size is None else {"sliding_window": config.window_size}
        return {
            **super().own_entries(config), "norm_topk_prob": not config.moe_router_pre_softmax,
            "decoder_sparse_step": 1, "mlp_only_layers": sorted(set(layers) - set(config.expert_layers(len(layers)))),
            "intermediate_size": config.ffn_size, "attention_bias": config.qkv_bias,
            "use_sliding_window": config.window_size is not None, **window,
        }  # fmt: skip


def _everywhere(config: ModelConfig) -> str:
    layers = config.num_layers or 0
    return config.moe_layer_freq if len(config.expert_layers(layers)) == layers else "1"


def _pattern(layers: list[bool]) -> str:
    if all(layers):
        return "1"
    return "+".join(f"[{int(has)}]*{len(list(run))}" for has, run in itertools.groupby(layers))


class Olmoe(_Experts):
    """OLMoE: experts in all layers, norms over all queries and over all keys of a token."""

    model_type, name, aux_coeff = "olmoe", "Olmoe", 0.01
    eps_if_absent = 1e-5

    def take_own(self, config: ModelConfig, settings: Settings) -> None:
        settings.require("clip_qkv", None, "limits queries, keys and values")
        super().take_own(config, settings)
        attention = settings.get("attention_bias", bool, False)
        set_biases(config, qkv=attention, proj=attention, mlp=False)
        config.qk_layernorm, config.qk_layernorm_scope = True, "all"
        config.moe_router_pre_softmax = not settings.get("norm_topk_prob", bool, False)

    def own(self, config: ModelConfig) -> dict[str, Any]:
        assert config.hidden_size and config.num_attention_heads
        return {
            **super().own(config), "proj_bias": config.qkv_bias, "qk_layernorm": True, "qk_layernorm_scope": "all",
            "head_dim": config.hidden_size // config.num_attention_heads, "moe_layer_freq": _everywhere(config),
        }  # fmt: skip

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().own_entries(config), "norm_topk_prob": not config.moe_router_pre_softmax,
            "attention_bias": config.qkv_bias, "clip_qkv": None,
        }  # fmt: skip
