"""run_status.json: the failure of one rank is not lost to what rank 0 says at the same moment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from megatron_sp.training import setup
from megatron_sp.training.setup import RunStatus
from megatron_sp.utils.files import atomic_write_json, held_folder
from megatron_sp.utils.run_log import read_status


def opened(rank: int, folder: Path) -> RunStatus:
    status = RunStatus(rank)
    status.open(folder)
    return status


def test_a_failure_is_not_written_over(tmp_path: Path) -> None:
    ours, theirs = opened(0, tmp_path), opened(1, tmp_path)
    ours.write("running")
    theirs.write("running", step=3)  # only failures are theirs to write
    theirs.write("failed", 1, "a bug")
    ours.write("running", step=5)
    assert read_status(tmp_path)["message"] == "a bug" and ours.fields == {"step": 5}
    opened(0, tmp_path).write("running")
    assert read_status(tmp_path)["status"] == "running", "the next attempt begins anew"


def test_a_failure_while_rank_0_writes_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has looked and found no failure, and is about to write, when another process fails and says so."""
    ours, theirs, writes = opened(0, tmp_path), opened(1, tmp_path), tmp_path / "writes"
    ours.write("running")
    pid = os.fork()
    if pid == 0:
        wait_until(writes.exists)
        theirs.write("failed", 1, "a bug")
        os._exit(0)

    def write_late(path: Path, record: dict[str, Any]) -> None:
        writes.touch()
        end = time.monotonic() + 0.3  # time enough for the other to write, unless it is kept from it
        while time.monotonic() < end and read_status(tmp_path)["status"] != "failed":
            time.sleep(0.005)
        atomic_write_json(path, record)

    monkeypatch.setattr(setup, "atomic_write_json", write_late)
    ours.write("running", step=5)
    os.waitpid(pid, 0)
    assert read_status(tmp_path)["message"] == "a bug"


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with held_folder(tmp_path), held_folder(tmp_path, patience_s=0.05):
        pass
    with held_folder(tmp_path / "none"):
        pass
