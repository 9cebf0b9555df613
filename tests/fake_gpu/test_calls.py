"""Ranks that would wait for each other for ever are found by comparing what each of them calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_gpu.calls import Call, disagreements

PAIR, ALL = (0, 1), (0, 1, 2, 3)
REDUCE = Call(PAIR, "all_reduce", (8,), (), "torch.float32", "a.py:1")
GATHER = Call(PAIR, "all_gather", (8,), (), "torch.float32", "a.py:2")


def found(*calls: list[Call]) -> list[str]:
    made = [list(dict.fromkeys(call.ranks for call in of_rank)) for of_rank in calls]
    return disagreements(calls, made)


def test_ranks_that_call_the_same_agree() -> None:
    assert not found([REDUCE, GATHER], [REDUCE, GATHER])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([GATHER, REDUCE], "call 0 of ranks [0, 1]: rank 0: all_reduce of torch.float32 at a.py:1; rank 1: all_gather"),
        ([REDUCE], "call 1 of ranks [0, 1]: all_gather at a.py:2 is not called by ranks [1]"),
        ([replace(REDUCE, sizes=(9,)), GATHER], "rank 1: all_reduce of (9,) elements at a.py:1"),
        ([replace(REDUCE, dtype="torch.bfloat16"), GATHER], "rank 1: all_reduce of torch.bfloat16"),
        ([replace(REDUCE, where="b.py:9"), GATHER], ""),
    ],
)
def test_calls_that_differ(other: list[Call], words: str) -> None:
    lines = found([REDUCE, GATHER], other)
    assert (not lines and not words) or (len(lines) == 1 and words in lines[0]), lines


def test_what_is_sent_is_what_is_expected() -> None:
    first = Call(PAIR, "all_to_all", (3, 5), (3, 2), "torch.float32", "a.py:1")
    second = Call(PAIR, "all_to_all", (2, 4), (5, 4), "torch.float32", "a.py:1")
    assert not found([first], [second])
    assert found([first], [replace(second, received=(4, 4))]) == [
        "call 0 of ranks [0, 1]: all_to_all at a.py:1: rank 0 sends 5 elements to rank 1, which expects 4"
    ]


def test_communicators_are_made_in_one_order() -> None:
    one, other = replace(REDUCE, ranks=PAIR), replace(REDUCE, ranks=ALL)
    assert not found([one, other], [one, other], [other], [other])
    lines = found([one, other], [other, one], [other], [other])
    assert lines[0] == "ranks [0, 1] create the communicators [0, 1] and [0, 1, 2, 3] in different orders"


def test_two_communicators_that_wait_for_each_other() -> None:
    """Rank 0 gives the reduction of A's result to B, rank 1 that of B's to A: each waits for what the other has queued behind."""
    a, b = replace(REDUCE, ranks=PAIR), replace(REDUCE, ranks=ALL)
    rank0 = [a, replace(b, after=((PAIR, 1),))]
    rank1 = [replace(a, after=((ALL, 1),)), b]
    lines = disagreements([rank0, rank1, [b], [b]], [[PAIR, ALL], [PAIR, ALL], [ALL], [ALL]])
    assert len(lines) == 1 and "wait for each other" in lines[0], lines
    assert not disagreements([rank0, [a, b], [b], [b]], [[PAIR, ALL], [PAIR, ALL], [ALL], [ALL]])
