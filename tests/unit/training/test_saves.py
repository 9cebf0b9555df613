"""--save-interval auto: the formula, its bounds, and when a save is due."""

from __future__ import annotations

import pytest

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import CheckpointConfig, Config
from megatron_sp.training import saves
from megatron_sp.training.saves import SaveInterval, best_interval_s
from megatron_sp.utils.errors import ConfigError

FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 6 --lr 1 --mock-data"


def config(*words: str) -> Config:
    return config_from_args([*FLAGS.split(), "--vocab-size", "60", *words], world_size=1)


def lost_share(interval: float, stall: float, failure: float) -> float:
    """Of the time: saves, and half an interval for every failure (first order)."""
    return stall / interval + interval / 2 / failure


@pytest.mark.parametrize("stall, failure", [(0.1, 86400.0), (3.0, 10_000.0), (60.0, 3600.0)])
def test_no_other_interval_loses_less(stall: float, failure: float) -> None:
    best = best_interval_s(stall, failure)
    at = {factor: lost_share(factor * best, stall, failure) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)}
    assert min(at, key=at.__getitem__) == 1.0
    assert best_interval_s(3 * failure, failure) == failure


def auto(stored: object = None, hours: float = 1.0, start: int = 0, world_size: int = 1) -> SaveInterval:
    return SaveInterval(
        CheckpointConfig(save_interval="auto", mean_time_between_failures_hours=hours), world_size, SINGLE_RANK, start, stored
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "gather_json", lambda mine, group: [mine, [2 * mine[0], mine[1], mine[2]]])  # a slower rank


def steps_of(interval: SaveInterval, seconds: float, monkeypatch: pytest.MonkeyPatch, count: int = 11) -> None:
    now = [100.0]
    monkeypatch.setattr(saves.time, "monotonic", lambda: now[0])
    for _ in range(count):
        interval.step_begins()
        now[0] += seconds


def test_from_measurement_to_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = auto()
    assert interval.steps is None and interval.state() is None
    assert [step for step in range(1, 12) if interval.is_due(step)] == [10, 11]
    steps_of(interval, 0.5, monkeypatch)
    said = interval.saved(10, 0.25, 0.0)
    assert interval.steps == round(best_interval_s(0.5, 3600) / 0.5), "the slowest rank counts"
    assert said is not None and f"every {interval.steps} steps" in said and "0.5 s" in said and "1 h" in said
    assert not interval.is_due(10 + interval.steps - 1) and interval.is_due(10 + interval.steps)
    assert interval.saved(10 + interval.steps, 0.26, 1.0) is None, "hardly another: not said again"
    again = auto(interval.state(), start=7)
    assert again.steps == interval.steps and not again.is_due(6 + interval.steps) and again.is_due(7 + interval.steps)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = auto(hours=1e6)
    steps_of(interval, 2.0, monkeypatch)
    assert "the longest that it may be" in str(interval.saved(10, 5.0, 0.0)) and interval.steps == 1800
    interval = auto(hours=0.001)
    steps_of(interval, 0.125, monkeypatch)
    assert "would wait for the one before" in str(interval.saved(10, 0.001, 60.0)) and interval.steps == 600
    interval = auto(hours=0.001)
    steps_of(interval, 50.0, monkeypatch)
    interval.saved(10, 0.001, 0.0)
    assert interval.steps == 1
    assert auto().saved(1, 1.0, 0.0) is None, "no step has been measured"


@pytest.mark.parametrize("stored", [None, 3, {}, {"steps": 0}, {"steps": "x"}, {"steps": True}, {"steps": 2.5}])
def test_a_stored_interval_without_sense_is_measured_again(stored: object) -> None:
    assert auto(stored).steps is None


def test_a_number_is_a_number_of_steps() -> None:
    interval = SaveInterval(CheckpointConfig(save_interval=3), 1, SINGLE_RANK, 2)
    assert [step for step in range(1, 10) if interval.is_due(step)] == [3, 6, 9]
    assert interval.saved(3, 1.0, 1.0) is None and interval.state() is None
    assert not SaveInterval(CheckpointConfig(), 1, SINGLE_RANK, 0).is_due(5)


def test_the_flags() -> None:
    assert config("--save", "x", "--save-interval", "auto").checkpoint.save_interval == "auto"
    assert config("--save", "x", "--save-interval", "5").checkpoint.save_interval == 5
    made = config("--save", "x", "--save-interval", "AUTO", "--mean-time-between-failures-hours", "3")
    again, _ = Config.from_dict(made.to_dict())
    assert again.checkpoint == made.checkpoint
    for words, text in (
        (("--save", "x", "--save-interval", "often"), "an integer or auto"),
        (("--save", "x", "--save-interval", "-1"), "must be at least"),
        (("--save", "x", "--save-interval", "5", "--mean-time-between-failures-hours", "3"), "needs --save-interval auto"),
        (("--save", "x", "--save-interval", "auto", "--mean-time-between-failures-hours", "0"), "must be at least"),
    ):
        with pytest.raises(ConfigError, match=text):
            config(*words)
