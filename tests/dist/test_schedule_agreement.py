"""check(), verify() and apply() give one answer, whatever is asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.schedule_agreement import Case, everything, left_out, one_of_each, run_cases

SAMPLE = [
    Case("hand", "StableLm", (4, 2), sets=True),  # heads that a line divides are counted before it does
    Case("hand", "VisualBert", (6, 6), sets=True),
    Case("auto", "gpt2", (3, 3)),
    Case("plan", "Gemma2", without=1),  # sizes that do not fit because of a line that is missing
]


def test_a_sample_has_one_answer(tmp_path: Path) -> None:
    run_cases(tmp_path, 2, SAMPLE)


@pytest.mark.long
@pytest.mark.timeout(7200)  # a quarter of an hour where nothing else runs
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_have_one_answer(tmp_path: Path, ranks: int) -> None:
    cases = list(everything())
    run_cases(tmp_path, ranks, cases if ranks == 2 else cases[:: ranks + 1])


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_one_answer_whichever_line_is_missing(tmp_path: Path) -> None:
    run_cases(tmp_path, 2, list(left_out(one_of_each())))
