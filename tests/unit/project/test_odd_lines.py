"""Odd command lines of every program: a message and an exit code, never a traceback, never a hang.

Another seed: ``ODD_LINES_SEED=5 pytest -m long tests/unit/project/test_odd_lines.py``; by hand
``python tests/support/odd_lines.py 5 1000``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.odd_lines import End, Line, OddLines, attempt, load_everything

SEED = int(os.environ.get("ODD_LINES_SEED", "1"))


def wrong_of(number: int, folder: Path, run: Path | None = None) -> list[str]:
    load_everything()
    lines = zip(range(number), OddLines(SEED, folder, run), strict=False)
    ends = [(line, attempt(line, folder)) for _, line in lines]
    return [f"{end.is_wrong(line)}: {line}\n{end.text[-600:]}" for line, end in ends if end.is_wrong(line)]


def test_thirty_lines(tmp_path: Path) -> None:
    assert wrong_of(30, tmp_path) == []


@pytest.mark.long
def test_a_thousand_lines_with_a_run_to_look_at(tmp_path: Path) -> None:
    run, words = tmp_path / "run", "--mock-data --vocab-size 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    made = attempt(Line("train", [*words.split(), "--train-iters", "2", "--lr", "1", "--device", "cpu", "--save", str(run)]), tmp_path)
    assert made.code == 0, made.text
    assert wrong_of(1000, tmp_path, run) == []


def test_the_same_seed_makes_the_same_lines(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second, other = (
        [str(line).replace(str(folder), "") for _, line in zip(range(50), OddLines(seed, folder), strict=False)]
        for seed, folder in ((3, tmp_path / "a"), (3, tmp_path / "b"), (4, tmp_path / "c"))
        if folder.mkdir(exist_ok=True) is None
    )
    assert first == second != other


def test_what_counts_as_wrong() -> None:
    line = Line("x.py", ["--a"])
    assert End(2, "x.py: --a is unknown").is_wrong(line) == "" and End(0, "").is_wrong(line) == ""
    assert End(2, " ").is_wrong(line) == "nothing is said"
    assert End(None, "").is_wrong(line) == "it hangs"
    assert End(1, "error").is_wrong(line) == "exit code 1" and End(1, "different").is_wrong(Line("megatron-sp", ["ckpt", "diff"])) == ""
    assert End(-11, "").is_wrong(line) == "exit code -11"
    assert End(2, "Traceback (most recent call last):\n").is_wrong(line) == "a traceback"
