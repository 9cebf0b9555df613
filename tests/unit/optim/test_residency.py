"""Which unit lies in which buffer: the usual two-buffer scheme, more buffers, and orders that recomputation makes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import tiny
from support.fetches import list_fetches
from torch import nn

from megatron_sp.config.schema import ParallelConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.residency import Pool, Residency, pools_of
from megatron_sp.optim.weights import WholeWeights
from megatron_sp.training.sharding import pools_of_model

LAYERS = 5
ORDER = [*range(LAYERS + 2), 0, *range(LAYERS, 0, -1)]


def pools(num_buffers: int) -> list[Pool]:
    return [Pool(tuple(range(1, LAYERS + 1)), num_buffers), Pool((0,), 1), Pool((LAYERS + 1,), 1)]


def count_fetches(pools: list[Pool], order: Sequence[int], num_micro_batches: int) -> dict[int, int]:
    """How often each unit is fetched in a step."""
    counts = Counter(unit for unit, _ in list_fetches(pools, order, num_micro_batches))
    return {unit: counts[unit] for unit in range(max(order) + 1)}


def test_two_buffers_fetch_each_block_twice_but_the_last_two() -> None:
    """Forward all five, the last two are still there for backward; the embedding and the head have buffers of their own."""
    assert count_fetches(pools(2), ORDER, 1) == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}


@pytest.mark.parametrize("num_buffers", [LAYERS, LAYERS + 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_with_a_buffer_for_each_block_all_are_fetched_once(num_buffers: int, micro_batches: int) -> None:
    assert set(count_fetches(pools(num_buffers), ORDER, micro_batches).values()) == {1}


def _fewest(order: list[int], num_buffers: int, units: set[int]) -> int:
    """By trying everything: the fetches of the blocks without fetching ahead."""
    states = {frozenset[int](): 0}
    for unit in order:
        if unit not in units:
            continue
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            if unit in held:
                options = [(held, cost)]
            elif len(held) < num_buffers:
                options = [(held | {unit}, cost + 1)]
            else:
                options = [(held - {gone} | {unit}, cost + 1) for gone in held]
            for state, total in options:
                following[state] = min(total, following.get(state, total))
        states = following
    return min(states.values())


@pytest.mark.parametrize(("num_buffers", "micro_batches"), list(itertools.product([2, 3, 4], [1, 2])))
def test_nothing_could_fetch_less(num_buffers: int, micro_batches: int) -> None:
    """Fetching a block ahead needs a buffer that the best plan without it may use otherwise: one fewer is the bound then."""
    blocks = set(range(1, LAYERS + 1))
    got = sum(n for unit, n in count_fetches(pools(num_buffers), ORDER, micro_batches).items() if unit in blocks)
    assert _fewest(ORDER * micro_batches, num_buffers, blocks) <= got <= _fewest(ORDER * micro_batches, num_buffers - 1, blocks)
    if num_buffers == 2:
        assert got == _fewest(ORDER * micro_batches, 2, blocks)


def test_who_is_evicted() -> None:
    residency = Residency([Pool((1, 2, 3), 1)])
    assert residency.admit(1, [2, 1]) == 0
    assert residency.admit(2, [2, 1], busy=(1,)) is None, "a unit in use never is"
    assert residency.place == {1: 0}
    residency = Residency([Pool((1, 2, 3), 2)])  # a unit that comes later does not displace one that comes before
    residency.admit(1, [2, 1, 3])
    residency.admit(2, [2, 1, 3])
    assert residency.admit(3, [2, 1, 3]) is None
    assert residency.admit(3, [3, 1, 2]) is not None and 1 in residency.place
    residency = Residency([Pool((1, 2, 3), 2)])  # one that is used now does, whoever comes before its next use
    residency.take(1, [2, 3, 1, 2, 3])
    residency.take(2, [3, 1, 2, 3])
    assert residency.take(3, [1, 2, 3]) == 1 and residency.place == {1: 0, 3: 1}


@pytest.mark.parametrize("how", tiny.RECOMPUTE)
@pytest.mark.parametrize("untied", [False, True])
def test_the_model_uses_its_units_in_the_order_it_says(how: str, untied: bool) -> None:
    model = tiny.make_model(tiny.shape(untie_embeddings_and_output_weights=untied), **tiny.RECOMPUTE[how])
    seen: list[int] = []

    class Log(tiny.Announce):
        def before_use(self, unit: int) -> None:
            seen.append(unit)

    batch = tiny.make_batch()
    loss = model(batch["tokens"], batch["labels"], batch["loss_mask"], tiny.context(model.config, batch), Log(lambda unit: None))[0]
    assert seen == model.unit_order(backward=False)
    loss.backward()
    assert seen == model.unit_order(backward=True)


def test_pools_of_a_model() -> None:
    def of(tied: bool, **settings: Any) -> list[Pool]:
        return pools_of_model(tiny.make_model(tiny.shape(untie_embeddings_and_output_weights=not tied)), ParallelConfig(**settings))

    assert of(tied=True) == [Pool((1, 2, 3), 2), Pool((0,), 1), Pool((4,), 1)]
    assert of(tied=False, zero3_keep_units=3) == [Pool((1, 2, 3), 5), Pool((0, 4), 1, lasting=False)]
    assert of(tied=False, zero3_gather_once=True) == [Pool((1, 2, 3), 3), Pool((0,), 1), Pool((4,), 1)]


def test_embedding_and_head_share_a_buffer_without_another_fetch() -> None:
    """Of one micro-batch; of several each fetches both again."""
    order, shared = ORDER[: LAYERS + 2] + ORDER[LAYERS + 3 :], pools_of([0 < u <= LAYERS for u in range(LAYERS + 2)], 2, tied=False)
    assert count_fetches(shared, order, 1) == count_fetches(pools(2), order, 1)
    thrice = count_fetches(shared, order, 3)
    assert (thrice[0], thrice[LAYERS + 1]) == (3, 3)


def test_a_buffer_that_does_not_last_is_given_back_when_its_unit_is_neither_used_nor_next() -> None:
    residency = Residency([Pool((1, 2), 1), Pool((0, 3), 1, lasting=False)])
    residency.admit(0, [1, 2, 3])
    assert residency.passing(0, [1]) == [] and residency.passing(1, [0]) == [] and residency.passing(1, [2, 0]) == [0]
    assert residency.leave(0) == 1 and residency.place == {}
    residency.admit(1, [2])
    assert residency.passing(2, [3]) == [], "a block's stays"


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_unit_is_fetched_ahead(overlap: bool) -> None:
    units = [FlatUnit(str(i), [(f"{i}.weight", nn.Parameter(torch.ones(3)))], zero=Zero(3)) for i in range(LAYERS + 2)]
    weights = WholeWeights(units, pools=pools(2), order=ORDER, overlap=overlap)
    weights.start_step(1)
    for unit, following in itertools.pairwise(ORDER[: LAYERS + 2]):
        weights.need(unit)
        assert (following in weights._residency.place) == overlap
    weights.forget()
    assert not weights._residency.place


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("order", [ORDER, range(LAYERS + 2), [*range(LAYERS + 2), 0]], ids=["training", "validation", "validation, tied"])
def test_a_unit_in_use_is_whole_whatever_the_order(order: Sequence[int], num_buffers: int, overlap: bool) -> None:
    """Also in a validation, whose next micro-batch needs the first blocks before it needs the last ones again, and out of order."""
    units = [FlatUnit(str(i), [(f"{i}.weight", nn.Parameter(torch.ones(3)))], zero=Zero(3)) for i in range(LAYERS + 2)]
    weights = WholeWeights(units, pools=pools(num_buffers), order=ORDER, overlap=overlap)
    weights.start_step(3, order)
    for unit in [*order, *order, 3, 2, 5, *order]:
        weights.need(unit)
        assert unit in weights._residency.place


def test_a_run_does_not_copy_the_rest_of_a_long_step_at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sum(count_fetches(pools(2), ORDER, 100).values())
    longest, admit = [0], Residency.admit

    def measured(self: Residency, unit: int, upcoming: list[int], busy: tuple[int, ...] = ()) -> int | None:
        longest[0] = max(longest[0], len(upcoming))
        return admit(self, unit, upcoming, busy)

    monkeypatch.setattr(Residency, "admit", measured)
    units = [FlatUnit(str(i), [(f"{i}.weight", nn.Parameter(torch.ones(3)))], zero=Zero(3)) for i in range(LAYERS + 2)]
    weights = WholeWeights(units, pools=pools(2), order=ORDER)
    weights.start_step(100)
    for unit in ORDER * 100:
        weights.need(unit)
    assert weights.num_fetches == expected
    assert longest[0] <= 2 * len(ORDER)
