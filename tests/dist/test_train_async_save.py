"""Training that goes on while it is saved: overlap, what waits for a save, what is said of one that fails, memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training import assert_same_run, records, saved_steps, state, status, train
from support.waiting import wait_until

from megatron_sp.checkpoint import safetensors_file
from megatron_sp.checkpoint.background import BackgroundSaves
from megatron_sp.checkpoint.manifest import read_manifest
from megatron_sp.config.schema import Config
from megatron_sp.data.loader import BatchLoader
from megatron_sp.estimate import suggestions as remedies
from megatron_sp.estimate.rough import copy_bytes
from megatron_sp.training import memory_estimate as foresight
from megatron_sp.utils.errors import DataError

EVERY_2 = ("--save-interval", 2)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "one process": (1, ()),
    "dp 2": (2, ()),
    "dp 2, ZeRO 1, bf16": (2, ("--zero-stage", 1, "--bf16")),
    "dp 2, ZeRO 2, bf16": (2, ("--zero-stage", 2, "--bf16")),
    "dp 2, ZeRO 3": (2, ("--zero-stage", 3)),
    "tp 2": (2, ("--tensor-model-parallel-size", 2)),
    "sp 2, offload": (2, ("--sp-size", 2, "--zero-stage", 1, "--bf16", "--offload-optimizer")),
}


def write_when(condition: Callable[[], object], step: int) -> None:
    """A rank writes the save of this step when something has happened."""
    original = safetensors_file.write_own_files

    def write(staging: Path, *rest: Any) -> dict[str, Any]:
        if staging.name.startswith(f"step-{step:06d}"):
            wait_until(condition)
        return original(staging, *rest)

    safetensors_file.write_own_files = write  # type: ignore[assignment]


def when_waited_for(step: int) -> Callable[[int], None]:
    """Each rank writes the save of this step when its training waits for it."""

    def setup(rank: int) -> None:
        waiting, original = threading.Event(), BackgroundSaves.wait

        def wait(self: BackgroundSaves, timeout_s: float | None = None) -> object:
            waiting.set()
            return original(self, timeout_s)

        BackgroundSaves.wait = wait  # type: ignore[assignment, method-assign]
        write_when(waiting.is_set, step)

    return setup


@pytest.mark.often("dp 2, ZeRO 1, bf16")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_in_the_memory_that_was_foreseen(tmp_path: Path, name: str) -> None:
    ranks, flags = LAYOUTS[name]
    waited, run = tmp_path / "waited", tmp_path / "run"

    def measure(rank: int) -> None:
        original = BackgroundSaves.reserve

        def reserve(self: BackgroundSaves, *rest: Any) -> str | None:
            problem = original(self, *rest)
            (tmp_path / f"kept-{rank}").write_text(str(self.num_bytes))
            return problem

        BackgroundSaves.reserve = reserve  # type: ignore[method-assign]

    keep = ("--keep-last", 9)
    train(tmp_path, "--save", waited, *EVERY_2, "--no-async-save", *keep, *flags, ranks=ranks).expect(0)
    train(tmp_path, "--save", run, *EVERY_2, *keep, *flags, ranks=ranks, setup=measure).expect(0, "of host memory on each rank are kept")
    assert saved_steps(run) == saved_steps(waited) == [2, 4, 6]
    for step in (2, 4, 6):
        files = [read_manifest(folder / "checkpoints" / f"step-{step:06d}").files for folder in (run, waited)]
        assert {**files[0], "state.json": None} == {**files[1], "state.json": None}
        states = [state(folder, step) for folder in (run, waited)]
        for each in states:
            del each["config"]["checkpoint"]
        assert states[0] == states[1]
    assert_same_run(run, waited)
    config, _ = Config.from_dict(state(run)["config"])
    foreseen, kept = copy_bytes(config, ranks), [int((tmp_path / f"kept-{rank}").read_text()) for rank in range(ranks)]
    assert 0.85 * max(kept) <= foreseen <= 1.2 * max(kept), (foreseen, kept)
    with_it = remedies.plan_of(config, ranks, "cpu").peak
    config.checkpoint.async_save = False
    assert copy_bytes(config, ranks) == 0 and with_it - remedies.plan_of(config, ranks, "cpu").peak == foreseen


def test_steps_are_taken_while_a_save_is_written(tmp_path: Path) -> None:
    """The save of step 2 is written when step 3 is in the log."""
    run, clean = tmp_path / "run", tmp_path / "clean"

    def setup(rank: int) -> None:
        write_when(lambda: any(r["step"] == 3 for r in records(run)), 2)

    train(tmp_path, "--save", run, *EVERY_2, ranks=2, setup=setup).expect(0, "saved step 2 in", "beside training")
    train(tmp_path, "--save", clean, *EVERY_2, "--no-async-save", ranks=2).expect(0)
    assert_same_run(run, clean)
    order = [(kind, r["step"]) for kind, r in _all_records(run) if kind in ("train", "save")]
    assert order.index(("save", 2)) > order.index(("train", 3)), "the outcome is told when it is known"
    assert all(r["background_s"] > 0 for r in records(run, "save")[:2]) and "background_s" not in records(run, "save")[2]


def _all_records(run: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(r["kind"], r) for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.often("a signal", "bad numbers")
@pytest.mark.parametrize(
    "flags, fault, code, saved",
    [
        pytest.param((), "sigterm:rank=1:at=step.forward:step=3", 75, (2, 4), id="a signal"),
        pytest.param(("--exit-interval", 3), "", 0, (2, 3), id="an exit"),
        pytest.param(("--save-interval", 1, "--train-iters", 3), "", 0, (2, 3), id="the next save"),
        pytest.param(("--train-iters", 3), "", 0, (2, 3), id="the end"),
        pytest.param(("--max-bad-steps", 0), "nan:rank=0:at=loss:step=3", 5, (2,), id="bad numbers"),
    ],
)
def test_what_ends_training_waits_for_the_save(
    tmp_path: Path, flags: tuple[object, ...], fault: str, code: int, saved: tuple[int, ...]
) -> None:
    """It is written only when somebody waits for it, so every way to end must."""
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *EVERY_2, *flags, ranks=2, fault=fault, setup=when_waited_for(2)).expect(code, "saved step 2 in")
    assert [r["step"] for r in records(run, "save")][-len(saved) :] == list(saved)
    assert 2 in saved_steps(run) and status(run)["exit_code"] == code and not list((run / "checkpoints").glob("*.part-*"))


@pytest.mark.often("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_in_the_background(tmp_path: Path, rank: int) -> None:
    """Said at the next step, the older checkpoint stays, the next save works, and the run is a success."""
    run = tmp_path / "run"
    outcome = train(
        tmp_path, "--save", run, *EVERY_2, "--train-iters", 8, ranks=2, fault=f"full:rank={rank}:at=save.write:step=4",
        setup=lambda _: write_when(lambda: any(r["step"] == 5 for r in records(run)), 4),
    ).expect(0, f"warning: step 4 was not saved: rank {rank}: No space left on device")  # fmt: skip
    assert outcome.texts[0].count("not saved") == 1 and "training goes on" in outcome.texts[0]
    assert saved_steps(run) == [6, 8] and [(r["step"], r["saved"]) for r in records(run, "save")] == [
        (2, True), (4, False), (6, True), (8, True),
    ]  # fmt: skip


def test_too_little_host_memory_means_waiting(tmp_path: Path) -> None:
    """One rank of two has too little: none saves in the background, and one line says so."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        if rank == 1:
            foresight.MemoryEstimate.spare_host_bytes = lambda *_: 1000  # type: ignore[method-assign, assignment]

    outcome = train(tmp_path, "--save", run, *EVERY_2, ranks=2, setup=setup)
    outcome.expect(0, "saving in the background is off: rank 1: the copy takes ", "training waits for each save")
    assert saved_steps(run) == [4, 6] and "beside training" not in outcome.text and outcome.text.count("is off") == 1


