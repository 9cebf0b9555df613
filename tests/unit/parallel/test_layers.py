"""The tensor-parallel layers' parts of a weight put together are the layer of one rank; nothing is communicated here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import tiny
from support.errors import FP64, assert_law
from support.op_checks import randn
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.ops.activation import Activation
from megatron_sp.parallel.layers import (
    ColumnParallelLinear,
    Norm,
    ParallelLinear,
    RowParallelLinear,
    Table,
    VocabParallelEmbedding,
    WeightInit,
    attach_main_grad,
    shard_specs,
)  # fmt: skip
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import TensorParallel

IN, OUT, S, B = 6, 8, 3, 2
INIT = WeightInit("layer", 0.5, 7, torch.float64)


def layout(rank: int, size: int, *, seq: bool = False) -> ParallelContext:
    return ParallelContext(TensorParallel(tiny.Rank(rank, size), seq))  # type: ignore[arg-type]


def rows(rank: int, size: int) -> ShardSpec:
    return ShardSpec.split((OUT, IN), 0, ((rank * OUT // size, OUT // size),))


def filled(layer: ParallelLinear) -> ParallelLinear:
    """The layer with a bias that is not zero, the same whole bias on every rank."""
    assert layer.bias is not None
    spec = layer.shard_specs()["bias"]
    layer.bias.data.copy_(spec.take(randn(*spec.shape)))
    return layer


@pytest.mark.parametrize("size", [2, 4])
def test_columns_of_the_ranks_side_by_side_are_the_layer(size: int) -> None:
    x, whole = randn(S, B, IN), filled(ColumnParallelLinear(rows(0, 1), INIT, bias=True, layout=layout(0, 1)))
    parts = [filled(ColumnParallelLinear(rows(r, size), INIT, bias=True, layout=layout(r, size))) for r in range(size)]
    want = F.linear(x, whole.weight, whole.bias)
    assert_law({"one rank": whole(x)[0], "ranks": torch.cat([part(x)[0] for part in parts], -1)}, {"one rank": want, "ranks": want}, FP64)
    assert all(part(x)[1].data_ptr() == x.data_ptr() for part in parts), "the second output is x, for a residual branch"


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_the_ranks_add_up_to_the_layer(size: int) -> None:
    wide, act = randn(S, B, IN), Activation("gelu")
    whole = filled(RowParallelLinear(IN, OUT, INIT, bias=True, layout=layout(0, 1), activation=act))
    parts = [RowParallelLinear(IN, OUT, INIT, bias=True, layout=layout(r, size)) for r in range(size)]
    inputs = F.gelu(wide).chunk(size, -1)
    total = sum(F.linear(x, part.weight) for x, part in zip(inputs, parts, strict=True))
    assert isinstance(total, Tensor) and whole.bias is not None
    assert_law({"y": whole(wide, residual=wide.new_ones(S, B, OUT))}, {"y": total + whole.bias + 1.0}, FP64)


def test_a_row_layers_bias_is_summed_only_where_positions_are_split() -> None:
    for seq in (False, True):
        specs = RowParallelLinear(IN, OUT, INIT, bias=True, layout=layout(1, 2, seq=seq)).shard_specs()
        assert specs["bias"] == ShardSpec.whole((OUT,), 1, 2, summed=seq) and specs["weight"].sums == ()
        assert specs["weight"].dim == 1


def test_a_bias_has_the_rows_of_its_weight() -> None:
    """Also those that several ranks hold, whose gradients are summed, and those that this rank counts."""
    held = replace(rows(0, 2), sums=(Sum(2, 2, 0, 1),), counted=((0, 2),))
    specs = ColumnParallelLinear(held, INIT, bias=True, layout=layout(0, 2)).shard_specs()
    assert specs == {"weight": held, "bias": replace(held, shape=(OUT,))}
    assert ColumnParallelLinear(held, INIT, bias=False, layout=layout(0, 2)).shard_specs() == {"weight": held}


@pytest.mark.parametrize(("vocab", "divisible_by", "size"), [(10, 4, 2), (10, 4, 1), (3, 4, 2), (8, 1, 4)])
def test_the_ranks_tables_one_after_another_are_the_whole_with_zeros_behind(vocab: int, divisible_by: int, size: int) -> None:
    tables = [VocabParallelEmbedding(vocab, IN, INIT, layout(r, size), divisible_by=divisible_by) for r in range(size)]
    weight = torch.cat([table.weight for table in tables])
    assert len(weight) % (divisible_by * size) == 0 and len(weight) - vocab < divisible_by * size
    assert torch.equal(weight[:vocab], INIT.draw((vocab, IN)).double()) and not weight[vocab:].any()
    assert sum(length for table in tables for _, length in table.shard_specs()["weight"].runs) == vocab


def test_a_table_is_the_same_on_every_rank() -> None:
    a, b = (Table(5, IN, INIT, layout(r, 2)) for r in range(2))
    assert torch.equal(a.weight, b.weight) and torch.equal(a.weight, INIT.draw((5, IN)).double())
    ids = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(a(ids), a.weight[ids])


@pytest.mark.parametrize("seq", [False, True])
@pytest.mark.parametrize("sees", ["positions", "heads"])
def test_a_norms_gradients_are_summed_where_ranks_see_different_shares(sees: str, seq: bool) -> None:
    norm = Norm(tiny.shape(normalization="LayerNorm"), IN, torch.float64, layout(0, 2, seq=seq), sees=sees)  # type: ignore[arg-type]
    summed = seq or sees == "heads"
    assert norm.shard_specs() == dict.fromkeys(("weight", "bias"), ShardSpec.whole((IN,), 0, 2, summed=summed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = ColumnParallelLinear(rows(0, 1), INIT, bias=True, layout=layout(0, 1))
        self.inner = nn.ModuleDict({"table": Table(5, IN, INIT, layout(0, 1))})
        self.foreign = nn.Linear(2, 2)
        self.parameter_specs = {"foreign.weight": ShardSpec.whole((2, 2), 0, 1)}


def test_specs_of_a_model_are_named_like_its_parameters() -> None:
    model = Model()
    specs = shard_specs(model)
    assert set(specs) == {"fc.weight", "fc.bias", "inner.table.weight", "foreign.weight"}
    assert specs["foreign.weight"] is model.parameter_specs["foreign.weight"] and specs["fc.weight"] == rows(0, 1)


def test_a_main_grad_is_attached_to_every_layer_of_ours_and_taken_off() -> None:
    model, main_grad = Model(), object()
    for held in (main_grad, None):
        attach_main_grad(model, held)  # type: ignore[arg-type]
        table = model.inner["table"]
        assert isinstance(table, Table) and model.fc.main_grad is held and table.main_grad is held
        assert not hasattr(model.foreign, "main_grad")
