"""The real launcher: restarts, signals with its grace, and exit codes that reach the shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import MOCK, TINY, assert_same_run, records, saved_steps, status, tensors, train, wait_until

pytestmark = pytest.mark.torchrun
ROOT = Path(__file__).resolve().parents[2]
FLAGS = [*TINY, *MOCK, "--distributed-timeout-minutes", "0.5"]


def start(tmp_path: Path, *flags: object, ranks: int = 2, script: str = "pretrain_gpt.py", **env: object) -> subprocess.Popen[str]:
    """scripts/launch.sh in a session of its own, its output in a file."""
    words = ["bash", str(ROOT / "scripts" / "launch.sh"), str(ranks), str(ROOT / script), *FLAGS, *map(str, flags)]
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
        code = process.wait(100)
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


def test_killed_and_restarted_without_help(tmp_path: Path) -> None:
    """One rank is killed in the first attempt: the same command finishes, with the weights of a run that was left in peace."""
    run, clean = tmp_path / "run", tmp_path / "clean"
    flags = ("--save", run, "--save-interval", 2, "--enable-fault-injection")
    code, text = launch(tmp_path, *flags, "--train-iters", 6, RESTARTS=2, MEGATRON_SP_FAULT="kill:rank=1:at=step.backward:step=5:attempt=0")
    assert code == 0, text
    assert "resumed from" in text and [r["attempt"] for r in records(run, "start")] == [0, 1]
    train(tmp_path, "--save", clean, "--save-interval", 2, ranks=2).expect(0)
    assert_same_run(run, clean)


def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """It is passed on; the run saves within the grace, the shell sees 75, and the same command goes on exactly."""
    run = tmp_path / "run"
    flags = ("--save", run, "--auto-resume", "--lr-decay-iters", 4)
    process = start(tmp_path, *flags, "--train-iters", 5000)
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2, 60)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, (tmp_path / "output.txt").read_text()
    assert time.monotonic() - began < 25
    assert status(run)["status"] == "preempted" and len(saved_steps(run)) == 1
    assert all(gone(pid) for pid in status(run)["pids"]), "no orphan is left"
    step = saved_steps(run)[0]
    more = ("--lr-decay-iters", 4, "--override-opt-param-scheduler", "--train-iters", step + 1)
    train(tmp_path, "--save", run, "--auto-resume", *more, ranks=2).expect(0)
    train(tmp_path, "--save", tmp_path / "whole", *more, ranks=2).expect(0)
    assert [r["loss_hex"] for r in records(run)] == [r["loss_hex"] for r in records(tmp_path / "whole")]
    assert tensors(run).keys() == tensors(tmp_path / "whole").keys()


def test_a_failure_reaches_the_shell(tmp_path: Path) -> None:
    """The code of the program, not torchrun's 1; and what an earlier launch left in the folder is not taken for this one's."""
    run = tmp_path / "run"
    fault = {"MEGATRON_SP_FAULT": "nan:at=loss"}
    flags = ("--save", run, "--train-iters", 6, "--max-bad-steps", 1, "--enable-fault-injection")
    code, text = launch(tmp_path, *flags, **fault)
    assert code == 5 and "2 non-finite steps in a row" in text.splitlines()[-1], text
    code, text = launch(tmp_path, *flags, "--enable-fault-injection", "--profile", "--profile-ranks", 7)
    assert code == 2 and "profile_ranks names rank 7" in text, text


def test_mistakes_are_answered_before_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run_status.json").write_text(json.dumps({"status": "preempted", "exit_code": 75, "message": "old"}))
    began = time.monotonic()
    code, text = launch(tmp_path, "--save", run, "--train-iters", 6, "--num-layer", 3)
    assert code == 2 and "--num-layers" in text and "torch.distributed" not in text, text
    assert time.monotonic() - began < 5
    assert launch(tmp_path, "--save", run, "--train-iters", 6, "--global-batch-size", 5)[0] == 2, "two ranks do not divide 5"


def test_a_missing_checkpoint_reaches_the_shell(tmp_path: Path) -> None:
    code, text = launch(tmp_path, "--save", tmp_path / "run", "--load", tmp_path / "absent", "--train-iters", 6, ranks=1)
    assert code == 3 and f"there is no {tmp_path}/absent" in text.splitlines()[-1], text


def test_all_ranks_killed_is_not_an_old_result(tmp_path: Path) -> None:
    """The folder says "preempted" from the launch before; this one died without a word, and that must not read as 75."""
    run = tmp_path / "run"
    train(tmp_path, "--save", run, fault="sigterm:at=step.forward:step=2").expect(75)
    flags = ("--save", run, "--auto-resume", "--train-iters", 6, "--enable-fault-injection")
    code, text = launch(tmp_path, *flags, ranks=1, MEGATRON_SP_FAULT="kill:at=step.forward:step=4")
    assert code == 1, text


def test_usage(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(ROOT / "scripts" / "launch.sh"), "2"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr
