"""Two pods of a job, played by two processes with the variables that Kubeflow Trainer sets; what they start is real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import MOCK, TINY, records, status
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.long]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pods:
    """Two pods on this machine, both of which are reached at localhost."""

    def __init__(self, folder: Path, *flags: object) -> None:
        self.said = [folder / f"pod{rank}.txt" for rank in (0, 1)]
        port = free_port()
        command = ["bash", str(ROOT / "scripts/kubernetes/start.sh"), str(ROOT / "pretrain_gpt.py"), *map(str, (*TINY, *MOCK, *flags))]
        self.processes = []
        for rank in (0, 1):
            environment = os.environ | {
                "PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(port), "JOB_ID": "megatron-sp", "PYTHON": sys.executable, "RESTART_CODE": "143", "RANK": "7",
            }  # fmt: skip
            with self.said[rank].open("a") as said:
                self.processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=said))

    def codes(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.processes]

    @property
    def text(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in self.said)


def test_a_pod_that_is_told_to_stop_and_the_next_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--sequence-parallel-size", 2, "--save", run, "--auto-resume", "--train-iters", 100_000)
    pods = Pods(tmp_path, *flags)
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
    pods.processes[1].send_signal(signal.SIGTERM)  # the node of pod 1 is drained
    assert pods.codes() == [143, 143], pods.text
    assert status(run)["exit_code"] == 75 and status(run)["status"] == "preempted", pods.text
    last = records(run)[-1]["step"]
    again = Pods(tmp_path, *flags, "--exit-interval", last + 2)
    assert again.codes() == [0, 0], again.text
    assert [record["step"] for record in records(run)] == list(range(1, last + 3)), "no step twice, none left out"
