"""Rows of a layer with experts: how many a rank sends to the ranks of the experts that its tokens choose, and their bytes.

A row goes to a rank once, however many of its experts it has chosen. With even random choice of k of E experts on ep ranks

    rows of a token = ep (1 - C(E - E/ep, k) / C(E, k)),    of which (ep - 1)/ep leave the rank

and where a token chooses among the experts of some groups only, the mean of that over all choices of groups. This module does not
import torch; a test compares the bytes of a row with ``parallel/expert_exchange.py :: RowFormat``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import comb

from megatron_sp.config.schema import ModelConfig
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 16  # as in parallel/expert_exchange.py


@dataclass(frozen=True)
class RoutedRows:
    """Rows of one pass of a rank through a layer with experts; of several passes the mean.

    Attributes:
        own: rows that go to experts of the rank itself.
        to_others, from_others: rows that go to other ranks, and that come from them.
        choices: choices of the rank's experts in its own rows and those that have come.
        most: of these, those of the expert that has most.
    """

    own: float
    to_others: float
    from_others: float
    choices: float
    most: float

    @property
    def sent(self) -> float:
        """Rows that are sent, to the rank itself, too."""
        return self.own + self.to_others

    @property
    def received(self) -> float:
        """Rows that arrive, from the rank itself, too."""
        return self.own + self.from_others


def even_rows(model: ModelConfig, ep: int, tokens: float, load: float = 1.0) -> RoutedRows:
    """Return the rows of a rank if all choices are equally probable.

    Args:
        model: with experts.
        ep: ranks that share them.
        tokens: of the rank.
        load: choices of this rank's experts, in those of the mean rank (--moe-worst-load); no more than all tokens can come.
    """
    assert model.num_experts
    choices = min(
        tokens * model.moe_router_topk * load, ep * tokens * min(model.moe_router_topk, model.num_experts // ep)
    )
    per_rank = tokens * ranks_of_token(model, ep) / ep
    coming = min(load * per_rank, tokens)
    return RoutedRows(
        coming, (ep - 1) * per_rank, (ep - 1) * coming, choices, min(choices * ep / model.num_experts, ep * tokens)
    )


def ranks_of_token(model: ModelConfig, ep: int) -> float:
    """Return on how many ranks a token's experts are, on average over all choices."""
    assert model.num_experts
    groups, of_token = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    return ep - sum(_misses(model.num_experts, model.moe_router_topk, ep, rank, groups, of_token) for rank in range(ep))


def _misses(experts: int, k: int, ep: int, rank: int, groups: int, of_token: int) -> float:
    """Return the probability that a token chooses no expert of a rank."""
    own, size = experts // ep, experts // groups
    start = rank * own
    overlaps = (min(start + own, (group + 1) * size) - max(start, group * size) for group in range(groups))
    return _missed(tuple(sorted(max(0, overlap) for overlap in overlaps)), size, of_token, k)


@cache
def _missed(overlaps: tuple[int, ...], size: int, of_token: int, k: int) -> float:
    """Return the probability that none of k experts of ``of_token`` groups is a rank's, which has so many in each group."""
    ways = Counter({(0, 0): 1})  # (groups chosen, experts of the rank in them) -> number of choices
    for overlap in overlaps:
        for (chosen, mine), number in list(ways.items()):
            if chosen < of_token:
                ways[chosen + 1, mine + overlap] += number
    allowed = of_token * size
    missed = sum(number * comb(allowed - mine, k) for (chosen, mine), number in ways.items() if chosen == of_token)
    return missed / (comb(len(overlaps), of_token) * comb(allowed, k))


@dataclass(frozen=True)
class RowBytes:
    """Bytes of what travels for a row.

    Attributes:
        there: the row with its weights and the numbers of its experts.
        back: the results' row, and its gradient.
        gradient: the row's gradient with those of its weights.
    """

    there: int
    back: int
    gradient: int

    @classmethod
    def of(cls, width: int, top_k: int, element: int, weight: int) -> RowBytes:
        """Return the bytes of rows of ``width`` elements, whose weights take ``weight`` bytes each."""
        row = round_up(width * element, _ALIGN_BYTES)
        return cls(
            row + round_up(top_k * (weight + 4), _ALIGN_BYTES),
            width * element,
            row + round_up(top_k * weight, _ALIGN_BYTES),
        )
