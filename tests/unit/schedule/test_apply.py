"""What ``apply()`` changes in a model, without a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.schedule_toys import Toy, write
from torch import nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.utils.errors import ConfigError


def toy(*, seq: bool = False, tp: int = 2) -> Schedule:
    return write(schedule(Toy(), Mesh.sizes(tp=tp)), seq)


def partial_sums(s: Schedule) -> set[str]:
    s.apply(verify=False)
    assert s.applied is not None
    return {name for name, spec in s.applied.specs.items() if spec.sums}


def test_modules_are_replaced_by_a_module_or_by_what_a_function_makes() -> None:
    s, new, seen = toy(), nn.Linear(4, 4), []
    s["norm"].replace(new)
    s["blocks.0.norm1"].replace(lambda path, old: seen.append((path, type(old))) or nn.Identity())
    model = s.apply(verify=False)
    assert model.get_submodule("norm") is new and isinstance(model.get_submodule("blocks.0.norm1"), nn.Identity)
    assert seen[-1] == ("blocks.0.norm1", nn.LayerNorm)


def test_attributes_are_set_computed_and_divided_and_parameters_annotated() -> None:
    s = toy()
    s["blocks.0.attention"].set("num_heads", divide="tp").set("written_down", True).set("p", lambda p: p + 0.5)
    s["blocks.0.mlp.up"].annotate("weight", "note", "kept")
    model: Any = s.apply(verify=False)
    attention = model.blocks[0].attention
    assert (attention.num_heads, attention.written_down, attention.p, model.blocks[0].mlp.up.weight.note) == (2, True, 0.5, "kept")


def test_names_of_one_module_and_of_one_parameter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, bias=False), "holder": nn.Module()})
    model["c"] = model["a"]
    model["holder"].alias = model["b"].weight
    s = schedule(model, Mesh.sizes(tp=2))
    s["?"].column()
    s.apply(verify=False)
    assert model["c"] is model["a"] and model["a"].weight.shape == (2, 4), "split once"
    assert model["holder"].alias is model["b"].weight, "a module that does not compute with it follows"


@pytest.mark.parametrize("buffer", [False, True])
def test_shares_of_all_ranks_make_the_whole_and_tied_parameters_stay_one(buffer: bool) -> None:
    whole = Toy(tied=True).embed.weight.detach()  # [10, 16]: of 4 ranks, the last has one row and two of padding
    shares = []
    for rank in range(4):
        model = Toy(tied=True)
        s = schedule(model, Mesh.sizes(tp=4, tp_rank=rank))
        if buffer:
            model.register_buffer("table", whole)
            s[""].shard("table", 1)
        else:
            s["{embed,head}"].vocab_parallel()
        s.apply(verify=False)
        assert model.embed.weight is model.head.weight
        shares.append(model.get_buffer("table") if buffer else model.embed.weight.detach())
    joined = torch.cat(shares, 1 if buffer else 0)
    assert torch.equal(joined[: len(whole)], whole) and not joined[len(whole) :].any() and len(joined) == (10 if buffer else 12)


def test_gradients_that_are_partial() -> None:
    assert partial_sums(toy()) == set()
    block = "blocks.0"
    norms = {f"{norm}.{name}" for norm in (f"{block}.norm1", f"{block}.norm2", "norm") for name in ("weight", "bias")}
    assert partial_sums(toy(seq=True)) == norms | {f"{block}.attention.o.bias", f"{block}.mlp.down.bias"}
    s = toy()
    s["norm"].sum_gradients()
    s["blocks.0.norm1"].sum_gradients("bias")
    assert partial_sums(s) == {"norm.weight", "norm.bias", "blocks.0.norm1.bias"}
    s = toy()
    s["blocks.0.norm2"].sum_gradients("wieght")
    with pytest.raises(ConfigError, match=r"blocks\.0\.norm2 has no parameter 'wieght'"):
        s.apply()


def test_one_rank_keeps_its_forwards_and_gets_no_hooks() -> None:
    model = toy(tp=1).apply()
    assert not any("forward" in m.__dict__ or m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_row_sums_before_its_bias_as_the_sync_behind_it_says() -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4)), Mesh.sizes(tp=2))
    s["0"].shard("weight", 1).sync("fwd_post", "reduce_scatter", axis=0)
    assert partial_sums(s) == {"0.bias"} and not s.model.get_submodule("0")._forward_hooks, "no hook sums again"


@pytest.mark.parametrize("bias", [False, True])
def test_a_sync_over_another_axis_is_not_the_sum_of_a_row(bias: bool) -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4, bias=bias)), Mesh.sizes(tp=2, sp=2))
    s["0"].shard("weight", 1).sync("fwd_post", "all_reduce", over="sp")
    if bias:
        with pytest.raises(ConfigError, match=r"each of the tp \(2\) ranks would add its bias.*E3"):
            s.apply(verify=False)
    else:
        assert len(s.apply(verify=False).get_submodule("0")._forward_hooks) == 1, "the line's own exchange takes place"


def test_randomness_is_inside_recomputation() -> None:
    s = toy()
    s["blocks.0.attention"].checkpoint().rng("tp")
    outer: Any = s.apply(verify=False).get_submodule("blocks.0.attention").forward
    assert [f.__qualname__.partition(".")[0] for f in (outer, outer.__wrapped__)] == ["recompute", "around"]
