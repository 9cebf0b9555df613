"""Stopping on purpose: signals, --kill-switch-path, --exit-interval, --exit-duration-in-mins; what is saved, said and returned."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.training import Outcome, assert_same_run, records, saved_steps, status, train
from support.waiting import wait_until

from megatron_sp.training import loop, saves, signals

LONG = ("--train-iters", 100_000, "--override-opt-param-scheduler")


def after_steps(run: Path, count: int, act: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
    """For ``during``: act once so many steps are in the log."""

    def wait(pids: list[int]) -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= count)
        act(pids)

    return wait


def stopped_at(outcome: Outcome) -> int:
    line = next(line for line in outcome.texts[0].splitlines() if line.startswith("stopped at step "))
    return int(line.split()[3].rstrip(":"))


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    act = after_steps(run, 2, lambda pids: os.kill(pids[1], signal.SIGTERM))
    outcome = train(tmp_path, "--save", run, *LONG, ranks=2, during=act).expect(75, "a signal asked for it")
    assert "stop requested" in outcome.texts[1] and "stop requested" not in outcome.texts[0]
    step = stopped_at(outcome)
    assert 2 <= step < 100_000 and saved_steps(run) == [step] and f"saved step {step}" in outcome.text
    assert (status(run)["status"], status(run)["exit_code"], status(run)["saved_step"]) == ("preempted", 75, step)
    assert not (run / "LOCK").exists()
    more = ("--train-iters", step + 2, "--override-opt-param-scheduler")
    train(tmp_path, "--save", run, "--auto-resume", *more, ranks=2).expect(0)
    train(tmp_path, "--save", whole, *more, ranks=2).expect(0)
    assert_same_run(run, whole)


def test_a_second_signal_does_not_break_off_the_save(tmp_path: Path) -> None:
    """A user presses Ctrl-C again because nothing seems to happen."""
    run = tmp_path / "run"

    def slow_to_save(rank: int) -> None:
        class Slow(saves.Saves):
            def save_last(self) -> None:
                Path("saving").touch()
                wait_until(Path("told").exists)
                super().save_last()

        signals._ECHO_SECONDS = 0.0
        saves.Saves = Slow  # type: ignore[misc]

    def act(pids: list[int]) -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
        os.kill(pids[0], signal.SIGINT)
        wait_until((tmp_path / "saving").exists)
        os.kill(pids[0], signal.SIGINT)
        wait_until(lambda: "under way and goes on" in "".join(f.read_text() for f in tmp_path.glob("rank0-*.txt")))
        (tmp_path / "told").touch()

    train(tmp_path, "--save", run, *LONG, setup=slow_to_save, during=act).expect(75, "saved step", "a signal asked for it")


def test_a_signal_during_a_save_takes_no_further_step(tmp_path: Path) -> None:
    """The grace of a scheduler is short: what has just been saved need not be saved again one step later."""
    run = tmp_path / "run"
    flags = ("--save", run, "--save-interval", 2, "--no-async-save")
    outcome = train(tmp_path, *flags, ranks=2, fault="sigterm:rank=1:at=save.shard:step=4").expect(75)
    assert stopped_at(outcome) == 4 and saved_steps(run) == [2, 4] and outcome.text.count("saved step 4") == 1
    assert status(run)["status"] == "preempted"


def slow_evaluation(rank: int) -> None:
    """Every validation batch takes 50 ms; rank 1 gets a signal in the third."""
    original, calls = loop.evaluate_batches, []

    def evaluate(*args: object) -> object:
        calls.append(1)
        time.sleep(0.05)
        if rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)  # type: ignore[arg-type]

    loop.evaluate_batches = evaluate  # type: ignore[assignment]


def test_a_signal_during_validation_breaks_it_off(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, "--eval-iters", 100, "--eval-interval", 2, ranks=2, setup=slow_evaluation).expect(75)
    assert outcome.text.count("interrupted by a signal") == 1 and saved_steps(run) == [2]
    assert records(run, "valid") == [], "half a validation is none"
    assert status(run)["status"] == "preempted"


def test_a_signal_while_starting_up(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        original = loop.prepare

        def prepare(*given: Any) -> loop.Run:
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*given)

        loop.prepare = prepare

    train(tmp_path, "--save", run, setup=setup, ranks=2).expect(75, "stopped at step 1: a signal")
    assert saved_steps(run) == [1]


def test_no_exit_signal_handler_dies_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, "--no-exit-signal-handler", fault="sigterm:at=step.forward:step=2")
    assert outcome.codes == [-signal.SIGTERM] and saved_steps(run) == []


def test_a_kill_switch_stops_all_ranks_and_keeps_them_from_starting(tmp_path: Path) -> None:
    run, switch = tmp_path / "run", tmp_path / "stop"
    words = ("--save", run, *LONG, "--kill-switch-path", switch)
    outcome = train(tmp_path, *words, ranks=2, during=after_steps(run, 2, lambda _: switch.touch()))
    outcome.expect(75, "the file of --kill-switch-path is there; when the file is removed, the same command")
    step = stopped_at(outcome)
    assert saved_steps(run) == [step] and status(run)["status"] == "preempted"
    train(tmp_path, *words, "--auto-resume", ranks=2).expect(2, f"--kill-switch-path {switch}: the file is there, so nothing starts")
    assert saved_steps(run) == [step] and status(run)["status"] == "preempted"


def test_exit_duration_is_agreed_on(tmp_path: Path) -> None:
    """The clock of one rank is ahead: both stop after the same step."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        original = loop.prepare

        def prepare(context: loop.RunContext, *rest: Any) -> loop.Run:
            return original(replace(context, started=context.started - 3600 * rank), *rest)

        loop.prepare = prepare

    outcome = train(tmp_path, "--save", run, "--exit-duration-in-mins", 50, ranks=2, setup=setup)
    outcome.expect(0, "stopped at step 1: --exit-duration-in-mins")
    assert saved_steps(run) == [1] and status(run)["exit_code"] == 0
