"""The orders of pipeline schedules that the field knows (``plan_pipeline``). Plain numbers, no torch.

    kind         stages of rank r      order
    1f1b         r                     one forward pass, one backward pass, after as many forward passes as there are ranks below
    interleaved  r, r + p, ...         1f1b in groups of p micro-batches, first through the first stage of each rank, then the next
    zb1p         as interleaved        W is put off to where a rank would wait (ZB-H1); activations of as many micro-batches as with 1f1b
    zbv          r, 2p - 1 - r         a V: the first and the last stage are on one rank; W as in zb1p
    slices       r                     1f1b over slices: forward passes in order, backward passes of a micro-batch from its last slice

In 1f1b, interleaved and slices W follows its B at once, and the two are one backward pass. The order of the sums is the
same in all kinds: W of a stage are in the order of the micro-batches. Groups of ``interleaved`` have p micro-batches or a few
more, so that any number of them has the shortest bubble.

Sources: 1F1B is PipeDream-Flush (arXiv:2006.09503); interleaved arXiv:2104.04473; zero bubble arXiv:2401.10241; V
arXiv:2405.15362; slices arXiv:2406.03488 (Seq1F1B).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from megatron_sp.parallel.pipeline_plan import KINDS, SAME_COSTS, Action, Costs, PipelineKind, PipelinePlan, PlanError
from megatron_sp.parallel.pipeline_replay import replay_costs


class _Part(NamedTuple):
    """A slice of a micro-batch in a stage."""

    stage: int
    micro_batch: int
    slice: int


@lru_cache(maxsize=256)
def plan_pipeline(
    kind: PipelineKind,
    num_ranks: int,
    stages_per_rank: int,
    num_micro_batches: int,
    num_slices: int = 1,
    costs: Costs = SAME_COSTS,
) -> PipelinePlan:
    """Return the order of a step.

    Args:
        kind: name of the schedule.
        num_micro_batches: m, of a step; any number.
        num_slices: n, of a micro-batch.
        costs: times of actions (``Costs``).
    Raises:
        PlanError: this kind has no such order.
    """
    p, v, m, n = num_ranks, stages_per_rank, num_micro_batches, num_slices
    if min(p, v, m, n) < 1:
        raise PlanError(
            f"pipeline ranks ({p}), stages of a rank ({v}), micro-batches ({m}) and slices ({n}) must each be at least 1"
        )
    _require_sizes(kind, v, n)
    rank_of = tuple(range(p)) + tuple(reversed(range(p))) if kind == "zbv" else tuple(range(p)) * v
    found: list[Actions] = []
    if kind == "zbv" or (kind == "zb1p" and v > 1):
        found.append(_in_time(kind == "zbv", rank_of, p, m, costs))
    if kind != "zbv":
        # W put off by as many backward passes as a rank has room for
        delays = (0,) if kind != "zb1p" else (1,) if v == 1 else (0, 1, 2)
        found += [tuple(_one_by_one(rank, p, v, m, n, late * rank) for rank in range(p)) for late in delays]
    plans = [PipelinePlan(kind, rank_of, m, n, actions, kind in ("zb1p", "zbv")) for actions in found]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: replay_costs(plan, costs).time)


Actions = tuple[tuple[Action, ...], ...]


def _require_sizes(kind: PipelineKind, v: int, n: int) -> None:
    if kind not in KINDS:
        raise PlanError(f"there is no pipeline schedule {kind!r}: choose one of {', '.join(KINDS)}")
    if kind in ("1f1b", "slices") and v != 1:
        raise PlanError(f"{kind} has one stage on each rank, not {v}: choose interleaved or zb1p")
    if kind == "interleaved" and v < 2:
        raise PlanError("interleaved needs at least 2 stages on each rank: choose 1f1b for one")
    if kind == "zbv" and v != 2:
        raise PlanError(f"zbv has two stages on each rank, not {v}")
    if kind != "slices" and n != 1:
        raise PlanError(f"{kind} has whole micro-batches, not {n} slices of each: choose slices")


# fixed orders


def _groups(p: int, m: int) -> list[range]:
    """Return the micro-batches in groups of at least p, of about the same size: in a smaller one a rank would wait for its own output."""
    count = max(1, m // p)
    ends = [m * i // count for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _forward_order(rank: int, p: int, v: int, m: int, n: int) -> list[_Part]:
    # a rank's forward passes in order: a group of micro-batches through each of its stages in turn
    return [
        _Part(chunk * p + rank, i, j) for group in _groups(p, m) for chunk in range(v) for i in group for j in range(n)
    ]


def _backward_order(rank: int, p: int, v: int, m: int, n: int) -> list[_Part]:
    # the same for backward passes: from the last stage, and each micro-batch from its last slice
    return [
        _Part(chunk * p + rank, i, j)
        for group in _groups(p, m)
        for chunk in reversed(range(v))
        for i in group
        for j in reversed(range(n))
    ]


def _one_by_one(rank: int, p: int, v: int, m: int, n: int, late: int = 0) -> tuple[Action, ...]:
    """Return forward and backward passes in turn, after those forward passes without which no gradient arrives."""
    forward, backward = _forward_order(rank, p, v, m, n), _backward_order(rank, p, v, m, n)
    # the ranks below, each of which has begun one more; a group more for each further stage, and the slices before the last one
    ahead = p - 1 - rank + n - 1 if v == 1 else 2 * (p - 1 - rank) + (v - 1) * max(map(len, _groups(p, m)))
    found = [Action("F", *part) for part in forward[:ahead]]
    for index, part in enumerate(backward):
        if ahead + index < len(forward):
            found.append(Action("F", *forward[ahead + index]))
        found.append(Action("B", *part))
        if index >= late:
            found.append(Action("W", *backward[index - late]))
    return (*found, *(Action("W", *part) for part in backward[max(0, len(backward) - late) :]))


# orders that follow from times


class _Parts:
    """Parts that a rank has still before it; those of a stage leave in order."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._of_stages: dict[int, deque[tuple[int, _Part]]] = {}
        for index, part in enumerate(parts):
            self._of_stages.setdefault(part.stage, deque()).append((index, part))

    def __bool__(self) -> bool:
        return any(self._of_stages.values())

    def first_of_each_stage(self) -> list[_Part]:
        return [part for _, part in sorted(queue[0] for queue in self._of_stages.values() if queue)]

    def remove(self, part: _Part) -> None:
        _, first = self._of_stages[part.stage].popleft()
        assert first == part


