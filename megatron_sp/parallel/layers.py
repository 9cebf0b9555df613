"""Layers that hold a tp rank's part of a weight, or all of it."""

# Activations are [s, b, h]; ``s/parts`` are the positions that a rank holds between these layers: all of them, or with
# --sequence-parallel 1/tp of them. Gradients that are summed over tp besides what the layer itself sums:
#
#     layer                    parameter       on a rank            summed over tp
#     Norm                     weight, bias    [h]                  with --sequence-parallel, or if it norms heads
#     ColumnParallelLinear     weight          [out/tp, in]         rows that several ranks hold (shared kv heads)
#                              bias            [out/tp]             likewise
#     RowParallelLinear        weight          [out, in/tp]         never
#                              bias            [out]                with --sequence-parallel
#     VocabParallelEmbedding   weight          [rows/tp, h]         never
#     Table                    weight          [rows, h]            with --sequence-parallel
#
# Optimizer, checkpoints and converters know all this from each parameter's ``ShardSpec`` alone (``shard_specs``).
# Source: Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198.

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.ops.norm import NormInFront, NormSpec, norm
from megatron_sp.parallel.linear import Linear, column_linear, embedding, row_linear
from megatron_sp.parallel.lm_head import HeadLoss, lm_head_logits, lm_head_loss
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.utils.numbers import round_up


@dataclass(frozen=True)
class WeightInit:
    """Initial weight of a layer."""

    name: str  # name of the layer in the model; together with ``seed`` it determines the values
    std: float
    seed: int
    dtype: torch.dtype

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return draw_normal(shape, self.std, self.seed, f"{self.name}.weight")


def name_generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator for one parameter."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    """Return a whole weight, N(0, std^2) in fp32, to be cut."""
    drawn = empty(shape, dtype=torch.float32, device=torch.get_default_device())
    if drawn.is_meta:  # drawing no numbers takes time too
        return drawn
    return drawn.normal_(0.0, std, generator=name_generator(seed, name))


def output_std(std: float, num_layers: int) -> float:
    """Return GPT-2's std for projections that end branches."""
    return std / math.sqrt(2.0 * num_layers)


class _Layer(nn.Module):
    # parameters with their placements, and the receiver of their gradients

    def __init__(self, **specs: ShardSpec) -> None:
        super().__init__()
        self.specs = specs
        self.main_grad: MainGrad | None = None

    def shard_specs(self) -> dict[str, ShardSpec]:
        return self.specs


class Norm(_Layer):
    """LayerNorm or RMSNorm; ``sees``: what tp ranks have shares of."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, width: int, dtype: torch.dtype, layout: ParallelContext,
        sees: Literal["positions", "heads"] = "positions",
    ) -> None:  # fmt: skip
        tp, summed = layout.tp, layout.tp.seq or sees == "heads"
        names = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
        super().__init__(**dict.fromkeys(names, ShardSpec.whole((width,), tp.rank, tp.size, summed=summed)))
        self.spec = NormSpec(config.normalization, config.norm_epsilon, config.apply_layernorm_1p)
        start = torch.zeros if self.spec.zero_centered else torch.ones
        self.weight = nn.Parameter(start(width, dtype=dtype))
        bias = nn.Parameter(torch.zeros(width, dtype=dtype)) if "bias" in names else None
        self.register_parameter("bias", bias)
        self._front: NormInFront | None = None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.spec, main_grad=self.main_grad)

    def in_front(self) -> NormInFront:
        front, params = self._front, self._parameters  # an attribute costs the host a microsecond
        weight, bias = params["weight"], params["bias"]
        if front is None or front.weight is not weight or front.bias is not bias or front.spec is not self.spec:
            assert weight is not None
            front = self._front = NormInFront(self.spec, weight, bias)
        return front


class ParallelLinear(_Layer):
    """Base of column- and row-parallel linear layers."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, weight_spec: ShardSpec, bias_spec: ShardSpec | None, init: WeightInit, layout: ParallelContext
    ) -> None:
        super().__init__(weight=weight_spec, **({} if bias_spec is None else {"bias": bias_spec}))
        self.layout = layout
        whole, dtype = init.draw(weight_spec.shape), init.dtype
        # a slice of the same whole in any layout
        weight = weight_spec.take(whole).to(dtype).contiguous().clone() if layout.tp.size > 1 else whole.to(dtype)
        self.weight, bias = nn.Parameter(weight), None
        if bias_spec is not None:
            bias = nn.Parameter(bias_spec.take(torch.zeros(bias_spec.shape, dtype=dtype)).clone())
        self.register_parameter("bias", bias)

    def linear(self) -> Linear:
        weight, bias = self._parameters["weight"], self._parameters["bias"]  # an attribute costs the host a microsecond
        assert weight is not None
        return weight, bias


