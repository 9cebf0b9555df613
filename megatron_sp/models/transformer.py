"""The pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

Activations are [s, b, h]. Parameter names are Megatron-core's. The ops underneath write weight gradients into
``self.sink`` when one has been attached (``attach_sink``); everything a forward pass needs beside x travels in one
``ForwardContext``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_sp.config import ModelConfig
from megatron_sp.models.init import draw_normal, output_std
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.attention import AttentionMask, KernelName, attention, core_attention, split_qkv
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.ops.grad_sink import GradSink
from megatron_sp.ops.linear import linear, norm_linear
from megatron_sp.ops.norm import NormInFront, NormSpec, norm
from megatron_sp.ops.rotary import apply_rotary
from megatron_sp.parallel.recompute import recompute

# dropout sites within a layer; the embedding is layer -1
SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT, SITE_EMBEDDING = 0, 1, 2, 3


class Unit(NamedTuple):
    """A part of the model whose parameters are reduced, sharded and gathered together."""

    name: str
    module: nn.Module


class KVCache:
    """Keys and values of past positions, for generation: one pair of buffers for each layer."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # positions that hold something; advanced once per forward pass by the model
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [s_new, m, 1, d]; returns all keys and values so far [length + s_new, m, 1, d]."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys, values = (t.new_empty(self.max_length, *t.shape[1:]) for t in (k, v))
            self._keys[layer], self._values[layer] = keys, values
        end = self.length + k.shape[0]
        keys[self.length : end], values[self.length : end] = k, v
        return keys[:end], values[:end]


@dataclass
class ForwardContext:
    """What a forward pass needs beside the activations.

    Attributes:
        mask: who attends to whom.
        kernel: attention kernel.
        rotary: cos and sin of this rank's positions, each [s, rotated/2], or None.
        dropout: names of the tokens for dropout; None: no dropout (evaluation).
        cache: past keys and values, for generation.
        recompute_core: compute the attention core again in backward instead of storing it.
    """

    mask: AttentionMask
    kernel: KernelName = "sdpa"
    rotary: tuple[Tensor, Tensor] | None = None
    dropout: DropoutKeys | None = None
    cache: KVCache | None = None
    recompute_core: bool = False


class ResidualDropout(NamedTuple):
    """Dropout of a branch before it joins the residual stream: the rate and the rows' keys, int32 [s, b]."""

    rate: float
    row_keys: Tensor


class Norm(nn.Module):
    """LayerNorm or RMSNorm."""

    def __init__(self, config: ModelConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = NormSpec(config.normalization, config.norm_epsilon, config.apply_layernorm_1p)
        self.sink: GradSink | None = None
        start = torch.zeros if self.spec.zero_centered else torch.ones
        self.weight = nn.Parameter(start(width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype)) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.spec, sink=self.sink)

    def in_front(self) -> NormInFront:
        """This norm as the front of a linear layer, which then stores the norm's input instead of its output."""
        return NormInFront(self.spec, self.weight, self.bias)


class Linear(nn.Module):
    """A linear layer, optionally with an activation or a norm in front and the residual added behind."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        seed: int,
        dtype: torch.dtype,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.sink: GradSink | None = None
        self.activation = activation
        self.weight = nn.Parameter(draw_normal((out_features, in_features), std, seed, f"{name}.weight").to(dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, activation=self.activation, residual=residual, sink=self.sink)

    def behind_norm(self, x: Tensor, norm: NormInFront) -> tuple[Tensor, Tensor]:
        """(the layer on the normed x; x again, for the residual branch)."""
        return norm_linear(x, norm, self.weight, self.bias, sink=self.sink)


class SelfAttention(nn.Module):
    """QKV projection, rotary, attention, output projection; the fused weight has rows [g, n/g + 2, d]."""

    def __init__(self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.hidden_size and config.num_attention_heads and config.num_layers  # validate() has seen to it
        self.layer = layer
        self.head_dim = config.head_dim
        self.queries_per_group = config.num_attention_heads // config.num_groups
        self.attention_dropout = config.attention_dropout
        std, bias = config.init_method_std, not config.disable_bias_linear
        heads_width = config.num_attention_heads * self.head_dim
        self.linear_qkv = Linear(
            f"{name}.linear_qkv", config.hidden_size, heads_width + 2 * config.num_groups * self.head_dim,
            bias=bias or config.add_qkv_bias, std=std, seed=seed, dtype=dtype,
        )  # fmt: skip
        self.linear_proj = Linear(
            f"{name}.linear_proj",
            heads_width,
            config.hidden_size,
            bias=bias,
            std=output_std(std, config.num_layers),
            seed=seed,
            dtype=dtype,
        )
        if config.qk_layernorm:
            self.q_layernorm = Norm(config, self.head_dim, dtype)
            self.k_layernorm = Norm(config, self.head_dim, dtype)
        self.qk_layernorm = config.qk_layernorm

    def forward(self, x: Tensor, ctx: ForwardContext, norm: NormInFront, dropout: ResidualDropout | None) -> Tensor:
        """[s, b, h] -> [s, b, h]: x + attention(norm(x))."""
        qkv, x = self.linear_qkv.behind_norm(x, norm)  # [s, b, g*(r+2)*d]
        if self.qk_layernorm:
            qkv = self._norm_queries_and_keys(qkv)
        if ctx.rotary is not None:
            qkv = apply_rotary(qkv, *ctx.rotary, self.queries_per_group, self.head_dim)
        if ctx.cache is not None:
            out = self._cached_attention(qkv, ctx, ctx.cache)
        elif ctx.recompute_core:
            out = recompute(self._core, qkv, ctx, draws_random=self.draws_random(ctx))
        else:
            out = self._core(qkv, ctx)
        return _add_to_stream(x, self.linear_proj, out, dropout)

    def draws_random(self, ctx: ForwardContext) -> bool:
        """Whether attention dropout happens inside a kernel, by torch's generator instead of by hash."""
        return ctx.dropout is not None and self.attention_dropout > 0 and ctx.kernel != "reference"

    def _core(self, qkv: Tensor, ctx: ForwardContext) -> Tensor:
        drops = ctx.dropout is not None and self.attention_dropout > 0
        rows = ctx.dropout.row_keys(self.layer, SITE_ATTENTION) if ctx.dropout is not None and drops else None
        rate = self.attention_dropout if drops else 0.0
        return attention(qkv, self.queries_per_group, self.head_dim, ctx.mask, kernel=ctx.kernel, dropout=rate, dropout_rows=rows)

    def _norm_queries_and_keys(self, qkv: Tensor) -> Tensor:
        q, k, v = split_qkv(qkv, self.queries_per_group, self.head_dim)
        return torch.cat([self.q_layernorm(q), self.k_layernorm(k), v], dim=2).view(qkv.shape)

    def _cached_attention(self, qkv: Tensor, ctx: ForwardContext, cache: KVCache) -> Tensor:
        q, k, v = split_qkv(qkv, self.queries_per_group, self.head_dim)
        k, v = cache.extend(self.layer, k, v)
        return core_attention(q, k, v, ctx.mask, kernel=ctx.kernel).reshape(*qkv.shape[:2], -1)