class _Rank:
    """A rank while its order is being found.

    Args:
        forward: its forward passes; those of a stage run in this order.
        limit: how many may have begun before the first one's W has run.
    """

    def __init__(self, forward: Sequence[_Part], limit: int) -> None:
        self.forward, self.limit = _Parts(forward), limit
        self.backward = _Parts(sorted(forward, key=lambda part: (part.micro_batch, -part.stage)))
        self.weights: list[_Part] = []  # put off
        self.actions: list[Action] = []
        self.free_at = 0.0
        self.in_flight = 0

    @property
    def is_done(self) -> bool:
        return not (self.forward or self.backward or self.weights)

    def take(self, action: Action) -> None:
        self.actions.append(action)
        part = _Part(*action[1:])
        if action.kind == "F":
            self.forward.remove(part)
            self.in_flight += 1
        elif action.kind == "B":
            self.backward.remove(part)
            self.weights.append(part)
        else:
            self.weights.remove(part)
            self.in_flight -= 1


def _in_time(is_v: bool, rank_of: tuple[int, ...], p: int, m: int, costs: Costs) -> Actions:
    # the order in which each rank does what is there first: a B, else an F while it may hold more, else a W
    num_stages, v = len(rank_of), len(rank_of) // p
    ranks = []
    for index in range(p):
        stages = [stage for stage in range(num_stages) if rank_of[stage] == index]
        order = (
            [_Part(stage, i, 0) for i in range(m) for stage in stages] if is_v else _forward_order(index, p, v, m, 1)
        )
        ahead = (v - 1) * max(map(len, _groups(p, m)))
        ranks.append(_Rank(order, 2 * p if is_v else ahead + 2 * p - 1))  # as many as rank 0 has with interleaved
    made: dict[Action, float] = {}  # when a result is where it is needed

    def is_there(action: Action, now: float) -> bool:
        neighbour = action.stage + (-1 if action.kind == "F" else 1)
        return not 0 <= neighbour < num_stages or made.get(action._replace(stage=neighbour), math.inf) <= now

    def next_action(rank: _Rank, now: float) -> Action | None:
        for part in rank.backward.first_of_each_stage():
            action = Action("B", *part)
            if action._replace(kind="F") in made and is_there(action, now):
                return action
        parts = rank.forward.first_of_each_stage()
        for part in parts if is_v else parts[:1]:
            # in a V the way back needs room, too: without a place of its own, ranks that have begun too much wait for each other
            leaves_room = is_v and part.stage < num_stages // 2
            if rank.in_flight < rank.limit - leaves_room and is_there(Action("F", *part), now):
                return Action("F", *part)
        return Action("W", *rank.weights[0]) if rank.weights else None

    queue = [(0.0, index) for index in range(p)]
    while queue:
        now, index = heappop(queue)
        rank = ranks[index]
        action = None if rank.is_done or now < rank.free_at else next_action(rank, now)
        if action is None:
            continue  # a neighbour's result wakes it
        rank.take(action)
        rank.free_at = now + costs.of(action.kind)
        heappush(queue, (rank.free_at, index))
        if action.kind != "W":
            neighbour = action.stage + (1 if action.kind == "F" else -1)
            made[action] = rank.free_at
            if 0 <= neighbour < num_stages and rank_of[neighbour] != index:
                made[action] += costs.message
                heappush(queue, (made[action], rank_of[neighbour]))
    assert all(rank.is_done for rank in ranks), f"{p} ranks and {m} micro-batches have no order within their memory"
    return tuple(tuple(rank.actions) for rank in ranks)


def forward_plan(rank_of: tuple[int, ...], num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """Return the order of forward passes alone, for validation: groups of micro-batches through each of a rank's stages in turn."""
    actions = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        parts = [(stage, i) for group in _groups(num_ranks, num_micro_batches) for stage in stages for i in group]
        actions.append(tuple(Action("F", stage, i) for stage, i in parts))
    return PipelinePlan("forward", rank_of, num_micro_batches, 1, tuple(actions))
