"""megatron_sp/report/run_history.py: what a resume undid, what was taken twice, and means over neighbours."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.report.run_history import History, are_equal, number, repetitions, replay, smoothed
from megatron_sp.utils.run_log import read_records


def records(*words: str, **more: Any) -> list[dict[str, Any]]:
    """``s2`` is a start at step 2, ``3`` the training record of step 3; each a second after the one before."""
    return [
        {"kind": "start" if w[0] == "s" else "train", "step": int(w.lstrip("s")), "time": float(i), "loss_hex": f"h{w}", **more}
        for i, w in enumerate(words)
    ]


def test_what_resumes_undid_is_kept_aside() -> None:
    history = History("x")
    replay(history, records("s0", "1", "2", "3", "s1", "2", "3", "4", "5", "s5", "6", "s2", "3"))
    assert list(history.train) == [1, 2, 3] and history.resumed == [1, 2]
    assert [[r["step"] for r in part] for part in history.undone] == [[2, 3], [3, 4, 5, 6]], "a resume at the last step undoes nothing"


def test_repetitions_are_equal_to_the_last_bit_or_not() -> None:
    found = repetitions(records("s0", "1", "2", "3", "s1", "2", "3", "4"))
    assert list(found) == [2, 3] and all(are_equal(taken) for taken in found.values())
    for field in ("loss_hex", "grad_norm_hex", "samples_sha"):
        taken = [dict(r, grad_norm_hex="g", samples_sha="s") for r in found[2]]
        taken[1][field] = "other"
        assert not are_equal(taken), field


def test_smoothed_is_the_plain_mean() -> None:
    rng = random.Random(3)
    values = [math.nan if rng.random() < 0.2 else rng.gauss(5, 2) for _ in range(300)]
    reach = 9
    for index, got in enumerate(smoothed(values, 0.03)):
        side = min(reach, index, len(values) - 1 - index)
        near = [v for v in values[index - side : index + side + 1] if math.isfinite(v)]
        assert got == pytest.approx(sum(near) / len(near)) if near else math.isnan(got)


def test_a_step_that_no_axis_has_room_for_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "step": {2**53}}}\n{{"kind": "train", "step": {2**53 - 1}}}\n')
    found, notes = read_records(tmp_path)
    assert [r["step"] for r in found] == [2**53 - 1] and "1 lines are not records" in notes[0]


@pytest.mark.parametrize(
    ("value", "expected"), [("inf", math.inf), ("-inf", -math.inf), (3, 3.0), (10**400, None), ([], None), (None, None)]
)
def test_numbers_of_a_file(value: object, expected: float | None) -> None:
    assert math.isnan(number(value)) if expected is None else number(value) == expected
