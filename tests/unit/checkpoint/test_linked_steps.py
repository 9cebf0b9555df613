"""Links that have the names of step folders, to those that save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import ckpts

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.utils.errors import CheckpointError


def test_one_that_appears_while_a_run_saves_is_no_reason_to_stop(tmp_path: Path) -> None:
    """The save says why it was none, and the next step's is one."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    pieces = {name: ckpts.cut(tensor) for name, tensor in ckpts.make_tensors().items()}
    saver = Checkpointer(run)
    saver.prepare()
    elsewhere.mkdir()
    (run / "checkpoints" / "step-000004").symlink_to(elsewhere)
    report = saver.save(4, pieces, {})
    assert not report.saved and "a symbolic link has the step folder's name" in report.reason
    assert saver.save(5, pieces, {}).saved and os.listdir(elsewhere) == []
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-000004", "step-000005"]


@pytest.mark.parametrize("target", ["elsewhere", "absent", "step-000004"])
def test_one_that_is_there_is_refused_at_the_start(tmp_path: Path, target: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "elsewhere").mkdir()
    link = tmp_path / "checkpoints" / "step-000004"
    link.symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"step-000004 is a symbolic link \(to {target}\)"):
        Checkpointer(tmp_path).prepare()
    with pytest.raises(CheckpointError, match="step-000004 is a symbolic link"):
        Checkpointer(None).find(tmp_path)
    assert link.is_symlink()
