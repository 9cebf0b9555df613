"""What a training says may be lost, its steps may not: a full disk, a closed pipe or a vanished terminal behind its output."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.training import records, saved_steps, status, train

from megatron_sp.commands.cli import main
from megatron_sp.data.writer import IndexedDatasetWriter

FAULTS = {"full": "No space left on device", "pipe": "Broken pipe", "terminal": "Input/output error"}


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.002)


def broken(kind: str) -> int:
    """A descriptor that nothing can be written to."""
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    ours, theirs = os.pipe() if kind == "pipe" else os.openpty()
    os.close(ours)
    return theirs


def breaks(kind: str, *numbers: int, rank: int = 0) -> Callable[[int], None]:
    def setup(own: int) -> None:
        if own == rank:
            fd = broken(kind)
            for number in numbers:
                os.dup2(fd, number)

    return setup


@pytest.mark.often("full", "pipe")
@pytest.mark.parametrize("kind", FAULTS)
def test_standard_output(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, "--save-interval", 2, ranks=2, setup=breaks(kind, 1)).expect(0)
    assert f"warning: standard output cannot be written ({FAULTS[kind]})" in outcome.texts[0] and "Traceback" not in outcome.text
    assert len(records(run)) == 6 and saved_steps(run) == [4, 6]
    assert status(run)["status"] == "done" and status(run)["exit_code"] == 0 and status(run)["lost_output"] == {"stdout": FAULTS[kind]}
    (lost,) = records(run, "lost_output")
    assert lost["stdout"] == FAULTS[kind]


@pytest.mark.often("terminal")
@pytest.mark.parametrize("kind", FAULTS)
def test_both(tmp_path: Path, kind: str) -> None:
    """Nobody can be told, but for the files."""
    run = tmp_path / "run"
    train(tmp_path, "--save", run, setup=breaks(kind, 1, 2)).expect(0)
    assert len(records(run)) == 6 and saved_steps(run) == [6] and status(run)["status"] == "done"
    assert records(run, "lost_output")[-1]["stdout"] == FAULTS[kind]


def test_a_failure_keeps_its_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run).expect(0)
    outcome = train(tmp_path, "--save", run, ranks=2, setup=breaks("full", 1, 2))
    assert outcome.codes == [3, 3]


def test_a_reader_that_leaves_in_the_middle(tmp_path: Path) -> None:
    """``| head -1``, with the reader still there at the first line."""
    run = tmp_path / "run"
    ours, theirs = os.pipe()

    def setup(_: int) -> None:
        os.close(ours)
        os.dup2(theirs, 1)

    def leave(_: list[int]) -> None:
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)

    train(tmp_path, "--save", run, "--train-iters", 20, setup=setup, during=leave).expect(0)
    assert len(records(run)) == 20 and status(run)["lost_output"] == {"stdout": "Broken pipe"}


def test_a_signal_when_nobody_listens(tmp_path: Path) -> None:
    """The handler's own words must not end the step, or the save, that they are about."""
    run = tmp_path / "run"

    def stop(pids: list[int]) -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
        os.kill(pids[0], signal.SIGTERM)

    outcome = train(tmp_path, "--save", run, "--train-iters", 5000, ranks=2, setup=breaks("terminal", 1, 2), during=stop)
    assert outcome.codes == [75, 75] and saved_steps(run) and status(run)["status"] == "preempted"


def test_a_terminal_that_goes_saves_and_stops(tmp_path: Path) -> None:
    """SIGHUP asks for a stop as SIGTERM does, unless it is ignored (nohup)."""
    run = tmp_path / "run"

    def hang_up(pids: list[int]) -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
        os.kill(pids[0], signal.SIGHUP)

    train(tmp_path, "--save", run, "--train-iters", 5000, ranks=2, during=hang_up).expect(75, "stop requested")
    assert saved_steps(run)

    def ignore(_: int) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    other = tmp_path / "other"

    def hang_up_other(pids: list[int]) -> None:
        wait_until(lambda: (other / "metrics.jsonl").exists() and len(records(other)) >= 1)
        os.kill(pids[0], signal.SIGHUP)

    train(tmp_path, "--save", other, "--train-iters", 20, during=hang_up_other, setup=ignore).expect(0)
    assert len(records(other)) == 20


@pytest.mark.often("link-metrics.jsonl", "fifo-run_status.json", "folder-metrics.jsonl")
@pytest.mark.parametrize("name", ["metrics.jsonl", "run_status.json"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_files_of_the_run_that_are_none(tmp_path: Path, name: str, kind: str) -> None:
    """No link is followed to somebody else's file, no FIFO waited for; the run goes on with a warning."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("not ours")
    path = run / name
    {"link": lambda: path.symlink_to(outside), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    why = {"link": "it is a link", "fifo": "it is a FIFO", "folder": "it is a folder"}[kind]
    train(tmp_path, "--save", run).expect(0, name, "cannot be written", why)
    assert outside.read_text() == "not ours" and saved_steps(run) == [6]
    assert {"link": path.is_symlink, "fifo": path.is_fifo, "folder": path.is_dir}[kind]()
    if name == "metrics.jsonl":
        assert "metrics.jsonl" in json.dumps(status(run)["lost_output"])


def test_settings_of_nccl_without_a_gpu_are_named(tmp_path: Path) -> None:
    """It is found out at the start, since --device auto leaves it open."""
    train(tmp_path, "--device", "auto", "--nccl-dp-ctas", 8, "--train-iters", 1).expect(
        0, "ignored: --nccl-dp-ctas (there is no GPU in this run: the ranks talk over gloo)"
    )


def test_a_mean_over_no_token_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token ends a document, and none of these has a loss: 0.0000 and a perplexity of 1 looked like a perfect model."""
    with IndexedDatasetWriter(tmp_path / "x", dtype=np.uint16) as writer:
        for _ in range(60):
            writer.add_document(np.full(40, 59))
    data = ("--data-path", tmp_path / "x", "--split", "8,1,1", "--vocab-size", 60, "--eod-mask-loss")
    flags = ("--train-iters", 2, "--eval-interval", 1, "--eval-iters", 1, "--save", tmp_path / "run")
    said = train(tmp_path, *flags, data=data).expect(0, "valid at step 1: lm loss: no loss tokens", "step 2/2 | loss: no loss tokens")
    assert said.text.count("warning: no token has a loss, so there is none to report: --eod-mask-loss masks all of them: is the id") == 4
    assert "perplexity" not in said.text and "0.0000" not in said.text
    for kind in ("train", "valid", "test"):
        assert [(r["loss"], r["loss_hex"]) for r in records(tmp_path / "run", kind)] == [(None, None)] * (2 if kind != "test" else 1)
    for words in (("summarize", "run"), ("report", "run", "-o", "run.html"), ("plot", "run", "-o", "run.png")):
        assert main([words[0], *(str(tmp_path / word) if word.startswith("run") else word for word in words[1:])]) == 0
    assert "none: no token has a loss" in capsys.readouterr().out
