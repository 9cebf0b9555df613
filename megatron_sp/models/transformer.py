"""The transformer block, in one of three forms:

    pre-norm    y = x + attention(norm(x)), then y + mlp(norm(y))
    parallel    x + attention(norm(x)) + mlp(norm'(x))
    post-norm   y = norm(x + attention(x)), then norm(y + mlp(y))

Activations are [s, b, h], where s is a rank's share of the positions. Parameter names are Megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import ModelConfig
from megatron_sp.models.attention import SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT, SelfAttention, dropped_onto
from megatron_sp.models.mlp import MLP
from megatron_sp.ops.norm import NormInFront
from megatron_sp.parallel.forward_context import ForwardContext, ResidualDropout, Unit
from megatron_sp.parallel.layers import Norm
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from megatron_sp.models.experts import ExpertMLP


def delayed_weights(model: nn.Module, tp: TensorParallel) -> list[nn.Parameter]:
    """Return the weights whose gradients are computed under the exchanges of attention's backward (--delay-wgrad).

    They are the MLP's; with several tp ranks fc1's covers the reduction of the gradient of its input instead.
    """
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    return [linear.weight for mlp in mlps for linear in (mlp.linear_fc2, *((mlp.linear_fc1,) if tp.size == 1 else ()))]


class TransformerBlock(nn.Module):
    """One transformer block, with norms before attention and MLP, or after them (--norm-placement post)."""

    def __init__(
        self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext,
        attention: type[SelfAttention] = SelfAttention,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.hidden_size
        self.layer = layer
        layout = layout.in_layer(layer)
        self.hidden_dropout = config.hidden_dropout
        self.post, self.parallel = config.norm_placement == "post", config.use_parallel_residual
        if not self.post:
            self.input_layernorm = Norm(config, config.hidden_size, dtype, layout)
        self.self_attention = attention(config, layer, f"{name}.self_attention", seed, dtype, layout)
        if self.post:
            self.post_attention_layernorm = Norm(config, config.hidden_size, dtype, layout)
        else:
            self.pre_mlp_layernorm = Norm(config, config.hidden_size, dtype, layout)
        self.mlp: MLP | ExpertMLP
        if layer in config.expert_layers(config.num_layers or 0):
            from megatron_sp.models.experts import ExpertMLP

            self.mlp = ExpertMLP(config, layer, f"{name}.mlp", seed, dtype, layout)
        else:
            self.mlp = MLP(config, f"{name}.mlp", seed, dtype, layout)
        if self.post:
            self.post_mlp_layernorm = Norm(config, config.hidden_size, dtype, layout)

    def forward(
        self, x: Tensor, ctx: ForwardContext, around_experts: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Apply the block to x [s, b, h].

        ``around_experts`` is the identity on the experts' input; it reports in backward that gradients are complete.
        """
        if self.post:
            y, _ = self.self_attention(x, ctx, None, self._dropout(ctx, SITE_ATTENTION_OUTPUT))
            x = self.post_attention_layernorm(y)
            return self.post_mlp_layernorm(self._mlp(x, None, ctx))
        y, x = self.self_attention(x, ctx, self.input_layernorm.in_front(), self._dropout(ctx, SITE_ATTENTION_OUTPUT))
        norm = self.pre_mlp_layernorm.in_front()
        if around_experts is not None:
            x, y = (around_experts(x), y) if self.parallel else (x, around_experts(y))
        return self._mlp(x, norm, ctx, onto=y) if self.parallel else self._mlp(y, norm, ctx)

    def _mlp(self, x: Tensor, norm: NormInFront | None, ctx: ForwardContext, onto: Tensor | None = None) -> Tensor:
        dropout = self._dropout(ctx, SITE_MLP_OUTPUT)
        if isinstance(self.mlp, MLP):
            return self.mlp(x, norm, dropout, ctx.mlp_chunks, onto)
        out, x = self.mlp(x, norm, ctx, onto=onto if dropout is None else None, add_input=dropout is None)
        return out if dropout is None else dropped_onto(x if onto is None else onto, out, dropout)

    def units(self, name: str) -> list[Unit]:
        # all of it, or its experts apart, of which other ranks may have others
        if isinstance(self.mlp, MLP):
            return [Unit(name, self, "block")]
        others = {child: module for child, module in self.named_children() if child != "mlp"}
        others |= {f"mlp_{child}": module for child, module in self.mlp.named_children() if child != "experts"}
        return [Unit(name, nn.ModuleDict(others), "block"), Unit(f"{name}.mlp.experts", self.mlp.experts, "experts")]

    def _dropout(self, ctx: ForwardContext, site: int) -> ResidualDropout | None:
        if ctx.local_dropout is None or self.hidden_dropout == 0.0:
            return None
        return ResidualDropout(self.hidden_dropout, ctx.local_dropout.rows(self.layer, site))
