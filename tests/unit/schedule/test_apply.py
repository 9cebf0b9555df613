"""Phases of ``apply()``, each by itself: what it takes, what it returns, and what it changes in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.schedule_toys import H, Toy, write
from torch import nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.edits import register_regions, register_syncs, replace_modules, set_attributes, summed_by_lines
from megatron_sp.schedule.apply.layers import replace_forwards
from megatron_sp.schedule.apply.plan import ApplyJob, Split, SplitPlan, plan_splits, shard_specs, split_tensors
from megatron_sp.utils.errors import ConfigError


def job_of(s: Schedule, tp: int = 2, rank: int = 0) -> ApplyJob:
    return ApplyJob(s.model, s.directives, Mesh.sizes(tp=tp, tp_rank=rank), s.seq_dim)


def toy(*, seq: bool = False, tied: bool = False) -> Schedule:
    return write(schedule(Toy(tied=tied), Mesh.sizes(tp=2)), seq)


def tensors(model: nn.Module) -> dict[str, int]:
    return {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def forwards(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if "forward" in module.__dict__]


def hooked(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Number of hooks before and after each module that has any."""
    found = {path: (len(m._forward_pre_hooks), len(m._forward_hooks)) for path, m in model.named_modules()}
    return {path: counts for path, counts in found.items() if any(counts)}


# the job


def test_a_module_with_two_names_is_visited_once_under_the_first() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["c"] = model["a"]
    s = schedule(model, Mesh.sizes(tp=2))
    s["?"].column()
    assert [path for _, path, _ in job_of(s).each("column")] == ["a", "b"]
    assert job_of(s).first_names() == {id(model["a"].weight): "a.weight", id(model["a"].bias): "a.bias",
                                       id(model["b"].weight): "b.weight", id(model["b"].bias): "b.bias"}  # fmt: skip


# modules and attributes


def test_modules_are_replaced_by_a_module_or_by_what_a_function_makes() -> None:
    s = toy()
    new, seen = nn.Linear(4, 4), []
    s["norm"].replace(new)
    s["blocks.0.norm1"].replace(lambda path, old: seen.append((path, type(old))) or nn.Identity())
    replace_modules(job_of(s))
    assert s.model.get_submodule("norm") is new and isinstance(s.model.get_submodule("blocks.0.norm1"), nn.Identity)
    assert seen == [("blocks.0.norm1", nn.LayerNorm)]


def test_attributes_are_set_computed_and_divided() -> None:
    s = toy()
    attention: Any = s.model.get_submodule("blocks.0.attention")
    s["blocks.0.attention"].set("num_heads", divide="tp").set("written_down", True).set("p", lambda p: p + 0.5)
    set_attributes(job_of(s))
    assert (attention.num_heads, attention.written_down, attention.p) == (2, True, 0.5)


# the plan


def test_the_plan_changes_nothing_and_says_what_is_split_how() -> None:
    s = toy()
    s["head"].vocab_parallel()
    before = tensors(s.model)
    plan = plan_splits(job_of(s))
    assert tensors(s.model) == before and not forwards(s.model)
    assert {name: split.dim for name, split in plan.splits.items() if "mlp" in name or "head" in name} == {
        "blocks.0.mlp.up.weight": 0, "blocks.0.mlp.up.bias": 0, "blocks.0.mlp.down.weight": 1, "head.weight": 0,
    }  # fmt: skip
    assert plan.splits["head.weight"].padded and not plan.splits["blocks.0.mlp.up.weight"].padded
    down = s.model.get_submodule("blocks.0.mlp.down")
    assert plan.sums_itself("blocks.0.mlp.down", down) and not plan.sums_itself("blocks.0.mlp.up", s.model.get_submodule("blocks.0.mlp.up"))


def test_a_table_leaves_its_sum_to_the_users_hooks() -> None:
    s = schedule(Toy(), Mesh.sizes(tp=2))
    s["embed"].shard("weight", 0)
    embed = s.model.get_submodule("embed")
    assert plan_splits(job_of(s)).sums_itself("embed", embed)
    s["embed"].hook("fwd_post", lambda module, inputs, output: output)
    assert not plan_splits(job_of(s)).sums_itself("embed", embed)


