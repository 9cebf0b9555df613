"""Rows of experts in numbers: expectation by counting all choices."""

from __future__ import annotations

import itertools

import pytest
from support import tiny

from megatron_sp.planner.expert_rows import even_rows, ranks_of_token


@pytest.mark.parametrize("experts, k, ep, groups, of_token", [
    (8, 2, 2, 1, 1), (8, 2, 8, 1, 1), (6, 3, 3, 1, 1), (6, 6, 3, 1, 1), (8, 2, 4, 4, 2), (8, 3, 2, 4, 2),
    (12, 2, 3, 2, 1), (12, 2, 6, 3, 2),
])  # fmt: skip
def test_ranks_of_a_token_are_the_mean_over_all_choices(experts: int, k: int, ep: int, groups: int, of_token: int) -> None:
    more = {"moe_router_num_groups": groups, "moe_router_group_topk": of_token} if groups > 1 else {}
    model = tiny.shape(num_experts=experts, moe_router_topk=k, **more)
    size, found = experts // groups, []
    for chosen in itertools.combinations(range(groups), of_token):
        allowed = [expert for expert in range(experts) if expert // size in chosen]
        found += [len({expert // (experts // ep) for expert in some}) for some in itertools.combinations(allowed, k)]
    assert ranks_of_token(model, ep) == pytest.approx(sum(found) / len(found))


def test_rows_of_a_rank() -> None:
    """Of two of eight experts on two ranks, both are on one in three of seven choices."""
    model = tiny.shape(num_experts=8, moe_router_topk=2)
    rows = even_rows(model, 2, 70)
    assert (rows.own, rows.to_others, rows.from_others) == pytest.approx((55, 55, 55))
    assert rows.choices == 140 and even_rows(model, 1, 70).own == 70


def test_a_worse_load_is_that_of_one_rank() -> None:
    """It gets more, up to all that there is, and sends what it sends."""
    model = tiny.shape(num_experts=8, moe_router_topk=2)
    even, worse, worst = (even_rows(model, 4, 100, load) for load in (1.0, 1.5, 1000.0))
    assert worse.to_others == worst.to_others == even.to_others
    assert worse.own + worse.from_others == pytest.approx(1.5 * (even.own + even.from_others)) and worse.choices == 1.5 * even.choices
    assert worst.own + worst.from_others == 400 and worst.choices == 800
