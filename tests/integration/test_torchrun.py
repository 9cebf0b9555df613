"""The real launcher: restarts, signals with its grace, and exit codes that reach the shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import MOCK, TINY, assert_same_run, records, saved_steps, status, tensors, train
from support.waiting import NEVER_MINUTES, PATIENCE_S, wait_until

pytestmark = pytest.mark.torchrun
FLAGS = [*TINY, *MOCK, "--distributed-timeout-minutes", str(NEVER_MINUTES)]


def start(tmp_path: Path, *flags: object, ranks: int = 2, script: str | Path = "pretrain_gpt.py", **env: object) -> subprocess.Popen[str]:
    """scripts/launch.sh in a session of its own, its output in a file; ``script`` may be ``-m MODULE`` and words."""
    program = script.split() if isinstance(script, str) and script.startswith("-m ") else [str(ROOT / script)]
    words = ["bash", str(ROOT / "scripts" / "launch.sh"), str(ranks), *program, *FLAGS, *map(str, flags)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_"))}
    with open(tmp_path / "output.txt", "a") as output:
        return subprocess.Popen(
            words, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**variables, "PYTHON": sys.executable, **{k: str(v) for k, v in env.items()}},
        )  # fmt: skip


def launch(tmp_path: Path, *flags: object, **env: object) -> tuple[int, str]:
    """(exit code, output)."""
    process = start(tmp_path, *flags, **env)  # type: ignore[arg-type]
    try:
        code = process.wait(PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, (tmp_path / "output.txt").read_text()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.long
def test_a_module_is_launched_like_a_script(tmp_path: Path) -> None:
    """A mistake is answered once, before torchrun starts; --save is found among the flags for the run's status."""
    module = "-m megatron_sp pretrain gpt"
    code, text = launch(tmp_path, "--num-layer", 2, script=module)
    assert code == 2 and text.count("--num-layer is unknown") == 1 and "torch" not in text
    code, text = launch(tmp_path, "--save", tmp_path / "run", "--train-iters", 2, script=module)
    assert code == 0 and status(tmp_path / "run")["status"] == "done", text


def test_killed_and_restarted_without_help(tmp_path: Path) -> None:
    """One rank is killed in the first attempt: the same command finishes, with the weights of a run that was left in peace."""
    run, clean = tmp_path / "run", tmp_path / "clean"
    flags = ("--save", run, "--save-interval", 2, "--enable-fault-injection")
    code, text = launch(tmp_path, *flags, "--train-iters", 6, RESTARTS=2, MEGATRON_SP_FAULT="kill:rank=1:at=step.backward:step=5:attempt=0")
    assert code == 0, text
    assert "resumed from" in text and [r["attempt"] for r in records(run, "start")] == [0, 1]
    train(tmp_path, "--save", clean, "--save-interval", 2, ranks=2).expect(0)
    assert_same_run(run, clean)


@pytest.mark.long
def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """It is passed on; the run saves within the grace, the shell sees 75, and the same command goes on exactly."""
    run = tmp_path / "run"
    flags = ("--save", run, "--auto-resume", "--lr-decay-iters", 4)
    process = start(tmp_path, *flags, "--train-iters", 100_000, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=int(PATIENCE_S))
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 75, (tmp_path / "output.txt").read_text()
    assert status(run)["status"] == "preempted" and len(saved_steps(run)) == 1
    assert all(gone(pid) for pid in status(run)["pids"]), "no orphan is left"
    step = saved_steps(run)[0]
    more = ("--lr-decay-iters", 4, "--override-opt-param-scheduler", "--train-iters", step + 1)
    train(tmp_path, "--save", run, "--auto-resume", *more, ranks=2).expect(0)
    train(tmp_path, "--save", tmp_path / "whole", *more, ranks=2).expect(0)
    assert [r["loss_hex"] for r in records(run)] == [r["loss_hex"] for r in records(tmp_path / "whole")]
    assert tensors(run).keys() == tensors(tmp_path / "whole").keys()


FAKE = """#!/bin/bash
# a python whose torchrun reports and fails as torchrun does
case "$*" in
    *scripts/torchrun.py*) [ -z "$REPORT" ] || printf '%s' "$REPORT" > "$RUN/run_status.json"; exit "$ENDS" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


@pytest.mark.parametrize("report, ends, code", [
    ({"status": "done", "exit_code": 0}, 0, 0), ({"status": "failed", "exit_code": 2, "message": "m"}, 1, 2),
    ({"status": "failed", "exit_code": 3, "message": "the reason"}, 1, 3), ({"status": "failed", "exit_code": 5}, 1, 5),
    ({"status": "failed", "exit_code": 7}, 1, 7), ({"status": "preempted", "exit_code": 75}, 1, 75),
    ({"status": "running", "exit_code": None}, 1, 1), ({"status": "running", "exit_code": None}, 137, 137),
    ({"status": "done", "exit_code": 0}, 1, 1), (None, 1, 1), ({"status": "failed", "exit_code": "3"}, 1, 1),
])  # fmt: skip
def test_exit_codes_reach_the_shell(tmp_path: Path, report: dict[str, object] | None, ends: int, code: int) -> None:
    """The program's code instead of torchrun's 1; the "preempted" of an earlier launch in the same folder counts for nothing."""
    run, python = tmp_path / "run", tmp_path / "python"
    run.mkdir()
    (run / "run_status.json").write_text(json.dumps({"status": "preempted", "exit_code": 75, "message": "an old one"}))
    python.write_text(FAKE)
    python.chmod(0o755)
    text = json.dumps(report) if report else ""
    got, said = launch(
        tmp_path, f"--save={run}", script="tools/generate.py", PYTHON=python, REAL=sys.executable, RUN=run, REPORT=text, ENDS=ends
    )
    assert got == code, said
    assert "an old one" not in said
    if report and report.get("message"):
        assert f"failed (exit code {code})\n" in said, "why, the program has said"


def test_mistakes_are_answered_before_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run_status.json").write_text(json.dumps({"status": "preempted", "exit_code": 75, "message": "old"}))
    code, text = launch(tmp_path, "--save", run, "--train-iters", 6, "--num-layer", 3)
    assert code == 2 and "--num-layers" in text and "torch.distributed" not in text, text
    assert launch(tmp_path, "--save", run, "--train-iters", 6, "--global-batch-size", 5)[0] == 2, "two ranks do not divide 5"


def test_usage(tmp_path: Path) -> None:
    for words, said in (([], "usage"), (["nowhere.py", "--lr", "1"], "error: nowhere.py is not there"), ([str(tmp_path)], "is no file")):
        done = subprocess.run(["bash", str(ROOT / "scripts" / "launch.sh"), "2", *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_the_run_folder_may_stand_in_a_file(tmp_path: Path) -> None:
    """--save in --config: the program's exit code comes back as it does with --save on the command line."""
    (tmp_path / "flags.yaml").write_text(f"save: {tmp_path / 'a run'}\n")
    code, text = launch(tmp_path, "--config", tmp_path / "flags.yaml", "--train-iters", 6, "--load", tmp_path / "nothing")
    assert code == 3, text
