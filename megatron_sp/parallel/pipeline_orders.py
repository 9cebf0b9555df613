"""The orders of pipeline schedules that the field knows (``plan_pipeline``). Plain numbers, no torch."""

#     kind         stages of rank r      order
#     1f1b         r                     one forward pass, one backward pass, after a forward pass for each rank below
#     interleaved  r, r + p, ...         1f1b in groups of p or more micro-batches, through each of a rank's stages
#     zb1p         as interleaved        W is put off to where a rank would wait (ZB-H1), within the memory of 1f1b
#     zbv          r, 2p - 1 - r         a V: the first and the last stage are on one rank; W as in zb1p
#     slices       r                     1f1b over slices, backward passes of a micro-batch from its last slice
#
# In 1f1b, interleaved and slices W follows its B at once, and the two are one backward pass. Sums are in the same order
# in all kinds. Sources: 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473; zero bubble arXiv:2401.10241; V
# arXiv:2405.15362; slices arXiv:2406.03488.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from megatron_sp.parallel.pipeline_plan import (
    KINDS,
    SAME_COSTS,
    Action,
    Costs,
    PipelineKind,
    PipelinePlan,
    PlanError,
    replay_costs,
)


class _Part(NamedTuple):
    """A slice of a micro-batch in a stage."""

    stage: int
    micro_batch: int
    slice: int


Actions = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=256)
def plan_pipeline(
    kind: PipelineKind, num_ranks: int, stages_per_rank: int, num_micro_batches: int, num_slices: int = 1,
    costs: Costs = SAME_COSTS,
) -> PipelinePlan:  # fmt: skip
    """Return the order of a step of any number of micro-batches; PlanError: this kind has none for these sizes."""
    p, v, m, n = num_ranks, stages_per_rank, num_micro_batches, num_slices
    if min(p, v, m, n) < 1:
        sizes = f"pipeline ranks ({p}), stages of a rank ({v}), micro-batches ({m}) and slices ({n})"
        raise PlanError(f"{sizes} must each be at least 1")
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
    rank_of = tuple(range(p)) + tuple(reversed(range(p))) if kind == "zbv" else tuple(range(p)) * v
    orders: list[Actions] = []
    if kind == "zbv" or (kind == "zb1p" and v > 1):
        orders.append(_in_time(kind == "zbv", rank_of, p, m, costs))
    if kind != "zbv":
        # W put off by as many backward passes as a rank has room for
        delays = (0,) if kind != "zb1p" else (1,) if v == 1 else (0, 1, 2)
        orders += [tuple(_one_by_one(rank, p, v, m, n, late * rank) for rank in range(p)) for late in delays]
    plans = [PipelinePlan(kind, rank_of, m, n, actions, kind in ("zb1p", "zbv")) for actions in orders]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: replay_costs(plan, costs).time)


