"""Stages of a model: runs of its layers."""

# The first stage has the embedding, too, and the last one the head; these cost time like a layer, or several.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Stage:
    """Run of a model's layers."""

    number: int  # of the stage, from 0
    start: int  # its first layer
    stop: int  # behind its last one
    num_layers: int  # of the model
    num_stages: int = 1

    @property
    def is_first(self) -> bool:  # the stage with the embedding
        return self.number == 0

    @property
    def is_last(self) -> bool:  # the stage with the head
        return self.number == self.num_stages - 1

    def __len__(self) -> int:
        return self.stop - self.start


def whole_model(num_layers: int) -> Stage:
    """Return the stage of an uncut model."""
    return Stage(0, 0, num_layers, num_layers)


def cut_model(counts: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return stages with so many layers each."""
    ends = list(accumulate(counts, initial=0))
    return tuple(Stage(i, start, stop, ends[-1], len(counts)) for i, (start, stop) in enumerate(pairwise(ends)))


def deal_layers(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None, embedding: float = 0.0,
    head: float = 0.0,
) -> tuple[int, ...]:  # fmt: skip
    """Return each stage's number of layers, balanced by time; ``embedding``, ``head`` take that of so many layers."""
    if num_stages == 1:
        return (num_layers,)
    # first, last: layers of these stages; None: as balances them
    given = {0: first, num_stages - 1: last}
    counts = [given.get(stage) or 1 for stage in range(num_stages)]
    free = [stage for stage in range(num_stages) if given.get(stage) is None]
    left = num_layers - sum(counts)
    if left < 0 or (left > 0 and not free):
        fixed = " + ".join(str(count) for count in (first, last) if count is not None)
        of_these = f", with {fixed} given" if fixed else ""
        raise ValueError(f"{num_layers} layers cannot be dealt to {num_stages} stages of at least one{of_these}")
    extra = {0: embedding, num_stages - 1: head}
    # one after another to the stage that is fastest then; among equals to one in the middle, whose neighbours have ends
    middle = sorted(free, key=lambda stage: (stage in (0, num_stages - 1), stage))
    for _ in range(left):
        counts[min(middle, key=lambda stage: counts[stage] + 1 + extra.get(stage, 0.0))] += 1
    return tuple(counts)


def deal_unlike_layers(costs: Sequence[float], num_stages: int, *, head: float = 0.0) -> tuple[int, ...]:
    """Return numbers of layers as ``deal_layers`` does, of layers with these times."""
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} layers cannot be dealt to {num_stages} stages of at least one")
    sums = list(accumulate(costs, initial=0.0))
    # of the ways to deal the first ``stop`` layers the best: (slowest of the stages so far, sum of squares, counts), so
    # that of ways that are as fast the evenest is taken
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        left = num_stages - 1 - stage
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, len(costs) - left + 1) if left else [len(costs)]:
            ways = []
            for start, (slowest, squares, counts) in best.items():
                if start < stop:
                    time = sums[stop] - sums[start] + (0.0 if left else head)
                    # rounded, or the last bits of sums decide between equals
                    ways.append((round(max(slowest, time), 9), round(squares + time**2, 9), (*counts, stop - start)))
            after[stop] = min(ways)
        best = after
    return best[len(costs)][2]
