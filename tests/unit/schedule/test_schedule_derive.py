"""apply() alone is what it is after check(): what lines leave open is worked out, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.schedule_toys import H, batch, toy, write
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, Schedule, plan_file, schedule
from megatron_sp.schedule.apply.ulysses_options import Options
from megatron_sp.schedule.core.placements import PlacementError
from megatron_sp.utils.errors import ConfigError


def open_toy(*, dropout: float = 0.1) -> Schedule:
    """A region that is written out, whose last norm is after an all_gather at its input: usual would be another adjoint."""
    s = write(toy(dropout=dropout), seq=True)
    s.directives = [d for d in s.directives if d.do != "sequence"]
    s["blocks.0"].sync("fwd_pre", "scatter")
    s["norm"].sync("fwd_pre", "all_gather")
    s["blocks.0.norm{1,2}"].sum_gradients()
    return s


def lines(s: Schedule) -> list[str]:
    return [str(d) for d in s.directives]


def test_both_orders_have_the_same_lines() -> None:
    checked, alone, later = open_toy(), open_toy(), open_toy()
    checked.check(batch())
    checked.apply()
    alone.apply(batch())
    later.check(batch())
    later["norm"].annotate("weight", "noted", True)
    later.apply()  # with the batch that it was checked with
    assert lines(checked) == lines(alone) == [x for x in lines(later) if "annotate" not in x]
    assert "norm: sync(mode='fwd_pre', op='all_gather', grad='slice')" in lines(alone)
    assert "blocks.*.mlp: sync(mode='fwd_pre', op='all_gather', grad='reduce_scatter')" in lines(alone)
    assert "blocks.0.attention: rng(axis='tp')" in lines(alone)


def test_what_was_worked_out_is_so_again_when_lines_change() -> None:
    s = open_toy()
    s.check(batch())
    before = lines(s)
    s.directives = [d for d in s.directives if d.on != "norm"]
    s["norm"].sync("fwd_post", "all_gather")
    s["norm"].sum_gradients()
    s.check(batch())
    assert lines(s)[-1] == before[-1] and len(lines(s)) == len(before) + 1
    assert "norm: sync(mode='fwd_post', op='all_gather', grad='slice')" in lines(s)


def test_without_a_batch_it_is_refused_with_what_to_say() -> None:
    s = open_toy()
    with pytest.raises(ConfigError) as error:
        s.apply()
    words = (
        "it was given no batch", "all_gather at blocks.*.mlp (schedule_toys.py:", "give grad='reduce_scatter'",
        "all_gather at norm (test_schedule_derive.py:", "dropout at blocks.0.attention: use .rng('tp')",
    )  # fmt: skip
    assert all(word in str(error.value) for word in words), error.value
    assert s.applied is None and "attention.q.weight" not in str(error.value)
    s.apply(guess=True)
    assert not any("rng" in line or "grad=" in line for line in lines(s))


def test_a_schedule_that_says_all_needs_no_batch() -> None:
    s = toy(seq=False, dropout=0.1)
    s["blocks.0.attention"].rng("tp")
    s.apply()
    toy(seq=False).apply()


def test_one_that_is_wrong_is_not_applied() -> None:
    s = open_toy()
    s["norm"].sum_gradients()  # used alike on all ranks
    with pytest.raises(PlacementError, match=r"sum_gradients at test_schedule_derive.py:.*E7"):
        s.apply(batch())


def test_a_rate_that_a_forward_has_written_down_is_seen() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(H, 8), nn.Linear(8, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.dropout(self.up(x), 0.1, self.training))  # type: ignore[no-any-return]

    s = schedule(Hidden(), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].row()
    s.apply({"x": torch.zeros(2, H)})
    assert lines(s)[-1] == "(the model): rng(axis='tp')"


def test_what_a_dry_run_does_not_know_is_refused_only_where_something_is_open() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(H, 8), nn.Dropout(0.1), nn.Linear(8, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.renorm(self.drop(self.up(x)), 2, 0, 1.0))  # type: ignore[no-any-return]

    data = {"x": torch.zeros(2, H)}
    s = schedule(Unknown(), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].row()
    with pytest.raises(ConfigError, match=r"not known what this does to shares.*\n  dropout at drop: use"):
        s.apply(data)
    s["drop"].rng("tp")
    s.apply(data)


def test_a_module_that_a_line_brings_is_split_once() -> None:
    s = toy()
    new = nn.Linear(H, 20)
    s["blocks.0.mlp.up"].replace(new).column()
    s["blocks.0.mlp.down"].row()
    s.check(batch())
    assert new.weight.shape == (20, H) and not new.weight.is_meta
    s.apply()
    assert new.weight.shape == (10, H)


def test_ulysses_knows_its_keywords_and_a_plan_the_same() -> None:
    with pytest.raises(ConfigError, match=r"ulysses\(\) knows no overlap=, only axis, .*; did you mean overlap_qkv\?"):
        toy().ulysses(overlap=True)
    assert {"axis", *Options.__annotations__} == set(plan_file._KEYS["ulysses"])


@pytest.mark.parametrize("size", [12, (12, 20), [12, 20]])
def test_images_of_any_sides_are_made_up_for_the_dry_run(size: Any) -> None:
    """Else apply() of a model with dropout, which is not given a batch, would refuse it."""

    class Eye(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"image_size": size, "num_channels": 3})
            self.up, self.drop, self.down = nn.Linear(12, 8), nn.Dropout(0.1), nn.Linear(8, 12)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.down(self.drop(self.up(pixel_values.transpose(2, 3))))  # type: ignore[no-any-return]

    s = schedule(Eye(), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].row()
    assert s.check().forks == {"drop": "tp"}
    s.apply()


class _Cross(nn.Module):
    """Its parent uses the weight of a layer inside, and it has two inputs, each of which meets a split layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.inside = nn.Linear(H, H), nn.Linear(H, H), nn.Module()
        self.inside.up, self.inside.gate, self.inside.down = nn.Linear(H, 8), nn.Linear(H, 8), nn.Linear(8, H)
        self.inside.forward = self.mix

    def mix(self, x: Tensor, y: Tensor) -> Tensor:
        up, gate, down = self.inside.up, self.inside.gate, self.inside.down
        return down(F.linear(x, up.weight, up.bias) * gate(y))  # type: ignore[arg-type, operator, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.first(x), self.other(x))  # type: ignore[no-any-return]


