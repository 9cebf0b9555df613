"""A validation that a kill or a signal cut off is made up for: the log of a resumed run is that of one that was never cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.training import KILLED, records, run_once, saved_steps, train

FLAGS = ("--save-interval", 2, "--eval-interval", 2, "--eval-iters", 2, "--no-async-save")  # what a kill finds saved is certain
_VARIES = ("time", "seconds", "step_s", "tokens_per_s", "tflops_causal", "tflops_full", "mfu", "memory_bytes")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_once(tmp_path_factory, {"whole": (2, ())}, *FLAGS)("whole")


def log_of(run: Path) -> list[dict[str, Any]]:
    """Everything that was trained and evaluated, in order, without what differs from machine to machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in _VARIES} for r in lines if r["kind"] in ("train", "valid", "test")]


@pytest.mark.often("valid.record:step=4", "test.record:step=6")
@pytest.mark.parametrize(
    "point", ["valid.batch:step=2", "valid.record:step=4", pytest.param("valid.batch:step=6", marks=pytest.mark.long), "test.record:step=6"]
)
def test_killed_between_the_save_and_the_end_of_the_evaluation(tmp_path: Path, whole: Path, point: str) -> None:
    run, step = tmp_path / "run", int(point[-1])
    outcome = train(tmp_path, "--save", run, *FLAGS, ranks=2, fault=f"kill:rank=1:at={point}")
    assert KILLED in outcome.codes and saved_steps(run)[-1] == step
    again = train(tmp_path, "--save", run, *FLAGS, "--auto-resume", ranks=2).expect(0, f"(step {step}, ")
    assert log_of(run) == log_of(whole)
    assert ("valid at step 6: done already" in again.text) == point.startswith("test")


def test_a_signal_in_a_validation_or_before_it(tmp_path: Path, whole: Path) -> None:
    """Both stop the run at a step whose validation is still to come."""
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *FLAGS, ranks=2, fault="sigterm:rank=1:at=valid.batch:step=2").expect(75)
    train(tmp_path, "--save", run, *FLAGS, "--auto-resume", ranks=2, fault="sigterm:rank=0:at=step.forward:step=4").expect(75)
    train(tmp_path, "--save", run, *FLAGS, "--load", run, ranks=2).expect(0)
    assert log_of(run) == log_of(whole)


def test_a_signal_before_the_first_step_writes_nothing_anew(tmp_path: Path) -> None:
    """The step that the run went on from stands; a disk that has become full since is no failure."""
    run, flags = tmp_path / "run", ("--auto-resume", *FLAGS)
    train(tmp_path, "--save", run, *FLAGS, "--exit-interval", 4, "--eval-interval", 3).expect(0)
    before = (run / "checkpoints" / "step-000004").stat().st_ino
    fault = "sigterm:at=valid.batch:step=4;full:at=save.write:step=4"
    train(tmp_path, "--save", run, *flags, fault=fault).expect(75, "goes on from here")
    assert (run / "checkpoints" / "step-000004").stat().st_ino == before
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-000002", "step-000004"]
    train(tmp_path, "--save", run, *flags).expect(0)
    assert [r["step"] for r in records(run, "valid")] == [3, 4, 6] and [r["step"] for r in records(run, "save")] == [2, 4, 6]


def test_what_is_done_is_not_done_again_and_another_history_does_not_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *FLAGS).expect(0)
    train(tmp_path, "--save", run, *FLAGS, "--auto-resume").expect(
        0, "the run is complete: step 6 of 6", "valid at step 6: done already", "test at step 6: done already"
    )
    assert [r["step"] for r in records(run, "valid")] == [2, 4, 6] and len(records(run, "test")) == 1
    old = ("--load", run, "--ckpt-step", 4, "--no-load-optim")  # it goes on otherwise
    train(tmp_path, "--save", run, *FLAGS, *old, fault="kill:at=valid.batch:step=6")
    train(tmp_path, "--save", run, *FLAGS, "--auto-resume").expect(0)
    losses = {r["loss_hex"] for r in records(run, "valid") if r["step"] == 6}
    assert [r["step"] for r in records(run, "valid")] == [2, 4, 6, 6] and len(losses) == 2


def test_validation_alone_is_always_done(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *FLAGS).expect(0)
    train(tmp_path, "--save", run, *FLAGS, "--load", run, "--skip-train").expect(0, "valid at step 6: lm loss")
