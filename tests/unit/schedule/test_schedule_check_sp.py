"""Schedule.check() along sp: shares of positions, heads in attention, parts of the loss; each mistake names the module and the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.core_toys import Toy
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.check.follower import Follower
from megatron_sp.schedule.core.placements import PlacementError
from megatron_sp.utils.errors import ConfigError

HERE = "test_schedule_check_sp.py:"
CORE: dict[str, Any] = {"core": "blocks.*.core", "q": "query"}
ROOT: dict[str, Any] = {**CORE, "inputs": ["ids"], "positions": "at"}
REGION: dict[str, Any] = {**CORE, "enter": "blocks.0", "leave": "norm"}


def ids(length: int = 8) -> dict[str, Tensor]:
    return {"ids": torch.arange(3 * length).reshape(3, length) % 37}


def split(given: dict[str, Any], model: nn.Module | None = None, sp: int = 2, **mesh: int) -> Schedule:
    return schedule(model or Toy(), Mesh.sizes(sp=sp, **mesh)).ulysses(**given)


def refused(s: Schedule, *words: str, data: dict[str, Any] | None = None) -> None:
    with pytest.raises(ConfigError) as error:
        s.check(data or ids())
    text = str(error.value)
    assert all(word in text for word in words), text


def over_sp(s: Schedule, data: dict[str, Any] | None = None) -> dict[str, str]:
    """The layout of every module's first output."""
    return {path: str(next(iter(edges.values()))) for path, edges in s.check(data or ids()).sp_outputs.items() if edges}


@pytest.mark.parametrize("sp", [2, 4])
def test_sequences_that_are_cut_at_the_inputs(sp: int) -> None:
    s = split(ROOT, sp=sp)
    found = over_sp(s)
    assert found["words"] == found["blocks.1"] == found["blocks.0.core"] == found["head"] == found[""] == "S(1)"
    report = s.check(ids())
    assert str(report.sp_inputs["blocks.0.core"]["v"]) == "S(1)" and report.outputs == {} and report.warnings == []
    assert "over sp: blocks.0.qkv: 0: S(1) -> 0: S(1)" in str(report)


def test_sequences_that_are_cut_between_blocks() -> None:
    """Before and after it, all ranks compute the same, and have a part of each gradient."""
    found = over_sp(split(REGION, Toy(pools=True)))
    assert (found["words"], found["blocks.0"], found["norm"], found["head"], found[""]) == ("R", "S(1)", "R", "R", "I")


@pytest.mark.parametrize("layout, dim", [("sbhd", 0), ("bhsd", 1)])
def test_other_orders_of_dims(layout: str, dim: int) -> None:
    data = {"ids": ids()["ids"].t().contiguous()} if layout == "sbhd" else ids()
    s = schedule(Toy(layout), Mesh.sizes(sp=2), seq_dim=dim if layout == "sbhd" else 1)
    assert over_sp(s.ulysses(**ROOT, layout=layout), data)[""] == f"S({dim})"


def test_lengths_that_are_padded_and_key_value_heads_that_are_copied() -> None:
    assert over_sp(split(ROOT, sp=4), ids(7))[""] == "S(1)"  # two key/value heads on four ranks