def test_a_rank_lost_while_the_other_saves(tmp_path: Path) -> None:
    """Rank 1 dies in a step while rank 0 still writes: the older checkpoint is the newest, and rank 0 ends soon."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        if rank == 0:
            write_when(lambda: status(run)["status"] == "failed", 4)  # never within the run

    outcome = train(tmp_path, "--save", run, *EVERY_2, ranks=2, setup=setup, fault="kill:rank=1:at=step.forward:step=5")
    assert outcome.codes == [7, -9] and "rank 1 (pid " in outcome.texts[0] and "Traceback" not in outcome.texts[0], outcome.text
    assert saved_steps(run) == [2]
    train(tmp_path, "--save", run, *EVERY_2, "--auto-resume", ranks=2).expect(0, "(step 2,", ".part-")


def test_the_failure_of_another_rank_stays_what_the_status_says(tmp_path: Path) -> None:
    """Rank 0 tells of a save when rank 1 has told already why the run ends."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        poll, step = BackgroundSaves.poll, BatchLoader.step

        def late_poll(self: BackgroundSaves) -> object:
            if self.in_flight:
                wait_until(lambda: status(run)["status"] == "failed")
                wait_until(lambda: not any(thread.name.startswith("save of step") for thread in threading.enumerate()))
            return poll(self)

        def fail(self: BatchLoader, consumed_samples: int, count: int) -> Any:
            if consumed_samples == 8:
                raise DataError("a file is cut")
            return step(self, consumed_samples, count)

        if rank == 0:
            BackgroundSaves.poll = late_poll  # type: ignore[assignment, method-assign]
        else:
            BatchLoader.step = fail  # type: ignore[method-assign]

    outcome = train(tmp_path, "--save", run, *EVERY_2, ranks=2, setup=setup)
    assert outcome.codes == [7, 4] and "saved step 2" in outcome.texts[0], outcome.text
    assert status(run) | {"status": "failed", "exit_code": 4, "message": "a file is cut"} == status(run), status(run)


def test_no_memory_is_kept_for_a_run_that_is_complete(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *EVERY_2, "--train-iters", 1).expect(0, "saving in the background: ")
    again = train(tmp_path, "--save", run, *EVERY_2, "--train-iters", 1, "--auto-resume").expect(0)
    assert "saving in the background" not in again.text


def test_the_interval_is_worked_out_agreed_on_and_kept(tmp_path: Path) -> None:
    """The first save after 10 steps; a resumed run goes on with what was decided."""
    run = tmp_path / "run"
    flags = ("--save", run, "--save-interval", "auto", "--mean-time-between-failures-hours", 100, "--keep-last", 50)
    outcome = train(tmp_path, *flags, "--train-iters", 12, ranks=2).expect(0, "--save-interval auto: every ", "one failure in 100 h")
    assert saved_steps(run)[0] == 10 and outcome.text.count("is assumed") >= 1
    decided = state(run)["save_interval"]
    assert decided["steps"] >= 1 and decided["failure_s"] == 360_000 and "save_interval" not in state(run, 10)
    more = ("--train-iters", 14, "--auto-resume", "--override-opt-param-scheduler")
    train(tmp_path, *flags, *more, ranks=2).expect(0, "resumed from")
    assert saved_steps(run)[-1] == 14
