"""Real processes to their end: every one ends with its own code, whatever threads of the backend still do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

TINY = (
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--lr", "1e-2", "--eval-iters", "0",
    "--num-threads", "1", "--device", "cpu", "--micro-batch-size", "2", "--global-batch-size", "4", "--mock-data", "--vocab-size", "60",
    "--train-iters", "3",
)  # fmt: skip
ENDS = 50
KINDS = {
    "plain": (2, ""),
    "verify sp": (2, "--verify-parallelism --sequence-parallel-size 2"),
    "verify tp": (2, "--verify-parallelism --tensor-model-parallel-size 2 --sequence-parallel"),
    "verify zero 1, sp": (4, "--verify-parallelism --zero-stage 1 --sequence-parallel-size 2 --sp-overlap-comm"),
    "zero 3, sp": (4, "--zero-stage 3 --sequence-parallel-size 2 --sp-overlap-comm"),
}


def test_a_thread_of_the_backend_that_wants_the_interpreter() -> None:
    """With the interpreter's own tear-down, such a process aborts each time."""
    command = [sys.executable, ROOT / "tests/support/backend_at_exit.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, way, "5"], **pipes) for way in ("run_main", "run_program")]  # type: ignore[call-overload]
    for process in both:
        assert (*process.communicate(), process.returncode) == ("all work is done\n", "", 5)


@pytest.mark.long
@pytest.mark.torchrun
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_ends(kind: str, tmp_path: Path) -> None:
    ranks, flags = KINDS[kind]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), ROOT / "pretrain_gpt.py"]
    command = [*launch, *TINY, *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for index in range(ENDS):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"end {index}\n{done.stdout}\n{done.stderr}"
