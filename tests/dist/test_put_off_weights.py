"""Gradients that a pipeline puts off: their units are complete, and are reduced, as soon as the last of them is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.layouts import Case, Sharded, alone
from support.ranks import run_ranks
from torch import nn

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.gradients import FlatGradients


def test_units_are_complete_in_the_order_of_their_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, reduced, written = [nn.Linear(2, 2, bias=False) for _ in range(3)], list[int](), list[int]()
    gradients = FlatGradients([FlatUnit(str(i), layer.named_parameters()) for i, layer in enumerate(layers)], SINGLE_RANK)
    monkeypatch.setattr(gradients, "_reduce", reduced.append)
    gradients.start_step()
    gradients.last_micro_batch()
    gradients.put_off("W", [0, 1, 2])
    for index in (2, 1, 0):
        gradients.later(layers[index].weight, lambda index=index: written.append(index))
        gradients.unit_done(index)
    gradients.put_off(None)
    assert reduced == written == []
    gradients.catch_up("W")
    assert reduced == written == [2, 1, 0]


def _reduced_in_time(case: Case) -> None:
    sharded = Sharded(case, alone(case).whole)
    reduced, late = list[str](), list[str]()
    reduce, finish = FlatGradients._reduce, FlatGradients.finish_step

    def logged_reduce(gradients: FlatGradients, index: int) -> None:
        reduced.append(gradients.units[index].name)
        reduce(gradients, index)

    def logged_finish(gradients: FlatGradients) -> None:
        before = len(reduced)
        finish(gradients)
        late.extend(reduced[before:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatGradients, "_reduce", logged_reduce)
        patch.setattr(FlatGradients, "finish_step", logged_finish)
        sharded.step()
    assert [name for name in late if "layers" in name] == [], "blocks that were reduced after the step's last action"
    blocks = [unit.name for unit in sharded.units if "layers" in unit.name]
    assert sorted(name for name in reduced if "layers" in name) == sorted(blocks)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv"])
@pytest.mark.parametrize("zero", [0, 1])
def test_blocks_are_reduced_before_the_end_of_the_step(schedule: str, zero: int, tmp_path: Path) -> None:
    case = Case(pp=2, schedule=schedule, micro_batches=3, zero=zero, model={"num_layers": 6})  # type: ignore[arg-type]
    alone(case)
    run_ranks(_reduced_in_time, 2, tmp_path, case)
