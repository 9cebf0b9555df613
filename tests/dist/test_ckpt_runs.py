"""``megatron-sp ckpt`` on checkpoints that training wrote, and training on what it made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.training import NO_DROPOUT, assert_same_tensors, tensors, train

from megatron_sp.commands import cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4 of a run on two ranks: ranges of bf16 parameters of one, and their unrounded weights."""
    folder = tmp_path_factory.mktemp("ckpt")
    flags = ("--save-interval", 2, "--train-iters", 4, "--bf16", "--zero-stage", 2, "--sequence-parallel-size", 2)
    train(folder, "--save", folder / "run", *flags, ranks=2).expect(0)
    return folder / "run"


def test_it_is_sound_in_depth(run: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "verify", str(run), "--all", "--deep"]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    assert cli.main(["ckpt", "ls", str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [c["step"] for c in found["checkpoints"]] == [2, 4] and found["resume"] == found["latest"] == 4
    assert found["checkpoints"][1]["layout"] == {"world_size": 2, "dp": 1, "cp": 1, "sp": 2, "tp": 1, "tp_seq": False, "zero_stage": 2}
    assert 3.0 < found["checkpoints"][0]["loss"] < 5.0


def test_a_merged_checkpoint_goes_on_to_the_same_bits(run: Path, tmp_path: Path) -> None:
    """From the merged one and from the original: the same weights after two more steps, by one rank; and the same again by --finetune."""
    assert cli.main(["ckpt", "merge", str(run), "--output", str(tmp_path / "one")]) == 0
    assert cli.main(["ckpt", "diff", str(run), str(tmp_path / "one")]) == 0
    flags = ("--bf16", "--train-iters", 6, "--override-opt-param-scheduler", *NO_DROPOUT)
    for name, source in (("a", run), ("b", tmp_path / "one")):
        train(tmp_path, "--load", source, "--save", tmp_path / name, *flags).expect(0, "resumed from")
    assert_same_tensors(tensors(tmp_path / "b"), tensors(tmp_path / "a"))


def test_weights_alone_are_enough_to_finetune(run: Path, tmp_path: Path) -> None:
    assert cli.main(["ckpt", "merge", str(run), "--output", str(tmp_path / "w"), "--weights-only", "--dtype", "fp32"]) == 0
    train(tmp_path, "--load", tmp_path / "w", "--train-iters", 6).expect(3, "has no optimizer state")
    train(tmp_path, "--load", tmp_path / "w", "--finetune", "--train-iters", 1, ranks=2).expect(0, "finetuning from")


def test_a_pruned_run_goes_on(run: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert cli.main(["ckpt", "prune", str(tmp_path / "run"), "--keep-last", "1"]) == 0
    assert capsys.readouterr().out.count("deleted") == 1
    train(tmp_path, "--save", tmp_path / "run", "--auto-resume", "--bf16", "--train-iters", 4).expect(0, "resumed from")
