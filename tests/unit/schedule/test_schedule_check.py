"""Schedule.check(): each mistake is found without ranks, and the message names the module, the line of the schedule and the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.schedule_toys import B, D, H, S, batch, toy, write
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, PathError, Schedule, schedule
from megatron_sp.schedule.check.rules.table import RULES, teach
from megatron_sp.schedule.core.placements import PlacementError
from megatron_sp.utils.errors import ConfigError

HERE = "test_schedule_check.py:"


def refused(s: Schedule, *words: str, data: dict[str, Any] | None = None) -> str:
    """The message of check(); it has these words."""
    with pytest.raises(ConfigError) as error:
        s.check(batch() if data is None else data)
    text = str(error.value)
    assert all(word in text for word in words), text
    return text


def without(s: Schedule, on: str, do: str) -> Schedule:
    """Less one line, to be written otherwise."""
    kept = [d for d in s.directives if (d.on, d.do) != (on, do)]
    assert len(kept) == len(s.directives) - 1
    s.directives = kept
    return s


@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_right_schedule_is_right(seq: bool, tp: int) -> None:
    s = toy(tp, seq=seq, layers=2)
    before = {n: p.clone() for n, p in s.model.named_parameters()}
    report = s.check(batch())
    assert all(torch.equal(p, before[n]) for n, p in s.model.named_parameters())
    edges = {p: {n: str(x) for n, x in e.items()} for p, e in report.outputs.items()}
    assert edges["blocks.1.attention.q"] == {"0": "S(2)"}
    assert edges["blocks.0"] == {"0": "S(1)" if seq else "I"}
    assert edges["blocks.0.attention.o"] == {"0": "S(1)" if seq else "I"}
    assert edges[""] == {"loss": "I", "logits": "I"}
    assert str(report.inputs["blocks.0.attention.q"]["0"]) == "R"
    assert report.derived == ({0: "reduce_scatter", 3: "reduce_scatter"} if seq else {})
    assert report.warnings == []
    assert "blocks.0.mlp.up: 0: R -> 0: S(2)" in str(report)


def test_one_rank_needs_nothing() -> None:
    assert toy(1, seq=False).check(batch()).warnings == []


def test_without_a_batch_the_lines_alone_are_looked_at() -> None:
    report = toy(seq=False).check()
    assert not report.dry and "give check() a batch" in str(report)


def test_hooks_of_ones_own_are_not_judged() -> None:
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    s.add("blocks.*.mlp", "hook", mode="fwd_pre", fn=print)
    report = s.check(batch())
    assert not report.dry and "verify()" in report.warnings[0]


def test_e1_paths_and_parameters() -> None:
    with pytest.raises(PathError, match=r"no 'attentoin'.*did you mean attention\?"):
        toy()["blocks.*.attentoin"]
    s = toy(seq=False)
    s["blocks.0.mlp.up"].shard("weihgt", 0)
    refused(s, "blocks.0.mlp.up has no parameter 'weihgt'", "did you mean weight?", HERE, "E1")


def test_e2_axes_and_heads() -> None:
    refused(toy(3, seq=False), "blocks.0.attention.q.weight: axis 0 (16) must be a multiple of tp (3): tp 2, 4, 8, 16 would work")
    s = toy(8, seq=False)
    s.model.blocks[0].attention.num_attention_heads = 4  # type: ignore[union-attr,index]
    refused(s, "blocks.0.attention.q: num_attention_heads (4) must be multiples of tp (8): tp 2, 4 would work", "schedule_toys.py:", "E2")


def test_e2_key_and_value_heads() -> None:
    s = toy(4, seq=False)
    attention = s.model.blocks[0].attention  # type: ignore[union-attr,index]
    attention.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})()  # type: ignore[union-attr]
    refused(s, "num_attention_heads (4), num_key_value_heads (2) must be multiples of tp (4): tp 2 would work", "E2")


def test_e3_a_partial_sum_that_nobody_completes() -> None:
    s = without(toy(seq=False, bias=False), "blocks.*.mlp.down", "row")
    s["blocks.*.mlp.down"].shard("weight", 1)
    refused(s, "blocks.0.mlp.down is split by its inputs", HERE, "no line completes it", ".row()", "E3")


def test_e3_a_partial_sum_that_is_used_too_early() -> None:
    """Summed at the end of the block: between, something that is no sum is done with it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(H, 8, bias=False), nn.Linear(8, H, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.down(self.up(x)))

    s = schedule(Late(), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].shard("weight", 1)
    s[""].sync("fwd_post", "all_reduce")
    words = "the model (Late): gelu: a tensor of [3, 8, 16] is a partial sum on each rank since down (Linear) (split at"
    refused(s, words, HERE, ".row('all_reduce')", "E3", data={"x": torch.zeros(B, S, H, requires_grad=True)})


