"""Lines about sequences are left out, doubled, moved and changed: check() refuses each, or it says the same in another way.

That the latter are equal, and what verify() says of all, is in docs/explanation/mutants_schedule.md, which
``tests/support/schedule_sp_mutants.py`` writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from support.schedule_sp_mutants import CASES, computed, is_right, judged

IDS = [f"{name}-{'tp_seq' if seq else 'sp'}" for name, seq in CASES]


def wrong(name: str, seq: bool, take: slice = slice(None)) -> set[str]:
    """Mutants that pass, and are no other way to say the same, and those that are and do not pass."""
    # a region sums the gradients of norms inside of attention, of which a line has to speak nevertheless (E16)
    found = {what: answer for what, answer in judged(name, seq, take).items() if not (seq and answer == "E16")}
    return {what for what, answer in found.items() if bool(answer) == is_right(name, seq, what)}


@pytest.mark.parametrize(
    "name, seq, take",
    [
        ("core", False, slice(0, None, 3)),
        ("llama", False, slice(2, None, 7)),
        ("bert", True, slice(4, None, 17)),
        ("llama", True, slice(26, 27)),  # inputs and labels are cut, and the table is split by words
    ],
)
def test_some_mutants(name: str, seq: bool, take: slice) -> None:
    assert not wrong(name, seq, take)


@pytest.mark.long
@pytest.mark.parametrize("name, seq", CASES, ids=IDS)
def test_no_mutant_passes(name: str, seq: bool) -> None:
    assert not wrong(name, seq)


@pytest.mark.long
@pytest.mark.parametrize("name", [f"{name}+overlap" for name in ("bert", "roberta", "llama", "mistral", "qwen2", "vit")])
def test_early_exchanges(tmp_path: Path, name: str) -> None:
    """Every mutant: check() refuses what verify() finds to be different, and nothing else."""
    found = computed(name, False, tmp_path)
    assert found == {what: not answer for what, answer in judged(name, False).items()}


@pytest.mark.long
@pytest.mark.parametrize("name, seq", CASES, ids=IDS)
def test_what_is_said_in_another_way_is_equal(tmp_path: Path, name: str, seq: bool) -> None:
    same = [what for what in judged(name, seq) if is_right(name, seq, what)]
    found = computed(name, seq, tmp_path, same)
    assert found == dict.fromkeys(same, True)
