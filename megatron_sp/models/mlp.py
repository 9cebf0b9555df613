"""The MLP of a transformer block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.models.attention import dropped_onto
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.ops.norm import NormInFront
from megatron_sp.parallel.forward_context import ResidualDropout
from megatron_sp.parallel.layers import ColumnParallelLinear, RowParallelLinear, WeightInit, output_std
from megatron_sp.parallel.linear import mlp
from megatron_sp.parallel.parallel_context import ParallelContext


def mlp_linears(
    config: ModelConfig, ffn: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    # a tp rank's part of the layers of an MLP that is ``ffn`` wide
    assert config.hidden_size and config.num_layers
    std, h, activation, own = (
        config.init_method_std,
        config.hidden_size,
        Activation(config.activation),
        ffn // layout.tp.size,
    )
    runs = tuple((half * ffn + layout.tp.rank * own, own) for half in range(activation.width_factor))
    rows = ShardSpec.split((ffn * activation.width_factor, h), 0, runs)
    init = WeightInit(f"{name}.linear_fc1", std, seed, dtype)
    fc1 = ColumnParallelLinear(rows, init, bias=config.mlp_bias, layout=layout)
    init = WeightInit(f"{name}.linear_fc2", output_std(std, config.num_layers), seed, dtype)
    return fc1, RowParallelLinear(ffn, h, init, bias=config.mlp_bias, layout=layout, activation=activation)


class MLP(nn.Module):
    """MLP: fc1, activation, fc2; if it is gated, the rows of fc1 are [gate | up]."""

    def __init__(self, config: ModelConfig, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        self.activation, self.tp = Activation(config.activation), layout.tp
        self.linear_fc1, self.linear_fc2 = mlp_linears(config, config.ffn_size, name, seed, dtype, layout)
        self.main_grad: MainGrad | None = None

    def forward(
        self, x: Tensor, norm: NormInFront | None, dropout: ResidualDropout | None, chunks: int = 1,
        onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return x + mlp(norm(x)), [s, b, h], in ``chunks`` parts of the positions; ``onto`` is added instead of x."""
        layers = self._modules  # not by attribute: nn.Module looks that up in Python
        fc1, fc2 = layers["linear_fc1"].linear(), layers["linear_fc2"].linear()  # type: ignore[union-attr, operator]
        if chunks > 1:
            from megatron_sp.parallel.chunked_mlp import MLPPlan, chunked_mlp

            rate, rows = dropout or (0.0, None)
            plan = MLPPlan(self.activation, chunks, self.tp, rate)
            return chunked_mlp(x, norm, fc1, fc2, plan, rows=rows, onto=onto, main_grad=self.main_grad)
        inside = dropout is None
        added = onto if inside else None
        out, x = mlp(
            x, norm, fc1, fc2, self.activation, onto=added, add_input=inside, tp=self.tp, main_grad=self.main_grad
        )
        return out if dropout is None else dropped_onto(x if onto is None else onto, out, dropout)