class ColumnParallelLinear(ParallelLinear):
    """Linear layer, y = norm(x) @ W.T + b, with some rows of W on each rank (``linear.py``)."""

    def __init__(self, rows: ShardSpec, init: WeightInit, *, bias: bool, layout: ParallelContext) -> None:
        super().__init__(rows, replace(rows, shape=rows.shape[:1]) if bias else None, init, layout)

    def forward(self, x: Tensor, norm: NormInFront | None = None) -> tuple[Tensor, Tensor]:
        return column_linear(x, self.weight, self.bias, norm=norm, tp=self.layout.tp, main_grad=self.main_grad)


class RowParallelLinear(ParallelLinear):
    """Linear layer, y = act(x) @ W.T + b, with some columns of W on each rank; act is recomputed in backward."""

    def __init__(
        self, in_features: int, out_features: int, init: WeightInit, *, bias: bool, layout: ParallelContext,
        activation: Activation | None = None,
    ) -> None:  # fmt: skip
        tp = layout.tp
        columns = in_features // tp.size
        weight = ShardSpec.split((out_features, in_features), 1, ((tp.rank * columns, columns),))
        bias_spec = ShardSpec.whole((out_features,), tp.rank, tp.size, summed=tp.seq) if bias else None
        super().__init__(weight, bias_spec, init, layout)
        self.activation = activation

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        tp, main_grad = self.layout.tp, self.main_grad
        params = self.weight, self.bias
        return row_linear(x, *params, activation=self.activation, residual=residual, tp=tp, main_grad=main_grad)


class Table(_Layer):
    """Embedding table replicated on every rank."""

    def __init__(self, rows: int, width: int, init: WeightInit, layout: ParallelContext) -> None:
        tp = layout.tp
        super().__init__(weight=ShardSpec.whole((rows, width), tp.rank, tp.size, summed=tp.seq))
        self.weight = nn.Parameter(init.draw((rows, width)).to(init.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, tp=NO_TP, main_grad=self.main_grad)


class VocabParallelEmbedding(_Layer):
    """Embedding with rows split over tp, also the weight of the LM head."""

    #     forward    out_r = W_r[ids] where rank r holds the row, else 0;  out = sum over r: one all_reduce or
    #     reduce_scatter backward   dW_r[id] = sum of all_gather(d_out) at the positions of id
    #
    # Rows are padded to a multiple of ``divisible_by`` * tp; padding is zero, never trained and never written to disk.

    def __init__(self, rows: int, width: int, init: WeightInit, layout: ParallelContext, *, divisible_by: int) -> None:
        per_rank = round_up(rows, divisible_by * layout.tp.size) // layout.tp.size
        first = min(rows, layout.tp.rank * per_rank)
        spec = ShardSpec.split((rows, width), 0, ((first, min(rows, first + per_rank) - first),))
        super().__init__(weight=spec)
        self.rows, self.tp = rows, layout.tp
        weight = torch.zeros(per_rank, width, dtype=init.dtype)
        taken = spec.take(init.draw((rows, width)))
        weight[: len(taken)] = taken
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:  # [s, b], the same on every tp rank -> [s/parts, b, h]
        return embedding(ids, self.weight, tp=self.tp, main_grad=self.main_grad)


class ParallelLMHead:
    """LM head over a split table (``lm_head.py``)."""

    def __init__(
        self, table: VocabParallelEmbedding, *, tp: TensorParallel | None = None, bias: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.table, self.bias, self.chunk_tokens = table, bias, chunk_tokens
        self.tp = table.tp if tp is None else tp  # how x lies over the tp group

    def loss(self, x: Tensor, labels: Tensor, loss_mask: Tensor) -> HeadLoss:
        return lm_head_loss(
            x, self.table.weight, labels, loss_mask, vocab_size=self.table.rows, bias=self.bias,
            chunk_tokens=self.chunk_tokens, tp=self.tp, main_grad=self.table.main_grad,
        )  # fmt: skip

    def logits(self, x: Tensor) -> Tensor:  # [..., h] -> [..., v] on every tp rank; for generation
        return lm_head_logits(x, self.table.weight, self.table.rows, self.bias, self.tp)


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the placement of a model's parameters, by name."""
    specs: dict[str, ShardSpec] = dict(getattr(model, "parameter_specs", {}))  # of a model that is not ours
    for prefix, module in model.named_modules():
        of_module = getattr(module, "shard_specs", None)
        if of_module is not None and module is not model:
            specs |= {f"{prefix}.{name}": spec for name, spec in of_module().items()}
    return specs


def table_names(model: nn.Module) -> frozenset[str]:
    """Return the names of tables' weights."""
    modules = model.named_modules()
    return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, VocabParallelEmbedding))


def attach_main_grad(model: nn.Module, main_grad: MainGrad | None) -> None:
    """Make layers write weight gradients to ``main_grad``, or return them."""
    for module in model.modules():
        if hasattr(module, "main_grad"):
            module.main_grad = main_grad  # type: ignore[assignment]


def norm_spec_of(model: nn.Module) -> NormSpec | None:
    """Return the spec of a model's norms."""
    return next((module.spec for module in model.modules() if isinstance(module, Norm)), None)


def set_norm_kernel(model: nn.Module, kernel: Literal["torch", "apex"]) -> None:
    """Make every norm of ours use these kernels where they can."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.spec = replace(module.spec, kernel=kernel)
