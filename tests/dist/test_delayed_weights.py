"""Gradients of weights that are computed later: during attention's last exchange (--delay-wgrad), or where a pipeline puts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.layouts import Case, Sharded, alone
from support.ranks import run_ranks
from torch import nn

from megatron_sp.comm.collectives import Handle
from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel.all_to_all import AllToAllGroup

FULL, EIGHT_HEADS = {"recompute_granularity": "full"}, {"num_attention_heads": 8}
CHUNKED = {"sp": 2, "mode": "chunked", "delay": True}


class _Events:
    """Exchanges of a backward pass as they are started and waited for, and gradients of the MLPs' weights as they are computed."""

    def __init__(self, sharded: Sharded, patch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        names = {id(p): n for n, p in sharded.model.named_parameters() if ".mlp." in n and n.endswith("weight")}
        reserve, exchange = FlatGradients.reserve, AllToAllGroup.exchange_async

        def logged_reserve(gradients: FlatGradients, param: torch.Tensor) -> Any:
            if id(param) in names:
                self.found.append(names[id(param)].split(".")[-2].removeprefix("linear_"))
            return reserve(gradients, param)

        def logged_exchange(group: AllToAllGroup, name: str, *rest: Any) -> Handle:
            handle = exchange(group, name, *rest)
            if name.startswith("d ") and group.size > 1:
                self.found.append(f"send {name}")
                wait = handle.wait

                def logged_wait() -> torch.Tensor:
                    self.found.append(f"wait {name}")
                    return wait()

                handle.wait = logged_wait  # type: ignore[method-assign]
            return handle

        patch.setattr(FlatGradients, "reserve", logged_reserve)
        patch.setattr(AllToAllGroup, "exchange_async", logged_exchange)


ORDERS = [
    (Case(sp=2, mode="split-qkv", delay=True), "send d out, wait d out, send d v, send d k, send d q, fc2, fc1, wait d v, wait d k,"
                                               " wait d q"),
    (Case(sp=2, mode="split-qkv"), "fc2, fc1, send d out, wait d out, send d v, send d k, send d q, wait d v, wait d k, wait d q"),
    (Case(**CHUNKED), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2, fc1, wait d qkv, wait d qkv"),
    (Case(**CHUNKED, kernels=FULL), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2, fc1, wait d qkv,"
                                    " wait d qkv"),
    (Case(**CHUNKED, kernels={"mlp_chunks": 3}), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc1, fc2,"
                                                " wait d qkv, wait d qkv"),
    (Case(cp=2, delay=True), "send d kv, fc2, fc1, wait d kv"),
    (Case(cp=3, delay=True), "send d kv, send d kv, wait d kv, fc2, fc1, wait d kv"),
    (Case(cp=2, sp=2, mode="split-qkv", delay=True), "send d out, wait d out, send d kv, wait d kv, send d kv, send d q, fc2, fc1,"
                                                     " wait d kv, wait d q"),
    (Case(tp=2, **CHUNKED, model=EIGHT_HEADS), "fc1, send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2,"
                                               " wait d qkv, wait d qkv"),
]  # fmt: skip


def _orders(cases: list[tuple[Case, str]]) -> None:
    for case, expected in cases:
        sharded = Sharded(case, alone(case).whole)
        with pytest.MonkeyPatch.context() as patch:
            events = _Events(sharded, patch)
            sharded.step()
        assert ", ".join(events.found) == ", ".join([expected] * tiny.LAYERS), case


@pytest.mark.parametrize("world", sorted({case.world for case, _ in ORDERS}))
def test_weights_are_computed_between_the_last_send_and_its_wait(world: int, tmp_path: Path) -> None:
    cases = [(case, expected) for case, expected in ORDERS if case.world == world]
    for case, _ in cases:
        alone(case)
    run_ranks(_orders, world, tmp_path, cases)


def gradients_of(layer: nn.Linear, **options: Any) -> FlatGradients:
    gradients = FlatGradients([FlatUnit("0", layer.named_parameters())], SINGLE_RANK, delayed=[layer.weight], **options)
    gradients.start_step()
    return gradients


@pytest.mark.parametrize("end", ["unit_done", "finish_micro_batch", "cover"])
def test_what_no_exchange_has_covered_is_written_at_the_end_of_its_unit(end: str) -> None:
    layer, written = nn.Linear(2, 3), list[str]()
    gradients = gradients_of(layer)
    assert gradients.later(layer.weight, lambda: written.append(str(torch.is_grad_enabled())))
    assert not gradients.later(layer.bias, lambda: written.append("bias")), "it is not delayed"
    assert not gradients.later(nn.Parameter(torch.zeros(1)), lambda: written.append("unknown"))
    assert written == []
    gradients.unit_done(0) if end == "unit_done" else getattr(gradients, end)()
    assert written == ["False"]
    gradients.cover()
    assert written == ["False"], "once"
    gradients.later(layer.weight, lambda: written.append("of a step that was cut short"))
    gradients.start_step()
    gradients.cover()
    assert written == ["False"]


def test_gradients_that_a_pipeline_puts_off_are_not_delayed() -> None:
    layer, written = nn.Linear(2, 3), list[str]()
    gradients = gradients_of(layer)
    gradients.put_off("W", [0])
    gradients.later(layer.weight, lambda: written.append("W"))
    gradients.cover()
    gradients.unit_done(0)
    assert written == []
    gradients.put_off(None)
    gradients.catch_up("W")
    assert written == ["W"]


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


@pytest.mark.parametrize("schedule, zero", [("1f1b", 1), ("zb1p", 0), ("zbv", 1)])
def test_blocks_are_reduced_before_the_end_of_the_step(schedule: str, zero: int, tmp_path: Path) -> None:
    case = Case(pp=2, schedule=schedule, micro_batches=3, zero=zero, model={"num_layers": 6})  # type: ignore[arg-type]
    alone(case)
    run_ranks(_reduced_in_time, 2, tmp_path, case)