def test_e3_a_partial_sum_leaves_the_model() -> None:
    s = schedule(nn.Linear(8, 4, bias=False), Mesh.sizes(tp=2))
    s[""].sync("fwd_pre", lambda x, group: x)
    s[""].shard("weight", 1)
    with pytest.raises(PlacementError, match="E3"):
        s.check({"input": torch.zeros(3, 8)})


def test_e3_the_sum_behind_a_bias() -> None:
    s = schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), Mesh.sizes(tp=2))
    s["0"].column()
    s["1"].shard("weight", 1)
    s[""].sync("fwd_post", "all_reduce")
    refused(s, "1 is split along its inputs, so each of the tp (2) ranks would add its bias", "E3", data={"input": torch.zeros(3, 8)})


def test_e4_a_bias_that_is_not_split_along() -> None:
    s = without(toy(seq=False), "blocks.*.mlp.up", "column")
    s["blocks.*.mlp.up"].shard("weight", 0)
    refused(s, "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias is not", HERE, '.shard("bias", axis=0)', "E4")


DOUBLE: dict[str, tuple[Callable[[Schedule], Any], str]] = {
    "copied in the layer too": (
        lambda s: without(s, "blocks.*.mlp.up", "column")["blocks.*.mlp.up"].column(),
        "the gradient of the input of blocks.0.mlp.up is summed in the layer itself (column at",
    ),
    "some of them copied in the layer too": (
        lambda s: without(s, "blocks.*.attention.{q,k,v}", "column")["blocks.*.attention.{k,v}"]
        .column(input="prepared")
        .schedule["blocks.*.attention.q"]
        .column(),
        "summed in split_column (column at",
    ),
    "copied at the norm": (lambda s: s["blocks.0.mlp.up"].sync("fwd_pre", "copy"), "the gradient that is summed in copy_to ("),
    "row and sync": (lambda s: s["blocks.0.mlp.down"].sync("fwd_post", "all_reduce"), "sums over the ranks itself (row at"),
    "reduced around": (lambda s: s["blocks.0.mlp"].sync("fwd_post", "all_reduce"), "is not a partial sum, or no longer one, so all_reduce"),
    "summed where it is complete": (lambda s: s["norm"].sum_gradients(), "of norm.weight is summed over the ranks (sum_gradients at"),
    "the same twice": (lambda s: s["blocks.0.mlp"].sync("fwd_pre", "copy"), "blocks.0.mlp: copy is written twice, at"),
}  # fmt: skip


@pytest.mark.parametrize("case", DOUBLE)
def test_e5_summed_twice(case: str) -> None:
    change, words = DOUBLE[case]
    s = toy(seq=False)
    change(s)
    refused(s, words, HERE, "E5")


def test_e6_nobody_sums_the_gradient_of_an_input() -> None:
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    words = "blocks.0.mlp.up is split by its outputs (column at schedule_toys.py:"
    refused(s, words, "s['blocks.0.mlp'].sync('fwd_pre', 'copy')", "column(input='copy')", "E6")


def test_e6_a_sync_elsewhere() -> None:
    """A sync before something else: which tensor it reaches only the dry run sees."""
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    s["norm"].sync("fwd_pre", "copy")
    refused(
        s, "blocks.0.mlp.up (Linear): split_column:", "used alike by all ranks", "blocks.0.mlp.up.weight, which is cut along dim 0", "E6"
    )


def test_e6_may_stand_at_the_norm_in_front() -> None:
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    s["blocks.*.norm2"].sync("fwd_post", "copy")
    s.check(batch())


def test_e7_whole_parameters_on_shares() -> None:
    s = without(toy(seq=True), "blocks.0", "sequence")
    s.sequence("blocks.0", "norm", inside="blocks.0.mlp")
    refused(
        s, "blocks.0.norm1.weight is whole on every rank and meets", "cut along dim 1", HERE, "s['blocks.0.norm1'].sum_gradients()", "E7"
    )
    s["blocks.0.norm{1,2}"].sum_gradients()
    s["blocks.0.attention.o"].sum_gradients("bias")
    s.check(batch())


