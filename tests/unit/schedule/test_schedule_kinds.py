"""What can be split by columns and rows, what cannot, and the reason that is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_sp.schedule import Mesh, schedule
from megatron_sp.utils.errors import ConfigError


class SomeRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LayerNorm(4), "a norm looks at all its features"),
        (nn.RMSNorm(4), "a norm looks at all its features"),
        (SomeRMSNorm(), "a norm looks at all its features"),
        (nn.MultiheadAttention(4, 2), "it has q, k and v in one parameter"),
        (nn.MultiheadAttention(4, 2).out_proj, "a part of nn.MultiheadAttention, which never calls it"),
        (nn.GRU(4, 4), "its gates are in one matrix"),
        (nn.PReLU(4), "teach it with megatron_sp.schedule.register_shardable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("how", ["column", "row"])
def test_what_cannot_be_split(module: nn.Module, message: str, how: str) -> None:
    s = schedule(nn.ModuleDict({"a": module}), Mesh.sizes(tp=2))
    getattr(s["a"], how)()
    with pytest.raises(ConfigError, match=f"a is a {type(module).__name__}, .*{message}"):
        s.apply()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear])
def test_sizes_follow_what_is_split(kind: type[nn.Module]) -> None:
    sizes = (4, 6) if kind is nn.Linear else (4, 6, 3)
    module = kind(*sizes)
    shape = module.weight.shape[2:]  # type: ignore[union-attr]
    s = schedule(nn.ModuleDict({"a": module}), Mesh.sizes(tp=2))
    s["a"].column()
    part = s.apply().get_submodule("a")
    assert part.weight.shape == (3, 4, *shape) and part.bias.shape == (3,) and "6" not in repr(part)
    again = schedule(nn.ModuleDict({"a": kind(*sizes)}), Mesh.sizes(tp=2))
    again["a"].row()
    part = again.apply().get_submodule("a")
    assert part.weight.shape == (6, 2, *shape) and part.bias.shape == (6,) and "4" not in repr(part)


def test_fewer_heads_than_ranks() -> None:
    rows = {}
    for rank in range(4):
        s = schedule(nn.ModuleDict({"k": nn.Linear(3, 10)}), Mesh.sizes(tp=4, tp_rank=rank))
        s["k"].column(heads=2, replicas=True)
        s.apply()
        assert s.applied is not None
        spec = s.applied.specs["k.weight"]
        rows[rank] = (spec.runs, spec.sums[0].slot, spec.sums[0].num_slots, spec.counted)
    first, second = ((0, 5),), ((5, 5),)
    assert rows == {0: (first, 0, 2, first), 1: (first, 0, 2, ()), 2: (second, 1, 2, first), 3: (second, 1, 2, ())}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 2}, r"k.weight: heads \(2\) must be a multiple of tp \(4\)"),
        ({"heads": 3, "replicas": True}, r"k.weight: heads \(3\) must be a multiple of tp \(4\)"),
        ({"heads": 8, "replicas": True}, r"k.weight: axis 0 \(12\) must be a multiple of heads \(8\)"),
        ({"heads": 2, "replicas": True, "gather": True, "blocks": 1}, r"k: gather joins every rank's heads, and here several ranks have"),
    ],
)
def test_heads_that_ranks_cannot_share(options: dict[str, int], message: str) -> None:
    s = schedule(nn.ModuleDict({"k": nn.Linear(4, 12)}), Mesh.sizes(tp=4))
    s["k"].column(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        s.apply()
