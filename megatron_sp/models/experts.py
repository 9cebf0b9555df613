"""The layer of a block that has experts in place of an MLP: router, experts, and a shared expert that all tokens take.

Names are Megatron-core's, experts stacked: ``experts.linear_fc1.weight`` [E, f, h], of which a rank has its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.models.mlp import mlp_linears
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import ExpertWeights
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.ops.norm import NormInFront
from megatron_sp.ops.routing import RoutingSpec
from megatron_sp.parallel.experts import ExpertPlan, expert_mlp
from megatron_sp.parallel.experts import Router as RouterWeights
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import WeightInit, output_std
from megatron_sp.parallel.parallel_context import ExpertParallel, ParallelContext
from megatron_sp.parallel.router_pass import BalanceSpec, RouterStep


def routing_of(config: ModelConfig) -> RoutingSpec:
    assert config.num_experts
    return RoutingSpec(
        config.num_experts, config.moe_router_topk, config.moe_router_score_function, config.moe_router_pre_softmax,
        1.0 if config.moe_router_topk_scaling_factor is None else config.moe_router_topk_scaling_factor,
        config.moe_router_num_groups or 1, config.moe_router_group_topk or 1,
    )  # fmt: skip


def router_step(config: ModelConfig, ep: ExpertParallel, device: torch.device) -> RouterStep:
    assert config.num_layers
    kind = config.balance_kind
    spec = BalanceSpec(kind, config.moe_aux_loss_coeff if kind != "none" else 0.0, config.moe_z_loss_coeff or 0.0)
    return RouterStep(routing_of(config), spec, len(config.expert_layers(config.num_layers)), ep, device)


class Router(nn.Module):
    """The router's weight [E, h], and perhaps a bias [E] without a gradient."""

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig, init: WeightInit, layout: ParallelContext) -> None:
        super().__init__()
        assert config.num_experts and config.hidden_size
        self.main_grad: MainGrad | None = None
        shape = (config.num_experts, config.hidden_size)
        self.spec = ShardSpec.whole(shape, layout.tp.rank, layout.tp.size, summed=layout.tp.seq)
        self.weight = nn.Parameter(init.draw(shape).to(init.dtype))
        wide = torch.float64 if init.dtype == torch.float64 else torch.float32
        bias = torch.zeros(config.num_experts, dtype=wide) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": self.spec}

    def update_bias(self, load: Tensor, rate: float, skip: Tensor | None) -> None:
        if self.expert_bias is None:
            return
        # towards an even load, up where there were fewer than the mean: of whole numbers, so that all layouts agree
        step = torch.sign(load.mean() - load).to(self.expert_bias.dtype) * rate
        self.expert_bias += step if skip is None else torch.where(skip, 0.0, step)


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the routers' biases by name, which a checkpoint has beside parameters."""
    return {name: bias for name, bias in model.named_buffers() if is_expert_bias(name)}


def stored_dtype(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return a tensor's dtype in a checkpoint of ``wanted`` weights."""
    if not own.is_floating_point:
        return own
    dtype = own if wanted is None else wanted
    # what a run keeps in fp32 stays so
    return torch.promote_types(dtype, torch.float32) if is_expert_bias(name) else dtype


class StackedLinear(nn.Module):
    """A linear layer of each expert: [E/ep, out, in] and [E/ep, out]."""

    def __init__(
        self, num_experts: int, shape: tuple[int, int], init: WeightInit, *, bias: bool, ep: ExpertParallel
    ) -> None:
        super().__init__()
        self.main_grad: MainGrad | None = None
        own = num_experts // ep.size
        runs = ((ep.rank * own, own),)
        spec = replace(ShardSpec.split((num_experts, *shape), 0, runs), stacked=1)
        self.weight_spec = spec if ep.counts else replace(spec, counted=())
        self.bias_spec = replace(self.weight_spec, shape=(num_experts, shape[0])) if bias else None
        experts = range(ep.rank * own, (ep.rank + 1) * own)
        # the initial weights of an expert depend on its number alone
        drawn = [replace(init, name=f"{init.name}.{expert}").draw(shape).to(init.dtype) for expert in experts]
        self.weight = nn.Parameter(torch.stack(drawn))
        self.bias = nn.Parameter(torch.zeros(own, shape[0], dtype=init.dtype)) if bias else None

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": self.weight_spec} | ({} if self.bias_spec is None else {"bias": self.bias_spec})


class Experts(nn.Module):
    def __init__(self, config: ModelConfig, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.num_experts and config.hidden_size and config.num_layers
        h, f, bias = config.hidden_size, config.expert_ffn_size, config.mlp_bias
        wide = f * Activation(config.activation).width_factor
        std, out = config.init_method_std, output_std(config.init_method_std, config.num_layers)
        init = WeightInit(f"{name}.linear_fc1", std, seed, dtype)
        self.linear_fc1 = StackedLinear(config.num_experts, (wide, h), init, bias=bias, ep=layout.ep)
        init = WeightInit(f"{name}.linear_fc2", out, seed, dtype)
        self.linear_fc2 = StackedLinear(config.num_experts, (h, f), init, bias=bias, ep=layout.ep)


class SharedExpert(nn.Module):
    """The expert that all tokens take: a tp rank's part of an MLP."""

    def __init__(self, config: ModelConfig, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = mlp_linears(config, config.shared_expert_size, name, seed, dtype, layout)


def _weights(experts: Experts | SharedExpert) -> ExpertWeights:
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    return ExpertWeights(fc1.weight, fc1.bias, fc2.weight, fc2.bias)


class ExpertMLP(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext
    ) -> None:
        super().__init__()
        assert config.num_layers
        self.layout, self.layer, self.number = layout, layer, config.expert_layers(config.num_layers).index(layer)
        self.activation, self.routing = Activation(config.activation), routing_of(config)
        self.router_dtype = torch.float64 if config.moe_router_dtype == "fp64" else None
        self.router = Router(config, WeightInit(f"{name}.router", config.init_method_std, seed, dtype), layout)
        self.experts = Experts(config, f"{name}.experts", seed, dtype, layout)
        self.shared_experts = (
            SharedExpert(config, f"{name}.shared_experts", seed, dtype, layout) if config.shared_expert_size else None
        )

    def forward(
        self, x: Tensor, norm: NormInFront | None, ctx: ForwardContext, *, onto: Tensor | None = None,
        add_input: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return ``onto`` (or x) + experts(norm(x)), and x for its other consumers."""
        plan = ExpertPlan(
            self.routing, self.activation, self.layout.ep, self.layout.tp, self.router_dtype,
            None if ctx.num_tokens is None else ctx.num_tokens * x.shape[1],
            (self.layer, 0 if ctx.row_slice is None else ctx.row_slice.number), self.number,
        )  # fmt: skip
        return expert_mlp(
            x, norm, RouterWeights(self.router.weight, self.router.expert_bias), _weights(self.experts), plan,
            shared=None if self.shared_experts is None else _weights(self.shared_experts), residual=onto,
            add_input=add_input, main_grad=self.router.main_grad, routers=ctx.routers,
        )  # fmt: skip
