"""Rows dealt by area: each once, as many to every rank, never worse than by index, the same in every process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.data.loader import deal
from megatron_sp.parallel.context_plan import plan_context
from megatron_sp.parallel.load_balancing import RowDealer, area_of_documents, order_by_area
from megatron_sp.parallel.row_mask import RowMask


def dealt(areas: list[int], micro_batch_size: int, dp_size: int) -> list[list[list[int]]]:
    """Places of each rank's micro-batches."""
    order = order_by_area(areas, micro_batch_size, dp_size)
    return [deal(order, micro_batch_size, rank, dp_size).tolist() for rank in range(dp_size)]


def largest(areas: list[int], shares: list[list[list[int]]]) -> int:
    return max(sum(areas[i] for rows in share for i in rows) for share in shares)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=80, deadline=None)
def test_every_row_once_and_never_worse_than_by_index(dp: int, b: int, micro_batches: int, data: st.DataObject) -> None:
    count = dp * b * micro_batches
    areas = data.draw(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 10**12)), min_size=count, max_size=count))
    shares = dealt(areas, b, dp)
    assert sorted(i for share in shares for rows in share for i in rows) == list(range(count))
    assert all(len(share) == micro_batches and all(len(rows) == b for rows in share) for share in shares)
    by_index = [deal(np.arange(count), b, rank, dp).tolist() for rank in range(dp)]
    assert largest(areas, shares) < largest(areas, by_index) or shares == by_index
    assert dealt(areas, b, dp) == shares


def test_by_hand() -> None:
    """By index rank 0 has 9 + 8 of 20; the second largest belongs to the other rank, with what evens them out."""
    assert dealt([9, 1, 8, 2], 1, 2) == [[[0], [1]], [[2], [3]]]
    assert dealt([9, 1, 8, 2], 2, 2) == [[[0, 1]], [[2, 3]]], "by index they are even already"
    assert dealt([9, 8, 1, 2], 2, 2) == [[[0, 2]], [[1, 3]]]
    assert dealt([1, 2, 8, 9], 2, 2) == [[[0, 3]], [[1, 2]]], "a micro-batch has its rows in the order of the data"


def test_large_rows_meet_in_a_micro_batch() -> None:
    """Ranks that wait for one another after every micro-batch do so for about as long each time."""
    areas = [1, 100, 50, 99, 2, 49, 3, 48, 98, 97, 47, 4]
    for share in dealt(areas, 1, 2):
        assert sorted((areas[i] // 45 for (i,) in share), reverse=True) == [areas[i] // 45 for (i,) in share]
    assert largest(areas, dealt(areas, 1, 2)) <= 1.01 * sum(areas) / 2


def test_equal_rows_stay_where_they_are() -> None:
    assert order_by_area([7] * 12, 2, 3).tolist() == list(range(12))
    assert order_by_area([5, 1, 4], 1, 1).tolist() == [0, 1, 2], "with one rank there is nothing to even out"


@pytest.mark.parametrize("causal, window", [(True, None), (True, 1), (True, 5), (True, 100), (False, None)])
def test_areas_are_those_of_the_plan(causal: bool, window: int | None) -> None:
    for lengths in ([40], [1, 39], [4, 5, 6, 25], [5, 5, 5, 5, 20]):
        mask = RowMask(40, causal, window, (tuple(np.cumsum(lengths).tolist()),))
        area = plan_context(mask, (((0, 40),),)).area(0)
        assert area_of_documents(np.array(lengths), causal, window) == area
    assert area_of_documents(np.array([2**30]), causal=False, window=None) == 2**60


def test_a_dealer_asks_for_the_lengths_of_the_rows_of_the_step() -> None:
    lengths = {10: [4, 4], 11: [8], 12: [1] * 8, 13: [7, 1]}
    deal_rows = RowDealer(lambda i: np.array(lengths[i]), micro_batch_size=1, dp_size=2)
    order = deal_rows(np.array([11, 13, 10, 12]))  # areas 36, 29, 20, 8
    assert order.tolist() == [0, 1, 3, 2] and order.dtype == np.int64
    alike = RowDealer(lambda i: np.array(lengths[i]), micro_batch_size=1, dp_size=2, window=1)  # every token sees itself alone
    assert alike(np.array([11, 13, 10, 12])).tolist() == [0, 1, 2, 3]
    squares = RowDealer(lambda i: np.array(lengths[i]), micro_batch_size=1, dp_size=2, causal=False)  # 32, 8, 64, 50
    assert squares(np.array([10, 12, 11, 13])).tolist() == [2, 3, 1, 0]
