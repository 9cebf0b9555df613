"""Plans without runs: what a run of a layout would tell is that of the rough forms, so that a search takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_sp.config.schema import Config
from megatron_sp.estimate.rough import rough_ranks
from megatron_sp.planner.fake_run import Prediction
from megatron_sp.planner.forecast import rough_seconds
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.timeline import StepTime, TrafficPlan


def predict_roughly(config: Config, world_size: int, kind: str, machine: Machine | None = None) -> Prediction:
    """The memory of the fullest rank and the seconds of the slowest one, by the rough forms."""
    ranks = rough_ranks(config, world_size, kind)  # type: ignore[arg-type]
    memory = max((rank.plan() for rank in ranks), key=lambda plan: plan.peak)
    seconds = 0.0 if machine is None else max(rough_seconds(rank, machine) for rank in ranks)
    return Prediction(memory, TrafficPlan(()), 1, StepTime(seconds, 0, 0, 0, 0, 0, 0, 0, ()))


@contextmanager
def without_runs() -> Iterator[None]:
    """No layout is run, and a search has this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_sp.planner.fake_run.predict", predict_roughly)
        patch.setattr("megatron_sp.planner.command.num_cores", lambda: 1)
        yield
