"""Rows of a layer with experts: how many a rank sends to the ranks of the experts that its tokens choose."""

# A row goes to a rank once, however many of its experts it has chosen. With even random choice of k of E experts on ep
# ranks
#
#     rows of a token = ep (1 - C(E - E/ep, k) / C(E, k)),    of which (ep - 1)/ep leave the rank
#
# and where a token chooses among the experts of some groups only, the mean of that over all choices of groups.

from __future__ import annotations

from collections import Counter
from functools import cache
from math import comb
from typing import NamedTuple

from megatron_sp.config.schema import ModelConfig


class RoutedRows(NamedTuple):
    """Rows of one pass of a rank through a layer with experts; of several passes the mean."""

    own: float  # to experts of the rank itself
    to_others: float
    from_others: float
    choices: float  # of the rank's experts, in its own rows and those that have come


def even_rows(model: ModelConfig, ep: int, tokens: float, load: float = 1.0) -> RoutedRows:
    """Return the rows of a rank of ``ep`` with so many tokens if all choices are equally probable.

    ``load``: choices of this rank's experts, in those of the mean rank (--moe-worst-load).
    """
    assert model.num_experts
    k = model.moe_router_topk
    choices = min(tokens * k * load, ep * tokens * min(k, model.num_experts // ep))  # no more than all tokens can come
    per_rank = tokens * ranks_of_token(model, ep) / ep
    coming = min(load * per_rank, tokens)
    return RoutedRows(coming, (ep - 1) * per_rank, (ep - 1) * coming, choices)


def ranks_of_token(model: ModelConfig, ep: int) -> float:
    """Return on how many ranks a token's experts are, on average over all choices."""
    assert model.num_experts
    groups, of_token = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    own, size, missing = model.num_experts // ep, model.num_experts // groups, 0.0
    for start in range(0, model.num_experts, own):
        # experts of the rank in each group of experts
        overlaps = (min(start + own, (group + 1) * size) - max(start, group * size) for group in range(groups))
        overlaps_in_order = tuple(sorted(max(0, overlap) for overlap in overlaps))
        missing += _missed(overlaps_in_order, size, of_token, model.moe_router_topk)
    return ep - missing


@cache
def _missed(overlaps: tuple[int, ...], size: int, of_token: int, k: int) -> float:
    # probability that none of k experts of ``of_token`` groups is of a rank that has so many in each
    ways = Counter({(0, 0): 1})  # (groups chosen, experts of the rank in them) -> number of choices
    for overlap in overlaps:
        for (chosen, held), number in list(ways.items()):
            if chosen < of_token:
                ways[chosen + 1, held + overlap] += number
    allowed = of_token * size
    missed = sum(number * comb(allowed - held, k) for (chosen, held), number in ways.items() if chosen == of_token)
    return missed / (comb(len(overlaps), of_token) * comb(allowed, k))
