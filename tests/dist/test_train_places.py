"""Checkpoints that are links, that are gone, or that cannot be loaded: said by name, and never a fresh start without a word."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.training import records, saved_steps, status, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(folder, "--save", folder / "run", "--save-interval", 2, "--keep-last", 3).expect(0)
    return folder / "run"


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def link_out(run: Path, step: int) -> Path:
    """The step's folder elsewhere, and a link to it in its place."""
    path = run / "checkpoints" / f"step-{step:06d}"
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    return path


@pytest.mark.parametrize("flags", [("--auto-resume",), ("--load", "run"), ()])
def test_a_step_folder_that_is_a_link(run: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """An older one in its place would lose steps; and a save would rename or delete what is not in the run."""
    link = link_out(run, 6)
    outcome = train(tmp_path, "--save", run, *flags, ranks=2).expect(3, f"{link} is a symbolic link")
    assert outcome.text.count("error: ") == 1 and "Traceback" not in outcome.text
    assert link.is_symlink() and (tmp_path / "elsewhere" / "MANIFEST.json").exists()


def test_a_link_that_is_loaded(run: Path, tmp_path: Path) -> None:
    link, flags = link_out(run, 6), ("--finetune", "--train-iters", 1)
    train(tmp_path, "--load", run, *flags).expect(3, f"{link} is a symbolic link")
    train(tmp_path, "--load", link, *flags).expect(3, f"{link} is a symbolic link")
    train(tmp_path, "--load", run, "--ckpt-step", 6, *flags).expect(3, f"{link} is a symbolic link")
    train(tmp_path, "--load", run, "--ckpt-step", 4, *flags).expect(0, "step-000004")


@pytest.mark.often("flags0-folder", "flags1-steps")
@pytest.mark.parametrize("gone", ["folder", "steps"])
@pytest.mark.parametrize("flags", [("--auto-resume",), ()])
def test_checkpoints_that_are_gone(run: Path, tmp_path: Path, gone: str, flags: tuple[str, ...]) -> None:
    """A disk that is not mounted; twice, for the first attempt must not make it forgotten."""
    shutil.rmtree(run / "checkpoints")
    if gone == "steps":
        (run / "checkpoints").mkdir()
    for _ in range(2):
        words = "holds no step" if gone == "steps" else "is missing"
        train(tmp_path, "--save", run, *flags, ranks=2).expect(3, "says that step 6 was saved", words, "delete run_status.json")
    assert len(records(run)) == 6 and status(run)["saved_step"] == 6
    (run / "run_status.json").unlink()
    train(tmp_path, "--save", run, *flags).expect(0)


def test_a_saved_step_stays_known_while_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    flags = ("--auto-resume", "--train-iters", 7, "--override-opt-param-scheduler", "--exit-interval", 1)
    train(tmp_path, "--save", run, *flags, fault="kill:rank=0:at=step.forward:step=7")
    assert status(run)["status"] == "running" and status(run)["saved_step"] == 6


def test_only_steps_that_can_be_loaded_are_recommended(run: Path, tmp_path: Path) -> None:
    newest, older = run / "checkpoints" / "step-000006", run / "checkpoints" / "step-000002"
    name = next(n for n in os.listdir(newest) if n.endswith(".safetensors"))
    os.truncate(newest / name, 10)
    (older / "MANIFEST.json").unlink()
    outcome = train(tmp_path, "--save", run, "--auto-resume").expect(3, "--resume-fallback", "--ckpt-step N to choose one of 4, ")
    assert "2, 4" not in outcome.text
    train(tmp_path, "--save", run, "--auto-resume", "--ckpt-step", 5).expect(3, "it has the steps 4")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    outcome = train(tmp_path, "--save", run, "--auto-resume").expect(3, "Those beside it are not complete either.")
    assert "--ckpt-step N" not in outcome.text and saved_steps(run) == [2, 6]


def test_a_status_of_no_sense_is_no_saved_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for text in ("[" * 100_000, json.dumps({"saved_step": "6"})):
        (run / "run_status.json").write_text(text)
        train(tmp_path, "--save", run, "--train-iters", 1).expect(0)
        shutil.rmtree(run / "checkpoints")