class MLP(nn.Module):
    """fc1, activation, fc2; with swiglu fc1's rows are [gate | up]."""

    def __init__(self, config: ModelConfig, name: str, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.hidden_size and config.num_layers
        std, bias = config.init_method_std, not config.disable_bias_linear
        activation = Activation(
            "swiglu"
            if config.swiglu
            else "squared_relu"
            if config.squared_relu
            else "gelu_tanh"
            if config.gelu_approximate == "tanh"
            else "gelu"
        )
        self.linear_fc1 = Linear(
            f"{name}.linear_fc1", config.hidden_size, config.ffn_size * activation.width_factor, bias=bias, std=std, seed=seed, dtype=dtype
        )
        self.linear_fc2 = Linear(
            f"{name}.linear_fc2", config.ffn_size, config.hidden_size,
            bias=bias, std=output_std(std, config.num_layers), seed=seed, dtype=dtype, activation=activation,
        )  # fmt: skip

    def forward(self, x: Tensor, norm: NormInFront, dropout: ResidualDropout | None) -> Tensor:
        """[s, b, h] -> [s, b, h]: x + mlp(norm(x))."""
        wide, x = self.linear_fc1.behind_norm(x, norm)
        return _add_to_stream(x, self.linear_fc2, wide, dropout)


def _add_to_stream(stream: Tensor, last: Linear, x: Tensor, dropout: ResidualDropout | None) -> Tensor:
    """The residual stream plus what the last layer of a branch makes of x."""
    if dropout is None:
        return last(x, residual=stream)
    return hash_dropout(last(x), dropout.rate, dropout.row_keys, residual=stream)


class TransformerBlock(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.hidden_size
        self.layer = layer
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = Norm(config, config.hidden_size, dtype)
        self.self_attention = SelfAttention(config, layer, f"{name}.self_attention", seed, dtype)
        self.pre_mlp_layernorm = Norm(config, config.hidden_size, dtype)
        self.mlp = MLP(config, f"{name}.mlp", seed, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        x = self.self_attention(x, ctx, self.input_layernorm.in_front(), self._dropout(ctx, SITE_ATTENTION_OUTPUT))
        return self.mlp(x, self.pre_mlp_layernorm.in_front(), self._dropout(ctx, SITE_MLP_OUTPUT))

    def _dropout(self, ctx: ForwardContext, site: int) -> ResidualDropout | None:
        if ctx.dropout is None or self.hidden_dropout == 0.0:
            return None
        return ResidualDropout(self.hidden_dropout, ctx.dropout.row_keys(self.layer, site))


def attach_sink(model: nn.Module, sink: GradSink | None) -> None:
    """Make every layer of ours write its weight gradients into ``sink`` (None: through autograd again)."""
    for module in model.modules():
        if hasattr(module, "sink"):
            module.sink = sink  # type: ignore[assignment]


def unit_boundary(x: Tensor, on_backward_done: Callable[[int], None] | None, unit: int) -> Tensor:
    """Identity on the input of a unit; in backward it tells that all of the unit's weight gradients are complete.

    They are: every op computes its weight gradient in the same backward that produces its input gradient, and the
    unit's input gradient comes last.
    """
    return x if on_backward_done is None or not x.requires_grad else _UnitBoundary.apply(x, on_backward_done, unit)


class _UnitBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, on_backward_done: Callable[[int], None], unit: int) -> Tensor:
        ctx.on_backward_done, ctx.unit = on_backward_done, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.on_backward_done(ctx.unit)
        return grad, None, None