def test_another_name_of_a_parameter_is_split_along_unless_its_module_computes_with_it() -> None:
    model = nn.Module()
    model.layer, model.holder = nn.Linear(4, 4, bias=False), nn.Module()
    model.holder.alias = model.layer.weight
    s = schedule(model, Mesh.sizes(tp=2))
    s["layer"].column()
    assert {name: split.dim for name, split in plan_splits(job_of(s)).splits.items()} == {"layer.weight": 0, "holder.alias": 0}
    model.second = nn.Linear(4, 4, bias=False)
    model.second.weight = model.layer.weight
    with pytest.raises(ConfigError, match=r"layer.weight and second.weight are one tied parameter.*E9"):
        plan_splits(job_of(s))


def test_facts_of_the_whole_model() -> None:
    model = nn.Module()
    model.conv = nn.Conv1d(8, 8, 3, groups=4)
    model.register_buffer("split", torch.zeros(6, 2))
    model.register_buffer("other", torch.zeros(3))
    s = schedule(model, Mesh.sizes(tp=2))
    s[""].shard("split", 0)
    s["conv"].column()
    whole = plan_splits(job_of(s))
    assert whole.shapes == {"conv.weight": (8, 2, 3), "conv.bias": (8,), "split": (6, 2)}
    assert {name: n for (key, name), n in whole.counts.items() if key == id(model.conv)} == {
        "groups": 4, "in_channels": 8, "out_channels": 8,
    }  # fmt: skip


# tensors


def test_shares_of_all_ranks_make_the_whole_and_tied_parameters_stay_one() -> None:
    whole = Toy(tied=True).embed.weight.detach()  # [10, 16]: of 4 ranks, the last has one row and two of padding
    shares = []
    for rank in range(4):
        s = schedule(Toy(tied=True), Mesh.sizes(tp=4))
        s["{embed,head}"].vocab_parallel()
        job = job_of(s, tp=4, rank=rank)
        s.model.embed.weight.note = "kept"  # type: ignore[attr-defined, union-attr]
        split_tensors(s.model, plan_splits(job).splits, job.mesh.tp)
        embed, head = s.model.get_submodule("embed"), s.model.get_submodule("head")
        assert embed.weight is head.weight and embed.weight.note == "kept"  # type: ignore[union-attr]
        shares.append(embed.weight.detach())
    joined = torch.cat(shares)
    assert torch.equal(joined[: len(whole)], whole) and not joined[len(whole) :].any() and len(joined) == 12


def test_split_buffers_are_replaced_too() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(8.0).reshape(2, 4))
    split_tensors(model, {"table": Split("table", 1)}, Mesh.sizes(tp=2, tp_rank=1).tp)
    assert torch.equal(model.table, torch.tensor([[2.0, 3], [6, 7]]))


def test_specs_mark_partial_gradients_of_whole_parameters_only() -> None:
    job = job_of(toy())
    plan = plan_splits(job)
    specs = shard_specs(job.model, plan, {"norm.weight"}, job.mesh.tp)
    assert list(specs) == [name for name, _ in job.model.named_parameters()]
    assert specs["norm.weight"] == ShardSpec.whole((H,), 0, 2, summed=True) and not specs["norm.bias"].sums
    up = specs["blocks.0.mlp.up.weight"]
    assert (up.shape, up.dim, up.runs) == ((20, H), 0, ((0, 10),)) and not up.sums


# forwards


def converted(s: Schedule, tp: int = 2) -> tuple[SplitPlan, set[str]]:
    """Run the phases up to the forwards: (the plan, biases with partial gradients)."""
    job = job_of(s, tp)
    plan = plan_splits(job)
    split_tensors(s.model, plan.splits, job.mesh.tp)
    return plan, replace_forwards(job, plan)


@pytest.mark.parametrize("seq", [False, True])
def test_only_layers_split_by_a_line_of_their_own_get_other_forwards(seq: bool) -> None:
    s = toy(seq=seq)
    _, partial = converted(s)
    block = "blocks.0"
    assert forwards(s.model) == [f"{block}.attention.{n}" for n in "qkvo"] + [f"{block}.mlp.up", f"{block}.mlp.down"]
    # after a reduce_scatter each rank adds the bias to its own positions
    assert partial == ({f"{block}.attention.o.bias", f"{block}.mlp.down.bias"} if seq else set())
    up: Any = s.model.get_submodule(f"{block}.mlp.up")
    assert (up.in_features, up.out_features) == (H, 10)


