"""Chunks dealt to ranks: examples small enough to follow by hand, and what holds for all."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_sp.parallel.load_balancing import deal_chunks, spread_over


def test_documents_over_chunks() -> None:
    chunks = [(0, 10), (10, 20), (20, 29), (29, 38)]
    documents = [(0, 4), (4, 10), (10, 11), (11, 23), (23, 29), (29, 38)]
    assert spread_over(documents, chunks) == [{1: 9, 2: 3}]
    assert spread_over([(0, 10), (10, 30), (30, 38)], chunks) == [{1: 10, 2: 9, 3: 1}]
    assert spread_over([(0, 11), (11, 38)], chunks) == [{0: 10, 1: 1}, {1: 9, 2: 9, 3: 9}]


@pytest.mark.parametrize(("areas", "documents", "ranks", "dealt"), [
    ([5] * 6, [], 3, [[0, 3], [1, 4], [2, 5]]), ([0] * 6, [], 3, [[0, 3], [1, 4], [2, 5]]),  # equal chunks in turn
    ([1, 3, 5, 7, 9, 11], [], 3, [[0, 5], [1, 4], [2, 3]]),  # the largest first, to whom has least
    ([7, 1, 1, 1, 2, 4], [], 2, [[0, 2, 3], [1, 4, 5]]),  # 7, 4, 2, and the first 1 makes 7
    ([10] * 6, [{0: 8, 1: 8}, {2: 8, 3: 8}, {4: 8, 5: 8}], 3, [[0, 1], [2, 3], [4, 5]]),  # a document stays together
    # what counts is positions here times positions there: chunk 2 has one document with chunk 0 and one with chunk 1
    ([10] * 4, [{0: 1, 2: 1}, {1: 8, 2: 8}], 2, [[0, 3], [1, 2]]), ([10] * 4, [{0: 2, 2: 9}, {1: 3, 2: 1}], 2, [[0, 2], [1, 3]]),
    ([10] * 4, [{0: 9, 2: 1}, {1: 2, 2: 5}], 2, [[0, 3], [1, 2]]),
    ([0] * 4, [{0: 1, 1: 1, 2: 1, 3: 1}], 2, [[0, 1], [2, 3]]),  # every rank gets its number of chunks
    ([6, 5, 5, 4], [{0: 8, 1: 8}], 2, [[0, 3], [1, 2]]),  # 6 + 5 is too much
])  # fmt: skip
def test_by_hand(areas: list[int], documents: list[dict[int, int]], ranks: int, dealt: list[list[int]]) -> None:
    assert deal_chunks(areas, documents, ranks) == dealt


def test_a_rank_keeps_room_for_the_smallest_chunks() -> None:
    """8 + 4 is the mean, and nothing would be left for its third chunk."""
    dealt = deal_chunks([8, 4, 4, 3, 3, 2], [{0: 8, 1: 8}], 2)
    assert [sum([8, 4, 4, 3, 3, 2][chunk] for chunk in chunks) for chunks in dealt] == [13, 11] and 1 in dealt[1]
    assert deal_chunks([8, 3, 3, 1], [{0: 8, 3: 8}], 2) == [[0, 3], [1, 2]]
    # with chunk 3 there is just room for the smallest, not for the next
    assert deal_chunks([12, 6, 6, 5, 4, 3], [{0: 1, 4: 1}], 2)[0] == [0, 4, 5]


def test_swaps_bring_the_fullest_rank_down() -> None:
    areas, documents = [40, 20, 20, 20, 20, 20, 10, 10], [{1: 8, 2: 8, 6: 8, 7: 8}]
    loads = [sum(areas[chunk] for chunk in chunks) for chunks in deal_chunks(areas, documents, 2)]
    assert loads == [80, 80]


def test_what_a_swap_took_away_is_forgotten() -> None:
    """Of the swaps that balance the ranks, those that keep 3, 5 and 6 together: after the first, it matters who has what now."""
    areas = [4, 28, 15, 21, 29, 23, 29, 27]
    dealt = deal_chunks(areas, [{0: 4, 1: 4, 2: 1, 3: 1}, {3: 4, 4: 1, 5: 4, 6: 4}], 2)
    assert dealt == [[0, 1, 4, 7], [2, 3, 5, 6]] and [sum(areas[chunk] for chunk in chunks) for chunks in dealt] == [88, 88]


def random_chunks(chance: random.Random, ranks: int, room: int) -> tuple[list[int], list[dict[int, int]]]:
    """Areas and documents of a causal row of chunks of 100 positions."""
    s = 100 * ranks * room
    ends = sorted({*(chance.randrange(1, s) for _ in range(ranks * room // 2)), s})
    areas = [0] * (ranks * room)
    for start, stop in itertools.pairwise((0, *ends)):
        for q in range(start, stop):
            areas[q // 100] += q - start + 1
    return areas, spread_over(itertools.pairwise((0, *ends)), [(c, c + 100) for c in range(0, s, 100)])


def test_all_chunks_once_evenly_and_the_same_every_time() -> None:
    chance = random.Random(0)
    excess, strangers = [], []
    for ranks, room in itertools.product((1, 2, 3, 4, 8), (2, 5, 8, 16)):
        areas, documents = random_chunks(chance, ranks, room)
        dealt = deal_chunks(areas, documents, ranks)
        assert sorted(itertools.chain(*dealt)) == list(range(ranks * room))
        assert all(len(chunks) == room and chunks == sorted(chunks) for chunks in dealt)
        assert dealt == deal_chunks(tuple(areas), [dict(d) for d in documents], ranks)
        if room >= 8:
            excess.append(max(sum(areas[chunk] for chunk in chunks) for chunks in dealt) * ranks / sum(areas) - 1)
            strangers.append(
                sum(len({r for r, chunks in enumerate(dealt) for c in chunks if c in d}) - 1 for d in documents) / len(documents)
            )
    assert max(excess) < 0.02 and sum(excess) / len(excess) < 0.008
    assert sum(strangers) / len(strangers) < 0.7  # ranks that have a part of a document, beside the first
