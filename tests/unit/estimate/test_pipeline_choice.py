"""--pipeline-schedule auto: the shortest schedule of those that take about as much memory, the same on every rank."""

from __future__ import annotations

import copy
import shlex

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import layer_costs, layers_of_stages, pipeline_plan
from megatron_sp.estimate.pipeline_choice import Tried, allowed_schedules, choose, costs_of_stages, settle_schedule, try_schedules
from megatron_sp.parallel.pipeline_plan import Costs, replay, replay_costs
from megatron_sp.planner.dry_run import dry_run

BASE = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 1000 --mock-data --lr 1e-3 --train-iters 5"
    " --micro-batch-size 1 --global-batch-size 8 --device cpu "
)
AUTO = "--pp-size 2 --pipeline-schedule auto"


def config(flags: str, layers: int = 16, world_size: int = 2) -> Config:
    return config_from_args(shlex.split(f"{BASE} --num-layers {layers} {flags}"), world_size=world_size)


def test_costs_are_flops() -> None:
    given = config("--seq-length 4096")
    forward, backward, weights, _ = layer_costs(given.model, given.kernels)
    scores = 4 * 4096 / 2 * 1024  # FLOPs of a token, half of the keys
    dense = 2 * 12 * 1024**2
    assert (forward, weights) == (1.0, pytest.approx(dense / (dense + scores)))
    assert forward + backward + weights == pytest.approx(3.0)
    again = config("--recompute-granularity full --seq-length 4096")
    assert layer_costs(again.model, again.kernels).backward == pytest.approx(backward + 1)
    some = config("--recompute-granularity full --recompute-method block --recompute-num-layers 4 --seq-length 4096")
    assert layer_costs(some.model, some.kernels).backward == pytest.approx(backward + 1 / 4)
    scores_alone = config("--recompute-granularity selective --seq-length 4096")
    assert layer_costs(scores_alone.model, scores_alone.kernels).backward == pytest.approx(backward + 1 - weights)
    stages = costs_of_stages(given.model, given.kernels, (3, 1), 2)
    assert stages[0].forward == 1.5 and stages[1].forward == 0.5
    head = 2 * 1024 * 1000 / (dense + scores)
    assert stages[1].backward == pytest.approx((backward + 3 * head) / 2)


@pytest.mark.parametrize("recompute", ["", "--recompute-granularity full", "--recompute-granularity selective"])
@pytest.mark.parametrize(("kind", "p"), [("zbv", 2), ("zbv", 4), ("zb1p", 4)])
def test_orders_follow_the_layers_own_times(kind: str, p: int, recompute: str) -> None:
    """With the same times for F, B and W, a V with recomputation takes longer than 1F1B."""
    stages = "" if kind == "zbv" else "--num-virtual-stages-per-pipeline-rank 2"
    flags = f"--seq-length 4096 --pp-size {p} --global-batch-size {4 * p} {recompute}"
    one, given = config(flags, world_size=p), config(f"{flags} --pipeline-schedule {kind} {stages}", world_size=p)
    costs = layer_costs(given.model, given.kernels)
    two = Costs(*(2 * time for time in costs))  # the layers of two stages in one
    plain, ours = (pipeline_plan(each.model, each.kernels, each.parallel, 4 * p) for each in (one, given))
    assert replay_costs(ours, costs).time < 0.96 * replay_costs(plain, two).time


def test_many_micro_batches_are_first_rounds_and_those_like_them() -> None:
    given = config("--pp-size 2 --pipeline-schedule zbv --global-batch-size 40")
    for each in allowed_schedules(given, 40):
        parallel = copy.copy(given.parallel)
        parallel.pipeline_schedule = each.kind
        plan = pipeline_plan(given.model, given.kernels, parallel, 40)
        costs = costs_of_stages(given.model, given.kernels, layers_of_stages(given.model, parallel))
        whole = replay(plan, lambda action, costs=costs: costs[action.stage].of(action.kind))  # type: ignore[misc]
        assert (each.time, each.bubble) == pytest.approx((whole.time, whole.bubble), rel=2e-2, abs=2e-3)


def test_the_shortest_that_fits_is_taken_and_the_simplest_of_equals() -> None:
    first = Tried("1f1b", 100.0, 0.2, 1000)
    assert choose([first, Tried("zb1p", 90.0, 0.1, 1200), Tried("zbv", 80.0, 0.0, 1201)]).kind == "zb1p"
    assert choose([first, Tried("zb1p", 99.5, 0.1, 900)]).kind == "1f1b"
    assert choose([first, Tried("zb1p", 95.0, 0.1, 900), Tried("zbv", 94.5, 0.1, 900)]).kind == "zb1p"


@pytest.mark.parametrize(
    ("flags", "layers", "kinds"),
    [
        ("", 16, ["1f1b", "zb1p", "interleaved", "zbv"]), ("", 3, ["1f1b", "zb1p"]),
        ("--num-virtual-stages-per-pipeline-rank 4", 16, ["zb1p", "interleaved"]),
        ("--pipeline-slices 4", 16, ["1f1b", "zb1p", "interleaved", "zbv", "slices"]),
        ("--decoder-first-pipeline-num-layers 8", 16, ["1f1b", "zb1p", "interleaved"]),
    ],
)  # fmt: skip
def test_what_is_tried_is_what_the_flags_allow(flags: str, layers: int, kinds: list[str]) -> None:
    assert [each.kind for each in try_schedules(config(f"{AUTO} {flags}", layers), 2)] == kinds


def test_a_choice_is_said_and_stays() -> None:
    given = config(AUTO)
    tried = try_schedules(given, 2)
    best = choose(tried)
    line = settle_schedule(given, 2)
    assert line.startswith(f"--pipeline-schedule auto: {best.kind}, bubble {best.bubble:.0%} (time by FLOPs, and memory: 1f1b 1.00 (")
    assert given.parallel.pipeline_schedule == best.kind != "1f1b" and settle_schedule(given, 2) == ""
    assert best.time < 0.95 * tried[0].time and best.peak <= 1.2 * tried[0].peak
    alone = config("--pipeline-schedule auto", world_size=1)
    assert settle_schedule(alone, 1) == "" and alone.parallel.pipeline_schedule is None


@pytest.mark.long
def test_a_dry_run_says_what_is_chosen() -> None:
    flags = f"{AUTO} --seq-length 64"
    text = dry_run(config(flags, layers=8), 2, "text")
    best = choose(try_schedules(config(flags, layers=8), 2))
    assert f"--pipeline-schedule auto: {best.kind}" in text and f"pp 2 ({best.kind}" in text
