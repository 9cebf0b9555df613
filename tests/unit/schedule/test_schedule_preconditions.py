"""What would compute something else without an error is told when a schedule is applied, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from megatron_sp.schedule import Kind, Mesh, Schedule, register_shardable, schedule
from megatron_sp.schedule.core import kinds
from megatron_sp.utils.errors import ConfigError


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))


def patched() -> nn.Linear:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign,assignment]
    return module


def shard(axis: int, tensor: str = "weight") -> Callable[[Schedule], Any]:
    return lambda s: s["0"].shard(tensor, axis)


def both_sides(s: Schedule) -> None:
    s["0"].shard("weight", 1).shard("bias", 0).sync("fwd_post", "all_reduce")


def words(s: Schedule) -> None:
    s["0"].shard("weight", 0)
    s["0"].sync("fwd_post", "all_gather", axis=0)


@pytest.mark.parametrize(
    ("make", "write", "message"),
    [
        (lambda: nn.Conv2d(4, 4, 4), shard(2), r"0.weight: axis 2 of a Conv2d cannot be split, only 0 \(outputs\) and 1 \(inputs\)"),
        (lambda: nn.EmbeddingBag(4, 4), shard(0), r"axis 0 of a EmbeddingBag cannot be split, only 1 \(outputs\)"),
        (lambda: nn.Bilinear(4, 4, 4), shard(-1), r"axis -1 of a Bilinear cannot be split, only 0 \(outputs\)"),
        (lambda: nn.LayerNorm(4), shard(0), "a norm looks at all its features"),
        (lambda: nn.MultiheadAttention(4, 2), shard(0, "in_proj_weight"), "q, k and v in one parameter"),
        (lambda: nn.LSTM(4, 4), shard(0, "weight_hh_l0"), "its gates are in one matrix"),
        (lambda: nn.GroupNorm(3, 12), shard(0), r"0.weight: num_groups \(3\) must be a multiple of tp \(2\)"),
        (lambda: nn.Conv1d(6, 6, 1, groups=3), shard(0), r"0.weight: groups \(3\) must be a multiple of tp \(2\)"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), shard(1), "cannot be split along axis 1 with max_norm=1.0"),
        (lambda: nn.Embedding(4, 4, sparse=True, scale_grad_by_freq=True), shard(0), "with scale_grad_by_freq and sparse: leave the table"),
        (lambda: nn.Embedding(4, 4), words, "all_gather .* would repeat them: use all_reduce, or split axis 1"),
        (lambda: nn.Linear(4, 4), both_sides, "0.bias is split along its outputs and 0.weight is not"),
        (lambda: Activated(4, 4), lambda s: s["0"].row(), "is a Activated with a forward of its own"),
        (patched, lambda s: s["0"].row(), "is a Linear with a forward of its own"),
        (lambda: Activated(4, 4), lambda s: s["0"].vocab_parallel(), "is a Activated with a forward of its own"),
        (lambda: nn.Conv1d(4, 4, 1), lambda s: s["0"].vocab_parallel(), "vocab_parallel is for an embedding, or the layer over the vocab"),
        (Scaled, lambda s: s["0"].row(), "is a Scaled with scale beside weight and bias, which has no place after the sum"),
        (lambda: nn.LazyLinear(4), lambda s: s["0"].column(), "0.weight has no shape before the model has run"),
        (
            lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
            lambda s: s["0"].column(),
            "weight is computed by _WeightNorm: shard what it is computed from, in 0.parametrizations.weight",
        ),
        (lambda: nn.Linear(4, 4), lambda s: s[""].replace(nn.Identity()), "begin the schedule of the other model instead"),
        (lambda: nn.Linear(4, 4), lambda s: s[""].shard("0.weight", 0), "the model has no parameter '0.weight'"),
    ],
)
def test_refused(make: Callable[[], nn.Module], write: Callable[[Schedule], Any], message: str) -> None:
    register_shardable(Scaled, Kind({"weight": 1, "scale": 0}, {"weight": 0}, product=lambda m, x: x @ m.weight))  # type: ignore[arg-type,return-value,operator]
    model = nn.Sequential(make())
    before = {name: tuple(p.shape) for name, p in model.named_parameters()} if "Lazy" not in type(model[0]).__name__ else {}
    s = schedule(model, Mesh.sizes(tp=2))
    write(s)
    try:
        with pytest.raises(ConfigError, match=message):
            s.apply(verify=False)
    finally:
        del kinds._KINDS[Scaled]
    assert all(tuple(p.shape) == before[name] for name, p in model.named_parameters() if before), "nothing has changed"


def test_an_axis_that_a_tensor_has_not() -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4)), Mesh.sizes(tp=2))
    s["0"].sync("fwd_pre", "scatter", axis=5)
    with pytest.raises(ConfigError, match=r"scatter at 0: axis 5 of \[2, 4\] does not exist"):
        s.apply()(torch.zeros(2, 4))
