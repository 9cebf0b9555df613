"""The report of runs that took place: an interruption, exchanges, predictions, and a run that goes on."""

from __future__ import annotations

from pathlib import Path

from support.training import train

from megatron_sp.ops import availability
from megatron_sp.report.page import figures, page, state_of
from megatron_sp.report.reading import read_run
from megatron_sp.report.run_history import are_equal
from megatron_sp.report.time_use import time_line, totals

PARTS = ("overview", "curves", "time", "prediction", "exchanges", "environment", "configuration")


def without_pictures(rank: int) -> None:
    """matplotlib takes seconds to load."""
    availability.find = lambda name: availability.Kernel(name, False, reason=f"{name} is not installed")  # type: ignore[assignment]


def test_an_interrupted_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--save-interval", 3, "--sp-size", 2, "--report-overlap", 2, "--train-iters", 14, "--eval-interval", 4)
    train(tmp_path, *flags, "--eval-iters", 1, ranks=2, setup=without_pictures, fault="kill:rank=1:at=step.forward:step=6")
    killed = read_run(run)
    assert figures(killed).step == 5 and killed.config["model"]["num_layers"] == 2
    assert state_of(killed, 0.0).word == "failed" and "rank 1 (pid" in state_of(killed, 0.0).why
    again = (*flags, "--eval-iters", 1, "--auto-resume", "--lr", 2e-2, "--override-opt-param-scheduler")
    train(tmp_path, *again, ranks=2, attempt=1, setup=without_pictures).expect(0)
    files = read_run(run)
    f, spans = figures(files), time_line(files.attempts)
    assert (f.step, f.train_iters, f.interruptions, f.skipped) == (14, 14, 1, 0) and files.notes == []
    equal = {step: are_equal(taken) for step, taken in files.repeated.items()}
    assert equal == {4: True, 5: False}, "the other learning rate shows from the second step on"
    sums = totals(spans)
    assert all(sums[kind] > 0 for kind in ("steps", "lost", "valid", "save", "start", "down"))
    assert abs(sum(sums.values()) - (spans[-1].end - spans[0].begin)) < 1e-6
    text = page([files], files.records[-1]["time"])
    assert all(f'id="{part}"' in text for part in PARTS) and "lr: 0.01 → 0.02" in text and "1 of 2 repeated logged steps differ" in text
    assert "numerics" not in text.split("<main>")[1].split("<script")[0]