class Packed(nn.Module):
    def __init__(self, name: str = "qkv", outputs: int = 3 * H) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(H, outputs))
        self.name, self.width = name, outputs // 3
        self.o = nn.Linear(outputs // 3, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.get_submodule(self.name)(x).split(self.width, -1)
        return self.o(q * k * v)


@pytest.mark.parametrize("name, outputs", [("fused", 48), ("qkv", 24), ("w_qkv", 48), ("q_k_v", 48)])
def test_e8_packed_projections(name: str, outputs: int) -> None:
    data = {"x": torch.zeros(B, S, H)}
    s = schedule(Packed(name, outputs), Mesh.sizes(tp=2))
    s[""].set("width", divide="tp")
    s["o"].row()
    s[name].column()
    refused(s, f"{name} has {outputs} outputs of 16 inputs", "blocks=3", HERE, "E8", data=data)
    s = without(s, name, "column")
    s[name].column(blocks=1)  # said, so the lines are believed; the dry run sees the parts
    refused(s, "the model (Packed): split:", "shard it with blocks=", HERE, "E8", data=data)
    s = without(s, name, "column")
    s[name].column(blocks=3)
    s.check(data)


def test_e8_what_is_three_times_as_wide_need_not_be_packed() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.qkv, self.down = nn.Linear(H, 3 * H), nn.Linear(H, 3 * H), nn.Linear(3 * H, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up_proj(x)) + sum(self.qkv(x).chunk(3, -1))  # type: ignore[no-any-return]

    s = schedule(Wide(), Mesh.sizes(tp=2))
    s["up_proj"].column()
    s["qkv"].column(gather=True)  # whole again where it is taken apart
    s["down"].row()
    s.check({"x": torch.zeros(B, S, H)})


@dataclass
class Made:
    loss: Tensor
    y: Tensor


class Averaged(nn.Module):
    """A dataclass of results, a running mean of activations, and torch's names for the two layers of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear1, self.linear2 = nn.Linear(H, H), nn.Linear(H, 3 * H), nn.Linear(3 * H, H)
        self.register_buffer("mean", torch.zeros(H))

    def forward(self, x: Tensor) -> Made:
        x = self.first(x)
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))  # type: ignore[operator, union-attr]
        y = self.linear2(self.linear1(x - self.mean))
        return Made(y.square().mean(), y)


def test_results_in_a_dataclass_and_buffers_that_are_written() -> None:
    data = {"x": torch.zeros(B, S, H)}
    s = schedule(Averaged(), Mesh.sizes(tp=2))
    s["linear1"].column()
    s["linear2"].row()
    s.check(data)
    s["linear2"].sync("fwd_post", "copy")
    refused(s, "result loss: is whole, with a part of its gradient", HERE, "E5", data=data)


def test_a_dim_that_is_repeated_for_the_heads_of_a_rank() -> None:
    """One key for all heads: its gradient is a part on each rank, wherever it was copied to them."""

    class OneKey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = nn.Linear(H, H), nn.Linear(H, D), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (-1, D)).transpose(1, 2)
            k = self.k(x)[:, None].expand(*q.shape)
            return self.o((q * k).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    s = schedule(OneKey(), Mesh.sizes(tp=2))
    s["q"].column()
    s["o"].row()
    data = {"x": torch.zeros(B, S, H)}
    refused(s, "the model (OneKey): expand:", "copy", "E6", data=data)
    s["k"].sync("fwd_post", "copy")
    s.check(data)


def test_e9_tied_parameters() -> None:
    s = toy(seq=False, tied=True)
    s["embed"].vocab_parallel()
    refused(s, "embed.weight and head.weight are one tied parameter", "E9")
    s["head"].vocab_parallel()
    s.check(batch())


def test_e10_split_twice_and_otherwise() -> None:
    s = toy(seq=False)
    s["blocks.0.mlp.up"].shard("weight", -2)
    refused(s, "blocks.0.mlp.up.weight is split twice, in the same way: at", HERE, "E10")
    s = toy(seq=False)
    s["blocks.0.mlp.down"].shard("weight", 0)
    s["blocks.0.mlp.down"].sync("fwd_pre", "copy")
    refused(s, "blocks.0.mlp.down.weight is split twice, along 1 and along 0: at", HERE, "E10")


def test_e10_cut_in_two_ways() -> None:
    s = without(toy(seq=True), "blocks.*.mlp.down", "row")
    s["blocks.*.mlp.down"].row("reduce_scatter", axis=0)
    s.model.eval()
    refused(
        s,
        "blocks.0 (Block): add:",
        "cut along dim 1 since",
        "reduce_scatter at blocks.0.mlp.down",
        "E10",
        data={"ids": torch.zeros(4, S, dtype=torch.long)},
    )


def test_e10_gathered_where_nothing_is_cut() -> None:
    refused(without(toy(seq=True), "blocks.0", "sequence"), "all_gather (sync at", "which is whole", ".sequence()", "E10")


def test_e11_heads_that_are_written_down() -> None:
    s = toy(seq=False, written_down=True)
    text = refused(
        s, "blocks.0.attention (Attention): view:", ".set('<attribute>', divide='tp')", "blocks.0.attention.num_heads = 4", "E11"
    )
    assert "becomes [3, 8, 4, 2]" in text  # it is no error of torch: [3, 8, 4, -1] fits a share too, and is wrong
    s["blocks.*.attention"].set("num_heads", divide="tp")
    s.check(batch())


def test_e11_positions_that_are_counted_on_a_share() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rope, self.last = nn.Identity(), Rope(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rope(self.first(x)))

    class Rope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(x.shape[1])[:, None]

    s = schedule(Counts(), Mesh.sizes(tp=2))
    s.sequence("first", "last", inside="rope")
    refused(s, "rope (Rope): arange:", "taken from a share", "E11", data={"x": torch.zeros(B, S, H, requires_grad=True)})


def test_e12_lengths_that_ranks_cannot_share() -> None:
    words = "scatter at blocks.0: dim 1 of [3, 7, 16] must be a multiple of the group's size (2); pad the batch"
    refused(toy(seq=True), words, "schedule_toys.py:", "E12", data={"ids": torch.zeros(B, 7, dtype=torch.long)})


def test_e13_inputs_and_outputs_that_are_not_there() -> None:
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    s["blocks.*.mlp"].sync("fwd_pre", "copy", arg="hidden_states")
    refused(s, "blocks.0.mlp has no input 'hidden_states': Mlp.forward takes x", HERE, "E13")
    s = toy(seq=False)
    s[""].sync("fwd_post", "copy", out="hidden")
    refused(s, "no output 'hidden'", "loss", "E13")


def test_e14_dropout_on_shares() -> None:
    s = toy(seq=False, dropout=0.1)
    report = s.check(batch())
    assert report.forks == {"blocks.0.attention": "tp"}
    assert report.warnings[0].startswith("blocks.0.attention: dropout on shares") and "(E14)" in report.warnings[0]
    assert [str(d) for d in s.directives if d.do == "rng"] == ["blocks.0.attention: rng(axis='tp')"]
    lines = list(s.directives)
    assert s.check(batch()).warnings == report.warnings and s.directives == lines  # worked out again, and not said twice
    s = toy(seq=False, dropout=0.1)
    s["blocks.0.attention"].rng("tp")
    assert s.check(batch()).warnings == []  # the schedule says it


def test_e14_a_model_that_evaluates_may_train_later() -> None:
    s = toy(seq=False, dropout=0.1)
    s.model.eval()
    assert s.check(batch()).forks == {"blocks.0.attention": "tp"}
    assert not s.model.training


def test_e14_dropout_behind_the_sum_stays_the_same_on_all_ranks() -> None:
    s = toy(seq=False, dropout=0.1)
    s.model.blocks[0].attention.o = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.1))  # type: ignore[union-attr,index]
    s = without(s, "blocks.*.attention.o", "row")
    s["blocks.*.attention.o.0"].row()
    assert s.check(batch()).forks == {"blocks.0.attention": "tp", "blocks.0.attention.o.1": "same"}


def test_e15_order() -> None:
    s = toy(1, seq=False)
    s.apply()
    for late in (lambda: s["norm"].sum_gradients(), lambda: s.check(batch()), s.apply):
        with pytest.raises(ConfigError, match=r"apply\(\)"):
            late()
    s = toy(seq=False)
    s.model.blocks[0].mlp._compiled_call_impl = print  # type: ignore[union-attr,index]  # as module.compile() leaves it
    refused(s, "column on blocks.0.mlp.up: blocks.0.mlp is compiled already (schedule_toys.py:", "apply(), torch.compile, ZeRO", "E15")


def test_e16_parameters_of_which_no_line_speaks() -> None:
    s = toy(seq=False)
    s.model.blocks[0].attention.add_module("q_norm", nn.LayerNorm(D))  # type: ignore[union-attr,index]
    words = "blocks.0.attention.q_norm (LayerNorm) has weight, bias and stands in what copy at blocks.0.attention opens"
    refused(s, words, "schedule_toys.py:", "s['blocks.0.attention.q_norm'].sum_gradients()", "E16")
    s["blocks.*.attention.q_norm"].sum_gradients()
    s.check(batch())


def test_apply_asks_the_lines_too() -> None:
    with pytest.raises(PlacementError, match="E6"):
        without(toy(seq=False), "blocks.*.mlp", "sync").apply()


def test_adjoints_are_worked_out() -> None:
    """After the first gather every rank does the same: its gradient is cut, not summed."""
    s = schedule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6)), Mesh.sizes(tp=2))
    s["0"].column()
    s["1"].sync("fwd_pre", "all_gather", axis=-1)
    assert s.check({"input": torch.zeros(3, 4)}).derived == {1: "slice"}
    assert s.directives[1].args["grad"] == "slice"


def test_adjoints_that_differ_need_a_line_each() -> None:
    s = schedule(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), Mesh.sizes(tp=2))
    s["{0,2}"].column()
    s["{1,3}"].sync("fwd_pre", "all_gather", axis=-1)
    s["3"].column(input="prepared", gather=True)
    with pytest.raises(PlacementError, match=r"needs grad='slice' at 1.*and grad='reduce_scatter' at 3.*write a line for each"):
        s.check({"input": torch.zeros(3, 8)})


def test_a_function_that_is_not_known_is_asked_about() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.renorm(x, 2, 0, 1.0)

    def model() -> Schedule:
        s = schedule(nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 4)), Mesh.sizes(tp=2))
        s["0"].column()
        s["2"].row()
        return s

    data = {"input": torch.zeros(3, 8)}
    refused(model(), "1 (Odd): renorm: it is not known what this does to shares", HERE, "teach('renorm', rule)", data=data)
    teach("renorm", lambda step: step.operands()[0].placement)
    try:
        model().check(data)
    finally:
        del RULES["renorm"]


def test_a_function_of_autograd_is_asked_about() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 2

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x) + 1

    s = schedule(nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 4)), Mesh.sizes(tp=2))
    s["0"].column()
    s["2"].row()
    refused(s, "1 (Odd)", "TwiceBackward", "in which the dry run cannot look", data={"input": torch.zeros(3, 8)})


def test_a_model_without_weights_is_enough() -> None:
    with torch.device("meta"):
        s = toy(seq=None)
        s.model.to_empty(device="meta")
    write(s, seq=True).check(batch())
    assert all(p.is_meta for p in s.model.parameters())


def test_functions_of_ones_own_say_what_they_do() -> None:
    def with_own(layouts: str | None) -> Schedule:
        s = schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), Mesh.sizes(tp=2))
        s["0"].column()
        s["1"].sync("fwd_pre", lambda x, group: x, layouts=layouts)
        return s

    data = {"input": torch.zeros(3, 8)}
    refused(with_own(None), "1 (Linear): own_exchange: sync with a function", HERE, "give it as layouts='S(1)->R'", data=data)
    refused(with_own("P->I"), "a tensor of placement P is expected", "cut along dim 1", HERE, data=data)
    refused(with_own("S(-1)->R"), "1.weight is whole on every rank", "E7", data=data)
    with_own("S(-1)->I").check(data)


class Flat(nn.Module):
    """OPT's way: the MLP sees a list of tokens."""

    def __init__(self, *, scale: bool = False) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = nn.Identity(), nn.Linear(H, 8), nn.Linear(8, H), nn.Identity()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.relu(self.up(x.reshape(-1, H)))
        if self.scale:
            y = y * torch.arange(len(y))[:, None]
        return self.last(x + self.down(y).view(x.shape))


def test_a_flattened_batch_may_be_gathered_out_of_order() -> None:
    data = {"x": torch.zeros(B, S, H, requires_grad=True)}
    for scale in (False, True):
        s = schedule(Flat(scale=scale), Mesh.sizes(tp=2))
        s.sequence("first", "last", inside="first")
        s["up"].sync("fwd_pre", "all_gather", axis=0).column(input="prepared")
        s["down"].row("reduce_scatter", axis=0)
        s["down"].sum_gradients("bias")
        if scale:
            refused(s, "the model (Flat): mul:", "out of order", "E10", data=data)
        else:
            assert s.check(data).derived == {1: "reduce_scatter"}