def test_tp_and_sp_are_followed_one_by_one() -> None:
    s = split(REGION, Toy(), tp=2)
    s["blocks.*.qkv"].column(blocks=[24, 12, 12])
    s["blocks.*.out"].row()
    s["blocks.*"].set("widths", lambda widths: [n // 2 for n in widths])
    report = s.check(ids())
    assert str(report.outputs["blocks.0.qkv"]["0"]) == "S(2, in parts of [12, 6, 6])"
    assert str(report.sp_outputs["blocks.0.qkv"]["0"]) == "S(1)"


def test_e2_heads_that_ranks_cannot_share() -> None:
    refused(split(ROOT, sp=3), "blocks.0.core has 4 query heads", "a multiple of sp (3)", "sp 2, 4 would work", "E2", data=ids(9))


def test_e5_ranks_that_all_do_the_same() -> None:
    refused(schedule(Toy(), Mesh.sizes(sp=2)), "the model (Toy): no line cuts anything over sp (2)", "2 times too large", "E5")
    s = schedule(Toy(), Mesh.sizes(sp=2))
    s["norm"].sync("fwd_pre", lambda x, group: x, layouts="R->R", over="sp")
    refused(s, "the model (Toy): result 0: all ranks of sp (2) compute it alike", "E5")


@pytest.mark.parametrize("do", ["ulysses", "zero"])
def test_e5_asked_for_twice(do: str) -> None:
    s = split(ROOT)
    for _ in range(1 if do == "ulysses" else 2):
        s.ulysses(**ROOT) if do == "ulysses" else s.zero(1)
    refused(s, f"the model (Toy): {do} was asked for twice, at {HERE}", "E5")


def test_lines_of_zero_that_cannot_be() -> None:
    refused(split(ROOT).zero(4), "zero: the stage must be 0, 1, 2 or 3, not 4", HERE)
    refused(split(ROOT).zero(1, {"rate": 1.0}), "the optimizer has no rate", HERE)
    refused(split(ROOT).zero(1, blocks="block.*"), "there is no 'block'", "did you mean blocks?")


def test_e6_a_gradient_that_nobody_sums() -> None:
    """A sync that makes its result's gradient complete, before what is cut."""
    s = split(REGION)
    s["words"].sync("fwd_post", lambda x, group: x, layouts="R->I", over="sp")
    refused(s, "the model (Toy): add:", "used alike by all ranks", ".sync('fwd_pre', 'copy', over='sp')", HERE, "E6")
    s["places"].sync("fwd_post", lambda x, group: x, layouts="R->I", over="sp")
    refused(s, "blocks.0 (Block): take_share:", "cut over sp", HERE, "E6")


def test_e10_regions_that_begin_late_or_end_early() -> None:
    refused(split({**REGION, "enter": "blocks.1"}), "blocks.0 (Block) runs before", "enter=", HERE, "E10")
    refused(split({**REGION, "leave": "blocks.0"}), "blocks.1", "all_to_all", "which is to be cut over sp", HERE, "E10")


def test_e10_over_other_axes() -> None:
    refused(split({**ROOT, "axis": "dp"}, dp=2), "over dp, whose ranks have batches of their own", HERE, "E10")
    refused(split({**ROOT, "axis": "tp"}, tp=2), "over tp, whose ranks have different parameters", HERE, "E10")


def test_e10_a_tensor_that_is_cut_twice() -> None:
    s = split(ROOT)
    s["blocks.1"].sync("fwd_pre", "scatter", over="sp")
    refused(s, "blocks.1 (Block): scatter_to:", "cut along dim 1 since cut over sp", HERE, "E10")


def test_e11_positions_that_a_rank_counts_itself() -> None:
    refused(split({**CORE, "inputs": ["ids"]}), "arange", "[4]", "[8]", "taken from a share", "E11")


def test_e12_lengths_that_may_not_be_padded() -> None:
    refused(split({**ROOT, "pad": False}), "ids has 7 positions, which must be a multiple of 2", HERE, "E12", data=ids(7))


def test_e13_an_input_that_is_not_there() -> None:
    refused(split({**REGION, "arg": "hidden"}), "blocks.0 has no input 'hidden': Block.forward takes x", HERE, "E13")
    refused(split({**ROOT, "q": "queries"}), "blocks.0.core has no input 'queries': Core.forward takes query, k, v", HERE, "E13")


def test_transformers_without_a_mask() -> None:
    """Its models then look whether positions start anew, in which a share of them cannot tell."""
    transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=40, attention_dropout=0.1))
    s = schedule(model, Mesh.sizes(sp=2))
    s.ulysses()
    report = s.check({"input_ids": torch.arange(24).reshape(3, 8)})
    assert report.dry and report.sp_forks == ["model.layers.0.self_attn"]


def test_e14_dropout_on_shares_of_positions() -> None:
    model = Toy()
    model.idle = nn.Dropout(0.1)  # type: ignore[assignment]
    model.blocks[1] = nn.Sequential(nn.Dropout(0.1), model.blocks[1])
    s = split({**REGION, "core": "blocks.**.core", "leave": "blocks.1"}, model)
    report = s.check(ids())
    assert report.sp_forks == ["blocks.1.0"] and "blocks.1.0: dropout on shares of positions" in report.warnings[0]
    assert str(s.directives[-1]) == "blocks.1.0: rng(axis='sp')"
    assert s.check(ids()).sp_forks == ["blocks.1.0"], "worked out again, and there once"
    assert sum(d.do == "rng" for d in s.directives) == 1
    s["blocks.1.0"].rng("sp")
    assert s.check(ids()).warnings == [] and sum(d.do == "rng" for d in s.directives) == 1


class Counted(nn.Module):
    """A loss over positions."""

    def __init__(self, reduction: str, divide: bool = False) -> None:
        super().__init__()
        self.inner, self.reduction, self.divide = Toy(), reduction, divide

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor, at: Tensor | None = None) -> Tensor:
        loss = F.cross_entropy(self.inner(ids, at).flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return loss / count if self.divide else loss


def counted(reduction: str, divide: bool = False) -> tuple[Schedule, dict[str, Tensor]]:
    s = schedule(Counted(reduction, divide), Mesh.sizes(sp=2))
    s.ulysses(**{**ROOT, "core": "inner.blocks.*.core", "inputs": ["ids", "labels"]})
    return s, {**ids(), "labels": ids()["ids"] % 5, "count": torch.tensor(24)}


def test_the_sum_of_a_share_is_a_part_and_its_mean_is_not() -> None:
    s, data = counted("sum", divide=True)
    refused(s, "the model (Counted): result 0: leaves the model as a partial sum", "E3", data=data)
    s[""].sync("fwd_post", "all_reduce", over="sp")
    assert over_sp(s, data)[""] == "I"
    s, data = counted("mean")
    s[""].sync("fwd_post", "all_reduce", over="sp")
    refused(s, "the model (Counted): reduce_from:", "a mean over its own share", "E3", data=data)
    s, data = counted("none")
    assert over_sp(s, data)[""] == "S(0, in 3 parts)"


def test_labels_are_cut_as_what_they_label() -> None:
    s, data = counted("sum")
    s.directives[0].args["inputs"] = ["ids"]
    with pytest.raises(PlacementError, match=r"the model \(Counted\): cross_entropy: .*cut both alike.*E10"):
        s.check(data)


def test_a_buffer_that_forward_replaces_leaves_no_name() -> None:
    """Its id is that of another tensor soon, which a rank took for the buffer: on one rank, and once in some runs."""
    model = Toy()
    model.register_buffer("table", torch.zeros(3))
    names = Follower(model).names
    assert names[model.table] == "table"  # type: ignore[index]
    before = len(names)
    model.table = torch.ones(3)
    assert len(names) == before - 1
