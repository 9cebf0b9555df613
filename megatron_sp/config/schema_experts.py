"""Flags of a mixture of experts: how many experts there are, how tokens choose them, and what keeps their load even."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.conditions import BALANCE, EXPERT_BIAS, EXPERTS
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.flag_field import flag

_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,4}))?")
MOST_LAYERS = 4096
"""Layers of the longest pattern."""
ROUTER_BIAS = ".router.expert_bias"
"""Ends the names of biases of routers in a checkpoint; they are no parameters."""


@dataclass
class ExpertConfig:
    """The experts of a model; ``ModelConfig`` has these fields, too."""

    num_experts: int | None = flag(
        None,
        "experts in place of the MLP, of which each token takes --moe-router-topk; none is ever full (default: dense MLPs)",
        unit="experts", low=0, high=2**16,
    )  # fmt: skip
    moe_router_topk: int = flag(
        2, "experts of each token", unit="experts", aliases=("topk",), low=1, high=2**10, only=EXPERTS
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert (default: --ffn-hidden-size)", low=1, high=2**24, only=EXPERTS
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of one more expert that all tokens take (default: none)", low=0, high=2**24, only=EXPERTS
    )
    moe_layer_freq: str = flag(
        "1",
        "which layers have them; N: layers 0, N, 2 N, ...; or a pattern of all layers such as [0]+[1]*23 (Megatron's)",
        only=EXPERTS,
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag(
        "softmax", "scores from the router's logits", only=EXPERTS
    )
    moe_router_pre_softmax: bool = flag(
        False,
        "softmax over all experts, then the best of them; without it over the chosen ones, whose weights sum to 1",
        only=EXPERTS,
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "factor of the weights of the chosen experts", low=0, only=EXPERTS
    )
    moe_router_num_groups: int | None = flag(
        None, "groups of experts, of which each token chooses --moe-router-group-topk before it chooses experts there",
        unit="groups", low=1, high=2**16, only=EXPERTS)  # fmt: skip
    moe_router_group_topk: int | None = flag(
        None, "groups of each token", unit="groups", low=1, high=2**10, only=EXPERTS
    )
    moe_router_dtype: Literal["fp32", "fp64"] = flag(
        "fp32", "number format of the router; of an fp64 model fp64", only=EXPERTS
    )
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] | None = flag(
        None,
        "what the loss that keeps the load even is about; seq_aux_loss: each sequence; global_aux_loss: the global"
        " batch; aux_loss: Megatron's, over what a rank has in a micro-batch, is taken as seq_aux_loss, which does"
        " not depend on the layout (default: seq_aux_loss with a --moe-aux-loss-coeff, else none)",
        only=(EXPERTS, BALANCE),
    )
    moe_aux_loss_coeff: float = flag(0.0, "coefficient of that loss", aliases=("moe-loss-coeff",), low=0, only=EXPERTS)
    moe_z_loss_coeff: float | None = flag(
        None, "coefficient of a loss that keeps the router's logits small", low=0, only=EXPERTS
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "with sigmoids a bias of each expert, added when experts are chosen, is raised after a step in which it had"
        " less than the mean load and lowered after one with more; keeps the load even without a loss (DeepSeek-V3)",
        only=EXPERTS,
    )
    moe_router_bias_update_rate: float = flag(1e-3, "by how much", low=0, only=(EXPERTS, EXPERT_BIAS))

    @property
    def has_experts(self) -> bool:
        """True if there are layers with experts."""
        return bool(self.num_experts)

    @property
    def balance_kind(self) -> Literal["none", "sequence", "global"]:
        """Group of tokens that the balance loss is about."""
        kind = self.moe_router_load_balancing_type
        if not self.has_experts or not self.moe_aux_loss_coeff or kind == "none":
            return "none"
        return "global" if kind == "global_aux_loss" else "sequence"

    @property
    def shared_expert_size(self) -> int:
        """Width of the shared expert; 0: there is none."""
        return (self.moe_shared_expert_intermediate_size or 0) if self.has_experts else 0

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of the layers with experts, in order.

        Raises:
            ConfigError: --moe-layer-freq is no pattern of so many layers.
        """
        if not self.has_experts:
            return ()
        return tuple(layer for layer, has in enumerate(layer_pattern(self.moe_layer_freq, num_layers)) if has)


def is_expert_bias(name: str) -> bool:
    """Return whether a tensor is the bias of a router: no parameter, and never of fewer bits than fp32."""
    return name.endswith(ROUTER_BIAS)


def layer_pattern(text: str, num_layers: int) -> list[bool]:
    """Return which layers have experts.

    Args:
        text: N for every N-th layer from the first on, or terms such as [0,1]*4 joined by +, in Megatron's way.
        num_layers: layers of the model.
    Raises:
        ConfigError: it is neither, or has another number of layers.
    """
    plain = re.sub(r"[\s()]", "", text)
    if plain.isascii() and plain.isdigit() and 1 <= int(plain[:6]) <= MOST_LAYERS:
        return [layer % int(plain) == 0 for layer in range(num_layers)]
    found: list[bool] = []
    for term in plain.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or len(found) > MOST_LAYERS:
            raise ConfigError(
                f"--moe-layer-freq {text[:60]!r} is neither a number of layers nor a pattern: write 2 for every"
                " second layer, or terms such as [0]+[1]*23, 1 for a layer with experts"
            )
        found += [digit == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    if len(found) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq {text[:60]!r} is a pattern of {len(found)} layers, and num_layers is {num_layers}: give each a 0 or 1"
        )
    return found