def test_one_rank_keeps_its_forwards() -> None:
    s = toy()
    assert converted(s, tp=1)[1] == set() and not forwards(s.model)


def test_a_row_without_a_line_of_its_own_sums_as_the_sync_behind_it_says() -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4)), Mesh.sizes(tp=2))
    s["0"].shard("weight", 1).sync("fwd_post", "reduce_scatter", axis=0)
    plan, partial = converted(s)
    assert forwards(s.model) == ["0"] and partial == {"0.bias"}
    register_syncs(job_of(s), plan)
    assert not hooked(s.model)  # the layer sums before its bias, so no hook sums again


def test_a_sync_over_another_axis_is_not_the_sum_of_a_row() -> None:
    mesh = Mesh.sizes(tp=2, sp=2)
    s = schedule(nn.Sequential(nn.Linear(4, 4, bias=False)), mesh)
    s["0"].shard("weight", 1).sync("fwd_post", "all_reduce", over="sp")
    job = ApplyJob(s.model, s.directives, mesh, s.seq_dim)
    plan = plan_splits(job)
    split_tensors(s.model, plan.splits, job.mesh.tp)
    replace_forwards(job, plan)
    register_syncs(job, plan)
    assert hooked(s.model) == {"0": (0, 1)}, "the line's own exchange takes place"
    s = schedule(nn.Sequential(nn.Linear(4, 4)), mesh)
    s["0"].shard("weight", 1).sync("fwd_post", "all_reduce", over="sp")
    with pytest.raises(ConfigError, match=r"each of the tp .* ranks would add its bias"):
        replace_forwards(ApplyJob(s.model, s.directives, mesh, s.seq_dim), plan)


def test_a_row_with_a_bias_and_no_sum_is_refused() -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4)), Mesh.sizes(tp=2))
    s["0"].shard("weight", 1)
    with pytest.raises(ConfigError, match=r"each of the tp \(2\) ranks would add its bias.*E3"):
        converted(s)


# hooks


def test_syncs_stand_where_their_lines_say() -> None:
    s = toy()
    job = job_of(s)
    register_syncs(job, plan_splits(job))
    assert hooked(s.model) == {"blocks.0.attention": (1, 0), "blocks.0.mlp": (1, 0)}
    alone = toy()
    register_syncs(job_of(alone, tp=1), plan_splits(job_of(alone, tp=1)))
    assert not hooked(alone.model)


def test_a_region_cuts_at_its_first_module_and_gathers_at_its_last() -> None:
    s = toy(seq=True)
    job = job_of(s)
    plan = plan_splits(job)
    length, partial = register_regions(job, plan)
    assert hooked(s.model) == {"blocks.0": (1, 0), "norm": (0, 1)} and length.positions == 0
    norms = {f"{norm}.{name}" for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm") for name in ("weight", "bias")}
    assert partial == norms | {"blocks.0.attention.o.bias", "blocks.0.mlp.down.bias"}  # whole inside the region, used on a share


def test_lines_name_parameters_whose_gradients_are_partial() -> None:
    s = toy()
    s["norm"].sum_gradients()
    s["blocks.0.norm1"].sum_gradients("bias")
    assert set(summed_by_lines(job_of(s))) == {"norm.weight", "norm.bias", "blocks.0.norm1.bias"}
    s["blocks.0.norm2"].sum_gradients("wieght")
    with pytest.raises(ConfigError, match=r"blocks\.0\.norm2 has no parameter 'wieght'"):
        list(summed_by_lines(job_of(s)))


# all of them


def test_randomness_is_inside_recomputation() -> None:
    s = toy()
    s["blocks.0.attention"].checkpoint().rng("tp")
    model = s.apply(verify=False)
    outer: Any = model.get_submodule("blocks.0.attention").forward
    assert [f.__qualname__.partition(".")[0] for f in (outer, outer.__wrapped__)] == ["recompute", "around"]


@pytest.mark.parametrize("do", ["ulysses", "zero"])
def test_lines_about_the_whole_model_are_said_once(do: str) -> None:
    s = toy()
    for _ in range(2):
        s.add("", do, **({"axis": "sp"} if do == "ulysses" else {"stage": 1}))
    with pytest.raises(ConfigError, match=rf"{do} was asked for twice, at test_apply.* and at test_apply.*E5"):
        apply(s.model, s.directives, s.mesh, s.seq_dim)
