"""Lengths of a curriculum against DeepSpeed's formulas worked out by hand, and what is wrong with one."""

from __future__ import annotations

import pytest

from megatron_sp.config.curriculum import read_curriculum


@pytest.mark.parametrize(("text", "want"), [
    # floor(80 + 1968 * step / 100), rounded down to multiples of 8
    ("fixed_linear 80 2048 100 8", {1: 96, 2: 112, 50: 1064, 99: 2024, 100: 2048, 101: 2048, 10**9: 2048}),
    ("fixed_linear 5 9 4 1", {1: 6, 2: 7, 3: 8, 4: 9, 5: 9}),
    # a multiple from the first step on, and the longest at last
    ("fixed_linear 8 100 1000 16", {1: 16, 500: 48, 1000: 96, 1200: 100}), ("fixed_linear 64 64 10 48", {1: 64, 100: 64}),
    ("fixed_root 80 2048 100 8 2", {1: 272, 25: 1064, 100: 2048}), ("fixed_root 1 9 1 1 0.1", {1: 9, 10**15: 9}),  # no number is too large
    ("fixed_root 80 2048 100 8 1", {1: 96, 50: 1064}),  # a straight line
    ("fixed_discrete 16:5 64:10 128", {1: 16, 5: 16, 6: 64, 10: 64, 11: 128, 10**9: 128}),
])  # fmt: skip
def test_lengths(text: str, want: dict[int, int]) -> None:
    curriculum = read_curriculum((text,))
    assert curriculum == read_curriculum(tuple(text.split()))
    assert {step: curriculum.length(step) for step in want} == want


WRONG = [
    ("", "expected fixed_linear, fixed_root, fixed_discrete and numbers, got ''"), ("custom 1 2", "got 'custom'"),
    ("fixed_linear 8 64 10", "expected fixed_linear SHORTEST LONGEST STEPS MULTIPLE, got 3 numbers: 8 64 10"),
    ("fixed_root 8 64 10 8", "expected fixed_root SHORTEST LONGEST STEPS MULTIPLE DEGREE, got 4 numbers"),
    ("fixed_root 8 64 10 8 0.01", "the degree of the root must be a number of at least 0.1, got '0.01'"),
    ("fixed_linear 0 64 10 8", "expected a whole number of at least 1, got '0'"), ("fixed_linear 8 6.5 10 8", "got '6.5'"),
    ("fixed_linear 80 64 10 8", "the shortest length (80) must be at most the longest (64)"),
    ("fixed_linear 8 64 10 128", "lengths are multiples of 128, and the longest is 64"),
    ("fixed_discrete 64", "expected fixed_discrete LENGTH:LAST_STEP"),
    ("fixed_discrete 64 128", "expected a whole number of at least 1, got ''"),
    ("fixed_discrete 64:5 32:9 128", "lengths (64, 32, 128) must grow, and so must the last steps with them (5, 9)"),
    ("fixed_discrete 8:5 32:5 128", "(5, 5)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[text or "nothing" for text, _ in WRONG])
def test_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_curriculum((text,))
    assert says in str(caught.value)
