"""``megatron-sp ckpt prune``: what goes, what never does, and that no job is disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import ckpts

from megatron_sp.checkpoint import commit
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.commands import cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ckpts.save(tmp_path / "run", 2, 4, 6, 8, 10, tensors={"w": torch.ones(100)}, state={})
    return tmp_path / "run"


def folders(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir() if p.name != "latest")


def steps(*numbers: int) -> list[str]:
    return [commit.step_name(n) for n in numbers]


def prune(capsys: Capture, run: Path, *words: object) -> tuple[int, str, str]:
    code = cli.main(["ckpt", "prune", str(run), *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def damage(run: Path, step: int) -> None:
    ckpts.flip(run / "checkpoints" / commit.step_name(step) / "rank00000-00000.safetensors")


def test_old_steps_go(run: Path, capsys: Capture) -> None:
    size = sum(f.stat().st_size for f in (run / "checkpoints" / "step-000002").iterdir())
    code, out, _ = prune(capsys, run, "--keep-last", 2, "--keep-every", 4, "--dry-run")
    assert code == 0 and folders(run) == steps(2, 4, 6, 8, 10)
    told = out
    code, out, err = prune(capsys, run, "--keep-last", 2, "--keep-every", 4)
    assert code == 0 and folders(run) == steps(4, 8, 10) and err == ""
    assert out.splitlines()[0] == f"deleted {run}/checkpoints/step-000002 ({size / 1024:.1f} KiB)"
    assert out.splitlines()[-1].startswith("freed ") and told == out.replace("deleted", "would delete").replace("freed", "would free")
    assert not (run / "LOCK").exists()
    assert prune(capsys, run / "checkpoints", "--keep-last", 1)[0] == 0 and folders(run) == steps(10)
    assert "no step to delete: 1 sound checkpoint of the 1 to keep" in prune(capsys, run, "--keep-last", 1)[1]


def test_a_damaged_one_does_not_count_as_kept(run: Path, capsys: Capture) -> None:
    """One bit: the sizes are right, so only reading it tells."""
    damage(run, 10)
    damage(run, 6)
    code, _, err = prune(capsys, run, "--keep-last", 2)
    assert code == 0 and folders(run) == steps(4, 6, 8, 10)  # 4 and 8 are the two sound ones
    assert err.count("does not count as kept") == 2 and "step-000010 is damaged" in err and "step-000006 is damaged" in err
    damage(run, 4)
    damage(run, 8)
    code, out, _ = prune(capsys, run, "--keep-last", 1)
    assert code == 0 and "no step to delete: 0 sound checkpoints" in out and len(folders(run)) == 4


def test_a_job_that_writes_is_not_disturbed(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "step-000012.part-00ff").mkdir()
    with RunLock(run):
        code, out, err = prune(capsys, run, "--keep-last", 1, "--leftovers")
        assert code == 8 and f"is in use by pid {os.getpid()}" in err and out == ""
        assert len(folders(run)) == 6
        code, out, err = prune(capsys, run, "--keep-last", 1, "--dry-run")
        assert code == 0 and "a job is writing here" in err and out.count("would delete") == 4


def test_left_over_folders(run: Path, capsys: Capture) -> None:
    folder = run / "checkpoints"
    (folder / "step-000012.part-00ff").mkdir()
    (folder / "step-000010").rename(folder / "step-000010.abandoned-0a")
    (folder / "step-000004").rename(folder / "step-000004.replaced-0b")
    prune(capsys, run, "--keep-last", 1)
    assert len(folders(run)) == 4  # not without --leftovers
    code, out, _ = prune(capsys, run, "--leftovers")
    assert code == 0 and folders(run) == steps(8) and out.count("deleted") == 3
    assert "nothing is left over" in prune(capsys, run, "--leftovers")[1]


def test_links_and_files_with_such_names_are_left_alone(run: Path, tmp_path: Path, capsys: Capture) -> None:
    elsewhere, folder = tmp_path / "elsewhere", run / "checkpoints"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    (folder / "step-000012.part-00ff").symlink_to(elsewhere)
    (folder / "step-000004.abandoned-0b").write_text("notes")
    assert "nothing is left over" in prune(capsys, run, "--leftovers")[1]
    assert (elsewhere / "mine").exists() and (folder / "step-000012.part-00ff").is_symlink()
    assert (folder / "step-000004.abandoned-0b").read_text() == "notes"


def test_left_over_folders_that_may_be_all_there_is(run: Path, capsys: Capture) -> None:
    folder = run / "checkpoints"
    (folder / "step-000010").rename(folder / "step-000010.replaced-0b")
    code, _, err = prune(capsys, run, "--leftovers")
    assert code == 3 and "is newer than every step" in err and "rename it to step-000010 yourself" in err
    (folder / "step-000010.replaced-0b").rename(folder / "step-000010.abandoned-0b")
    for step in (2, 4, 6, 8):
        damage(run, step)
    code, _, err = prune(capsys, run, "--leftovers")
    assert code == 3 and "has no sound step: step-000010.abandoned-0b may hold all that is left" in err
    assert len(folders(run)) == 5


@pytest.mark.parametrize(("words", "says"), [
    ([], "nothing to delete: give --keep-last N"),
    (["--keep-last", "0"], "--keep-last (0) must be at least 1"),
    (["--keep-last", "2", "--keep-every", "0"], "--keep-every (0) must be at least 1"),
    (["--leftovers", "--keep-every", "4"], "goes with --keep-last"),
])  # fmt: skip
def test_flags_that_cannot_be(run: Path, words: list[str], says: str, capsys: Capture) -> None:
    code, _, err = prune(capsys, run, *words)
    assert code == 2 and says in err and len(folders(run)) == 5


def test_what_is_no_run(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (run / "checkpoints").rename(tmp_path / "copied")
    for path in (tmp_path / "copied", tmp_path / "copied" / "step-000010"):
        code, _, err = prune(capsys, path, "--keep-last", 1)
        assert code == 3 and f"{path} is not a run" in err


def test_a_folder_that_cannot_be_deleted(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "discard", refuse)
    code, _, err = prune(capsys, run, "--keep-last", 1)
    assert code == 6 and "not everything could be deleted: Permission denied" in err