def _cross(*copied: str, input: str = "prepared") -> Schedule:
    s = schedule(_Cross(), Mesh.sizes(tp=2))
    for name in copied:
        s["inside"].sync("fwd_pre", "copy", arg=name)
    s["inside.{up,gate}"].column(input=input)
    s["inside.down"].row()
    return s


@pytest.mark.parametrize("wrong", [lambda: _cross("x"), lambda: _cross("y"), lambda: _cross(input="copy")])
def test_a_sum_that_lines_alone_do_not_miss_is_refused_when_it_is_applied(wrong: Callable[[], Schedule]) -> None:
    data = {"x": torch.zeros(2, H)}
    with pytest.raises(PlacementError, match=r"inside.*E6"):
        wrong().apply(data)
    _cross("x", "y").apply(data)


def test_without_a_dry_run_apply_says_so() -> None:
    with pytest.warns(UserWarning, match="no dry run has looked for missing sums .it was given no batch.*verify"):
        _cross("x").apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _cross("x").apply(guess=True)


def test_what_was_measured_is_believed() -> None:
    """Here the measure is another's; lines that change after it have not been measured."""
    s = _cross("x")
    s._verified = list(s.directives)
    s["first"].annotate("weight", "noted", True)
    with pytest.raises(PlacementError, match="E6"):
        s.apply({"x": torch.zeros(2, H)})
    s._verified = list(s.directives)
    s.apply({"x": torch.zeros(2, H)})
