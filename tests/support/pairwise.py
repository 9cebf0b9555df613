"""Pairwise grids: few cases in which any two values of two axes that can meet do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import Any

from support.layouts import Case, _cost


def pairwise(
    axes: dict[str, list[Any]], case_of: Callable[[dict[str, Any]], Case | None], seed: int, draws: int = 1500, tries: int = 60
) -> list[Case]:  # fmt: skip
    """Return cases in which any two values meet that do in any of many random ones: the best of some for its cost, again and again.

    Args:
        axes: values of each axis.
        case_of: the case of one value from each axis; None where they cannot meet.
        seed: of the random choices.
        draws: random cases.
        tries: of which the best is taken.
    """
    random, names = Random(seed), list(axes)
    drawn: list[tuple[Case, frozenset[tuple[int, int, int, int]]]] = []
    while len(drawn) < draws:
        numbers = [random.randrange(len(axes[name])) for name in names]
        if (case := case_of({name: axes[name][number] for name, number in zip(names, numbers, strict=True)})) is not None:
            drawn.append((case, frozenset((i, j, numbers[i], numbers[j]) for i, j in combinations(range(len(names)), 2))))
    missing, cases = set[tuple[int, int, int, int]]().union(*(pairs for _, pairs in drawn)), list[Case]()
    while missing:
        some = random.sample(drawn, tries)
        best, pairs = max(some, key=lambda each: len(each[1] & missing) / _cost(each[0]) ** 0.5)
        if new := pairs & missing:
            cases.append(best)
            missing -= new
    return cases
