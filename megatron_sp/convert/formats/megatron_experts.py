"""Experts in Megatron-core's arguments: how many there are, which layers have them, and how tokens choose them."""

from __future__ import annotations

import itertools
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.config.schema_experts import layer_pattern
from megatron_sp.convert.families.settings import Settings
from megatron_sp.convert.formats.megatron_facts import Facts
from megatron_sp.utils.errors import CheckpointError, ConfigError

# Arguments that change what a mixture computes and that we do not support: their neutral values, and what other values mean.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_expert_capacity_factor": ((None,), "drops tokens of experts that are full"),
    "moe_shared_expert_gate": ((None, False), "has a gate of the shared expert"),
    "moe_use_shared_expert_gate": ((None, False), "has a gate of the shared expert"),
    "moe_apply_probs_on_input": ((None, False), "applies weights to the input of experts"),
    "moe_latent_size": ((None, 0), "has experts of another width than the rest"),
    "moe_router_force_load_balancing": ((None, False), "chooses experts at random"),
    "moe_n_hash_layers": ((None, 0), "chooses experts by tokens"),
    "moe_use_legacy_grouped_gemm": ((None, False), "keeps all experts of a rank in one matrix"),
}  # fmt: skip
_BALANCE = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def set_experts(config: ModelConfig, settings: Settings, facts: Facts) -> None:
    """Set the experts of a model from the arguments, and from the tensors what these do not say.

    Raises:
        CheckpointError: a feature that ours lacks, or a contradiction between the two.
        ConfigError: something that neither says.
    """
    said, where = settings.document.get("num_experts"), settings.where
    if said not in (None, 0, 1, [1]) and said != facts.num_experts:
        there = f"the tensors have {facts.num_experts}" if facts.num_experts else "the tensors have none under the names that are known"
        raise CheckpointError(
            f"{where}: num_experts is {str(said)[:60]!r}, and so the model is a mixture of experts, and {there}: it cannot be converted"
        )
    if not facts.num_experts:
        return
    for name, (allowed, why) in _NEUTRAL.items():
        value = settings.document.get(name)
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise CheckpointError(f"{where}: {name} is {str(value)[:100]!r}, and so the model {why}, which cannot be converted")
    if not settings.document:
        raise ConfigError(f"{where} does not say how tokens choose experts: such files hold the arguments of the training")
    config.num_experts = facts.num_experts
    config.moe_ffn_hidden_size = facts.expert_ffn_size
    config.moe_shared_expert_intermediate_size = facts.shared_ffn_size or None
    config.moe_router_topk = settings.count("moe_router_topk", 2)
    config.moe_layer_freq = _layers(settings, config.num_layers or 0)
    config.moe_router_score_function = settings.choice("moe_router_score_function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")
    config.moe_router_pre_softmax = settings.get("moe_router_pre_softmax", bool, False) and config.moe_router_score_function == "softmax"
    config.moe_router_topk_scaling_factor = settings.get("moe_router_topk_scaling_factor", float, None)
    config.moe_router_num_groups = settings.count("moe_router_num_groups", None)
    config.moe_router_group_topk = settings.count("moe_router_group_topk", None)
    config.moe_router_enable_expert_bias = facts.has_expert_bias
    config.moe_router_bias_update_rate = settings.get("moe_router_bias_update_rate", float, 1e-3)
    config.moe_router_dtype = "fp64" if settings.document.get("moe_router_dtype") == "fp64" else "fp32"
    config.moe_z_loss_coeff = settings.get("moe_z_loss_coeff", float, None)
    _set_balance(config, settings)


def _set_balance(config: ModelConfig, settings: Settings) -> None:
    """Set the balance loss, which does not change what the model computes: unknown kinds are left out."""
    kind, coeff = (settings.document.get(name) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    if isinstance(kind, list):
        kind = kind[0] if len(kind) == 1 else "none"
    if isinstance(coeff, list):
        coeff = coeff[0] if len(coeff) == 1 else 0.0
    if kind not in _BALANCE or kind == "none" or not isinstance(coeff, (int, float)) or not coeff > 0:
        return
    config.moe_router_load_balancing_type = "global_aux_loss" if kind == "global_aux_loss" else "seq_aux_loss"
    config.moe_aux_loss_coeff = float(coeff)


def _layers(settings: Settings, num_layers: int) -> str:
    """Return --moe-layer-freq: of a number that number, of a list the shortest pattern."""
    freq = settings.document.get("moe_layer_freq", 1)
    if isinstance(freq, int) and not isinstance(freq, bool) and freq >= 1:
        return str(freq)
    if not isinstance(freq, list) or len(freq) != num_layers or any(one not in (0, 1) for one in freq):
        raise CheckpointError(
            f"{settings.where}: moe_layer_freq is {str(freq)[:100]}: only a number or a 0 or 1 for each layer can be converted"
        )
    if all(freq):
        return "1"
    return "+".join(f"[{has}]*{len(list(run))}" for has, run in itertools.groupby(int(one) for one in freq))


def expert_arguments(c: ModelConfig, ep: int) -> dict[str, Any]:
    """Return the arguments about experts, which ``ep`` ranks share."""
    if not c.has_experts:
        return {"num_experts": None}
    assert c.num_layers
    balance = c.moe_router_load_balancing_type or "seq_aux_loss"
    freq: int | list[int] = int(c.moe_layer_freq) if is_even(c) else [int(has) for has in layer_pattern(c.moe_layer_freq, c.num_layers)]
    return {
        "num_experts": c.num_experts, "moe_router_topk": c.moe_router_topk, "moe_ffn_hidden_size": c.expert_ffn_size,
        "moe_shared_expert_intermediate_size": c.shared_expert_size or None, "moe_layer_freq": freq,
        "moe_router_score_function": c.moe_router_score_function, "moe_router_pre_softmax": c.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": c.moe_router_topk_scaling_factor, "moe_router_num_groups": c.moe_router_num_groups,
        "moe_router_group_topk": c.moe_router_group_topk, "moe_router_enable_expert_bias": c.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": c.moe_router_bias_update_rate, "moe_router_dtype": c.moe_router_dtype,
        "moe_router_load_balancing_type": balance if c.moe_aux_loss_coeff else "none", "moe_aux_loss_coeff": c.moe_aux_loss_coeff,
        "moe_z_loss_coeff": c.moe_z_loss_coeff, "moe_grouped_gemm": True, "expert_model_parallel_size": ep,
    }  # fmt: skip


def is_even(c: ModelConfig) -> bool:
    """Return whether Megatron has the layers with experts as a number."""
    return c.moe_layer_freq.isdigit()