def forward_plan(rank_of: tuple[int, ...], num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """Return the order of forward passes alone, for validation: each group of micro-batches through a rank's stages."""
    actions = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        groups = _groups(num_ranks, num_micro_batches)
        actions.append(tuple(Action("F", stage, i) for group in groups for stage in stages for i in group))
    return PipelinePlan("forward", rank_of, num_micro_batches, 1, tuple(actions))


def _groups(p: int, m: int) -> list[range]:
    # micro-batches in groups of at least p, of about the same size: in a smaller one a rank waits for its own output
    count = max(1, m // p)
    ends = [m * i // count for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _forward_order(rank: int, p: int, v: int, m: int, n: int) -> list[_Part]:
    # a rank's forward passes in order: a group of micro-batches through each of its stages in turn
    stages = range(rank, v * p, p)
    return [_Part(stage, i, j) for group in _groups(p, m) for stage in stages for i in group for j in range(n)]


def _one_by_one(rank: int, p: int, v: int, m: int, n: int, late: int) -> tuple[Action, ...]:
    # forward and backward passes in turn, after those forward passes without which no gradient arrives
    forward, groups, stages = _forward_order(rank, p, v, m, n), _groups(p, m), range(rank, v * p, p)[::-1]
    backward = [_Part(stage, i, j) for group in groups for stage in stages for i in group for j in reversed(range(n))]
    # the ranks below, each of which has begun one more; a group more for each further stage, and the slices before the
    # last one
    ahead = p - 1 - rank + n - 1 if v == 1 else 2 * (p - 1 - rank) + (v - 1) * max(map(len, groups))
    actions = [Action("F", *part) for part in forward[:ahead]]
    for index, part in enumerate(backward):
        if ahead + index < len(forward):
            actions.append(Action("F", *forward[ahead + index]))
        actions.append(Action("B", *part))
        if index >= late:
            actions.append(Action("W", *backward[index - late]))
    return (*actions, *(Action("W", *part) for part in backward[max(0, len(backward) - late) :]))


# parts that a rank has still before it, with their numbers, by stage; those of a stage leave in order
_Queues = dict[int, deque[tuple[int, _Part]]]


def _queues(parts: Sequence[_Part]) -> _Queues:
    of_stages: _Queues = {}
    for index, part in enumerate(parts):
        of_stages.setdefault(part.stage, deque()).append((index, part))
    return of_stages


def _heads(queues: _Queues) -> list[_Part]:
    # the first part of each stage, in the order of the list
    return [part for _, part in sorted(queue[0] for queue in queues.values() if queue)]


class _Rank:
    """A rank while its order is being found."""

    def __init__(self, forward: Sequence[_Part], limit: int) -> None:
        self.limit = limit  # forward passes that may have begun before the first one's W has run
        self.forward = _queues(forward)
        self.backward = _queues(sorted(forward, key=lambda part: (part.micro_batch, -part.stage)))
        self.weights: list[_Part] = []  # put off
        self.actions: list[Action] = []
        self.left = 3 * len(forward)  # actions
        self.free_at, self.in_flight = 0.0, 0

    def take(self, action: Action) -> None:
        self.actions.append(action)
        self.left -= 1
        part = _Part(*action[1:])
        if action.kind == "F":
            self.forward[part.stage].popleft()
            self.in_flight += 1
        elif action.kind == "B":
            self.backward[part.stage].popleft()
            self.weights.append(part)
        else:
            self.weights.remove(part)
            self.in_flight -= 1


def _in_time(is_v: bool, rank_of: tuple[int, ...], p: int, m: int, costs: Costs) -> Actions:
    # the order in which each rank does what is there first: a B, else an F while it may hold more, else a W
    num_stages, v = len(rank_of), len(rank_of) // p
    ahead = (v - 1) * max(map(len, _groups(p, m)))
    ranks = []
    for index in range(p):
        stages = [stage for stage in range(num_stages) if rank_of[stage] == index]
        in_v = [_Part(stage, i, 0) for i in range(m) for stage in stages]
        # as many in flight as rank 0 has with interleaved
        ranks.append(_Rank(in_v, 2 * p) if is_v else _Rank(_forward_order(index, p, v, m, 1), ahead + 2 * p - 1))
    made: dict[Action, float] = {}  # when a result is where it is needed

    def has_input(action: Action, now: float) -> bool:
        neighbour = action.stage + (-1 if action.kind == "F" else 1)
        return not 0 <= neighbour < num_stages or made.get(action._replace(stage=neighbour), math.inf) <= now

    def next_action(rank: _Rank, now: float) -> Action | None:
        for part in _heads(rank.backward):
            action = Action("B", *part)
            if action._replace(kind="F") in made and has_input(action, now):
                return action
        parts = _heads(rank.forward)
        for part in parts if is_v else parts[:1]:
            # in a V the way back needs room, too: without a place of its own, ranks that have begun too much wait for
            # each other
            leaves_room = is_v and part.stage < num_stages // 2
            if rank.in_flight < rank.limit - leaves_room and has_input(Action("F", *part), now):
                return Action("F", *part)
        return Action("W", *rank.weights[0]) if rank.weights else None

    queue = [(0.0, index) for index in range(p)]
    while queue:
        now, index = heappop(queue)
        rank = ranks[index]
        action = None if not rank.left or now < rank.free_at else next_action(rank, now)
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
    assert not any(rank.left for rank in ranks), f"{p} ranks and {m} micro-batches have no order within their memory"
    return tuple(tuple(rank.actions) for rank in ranks)
