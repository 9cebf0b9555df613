"""Random pipeline schedules: any order at all, most of which no rank could run, and orders that ranks can run, however odd."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan


def any_plan(rng: random.Random, p: int, v: int, m: int, n: int) -> PipelinePlan:
    """A plan of any order, with a leaning towards those that end: p ranks with v stages each, m micro-batches of n slices."""
    rank_of = tuple(rng.sample(list(range(p)) * v, p * v))
    lists: list[list[Action]] = []
    for rank in range(p):
        parts = [(stage, i, j) for stage in range(p * v) if rank_of[stage] == rank for i in range(m) for j in range(n)]
        actions = [Action(kind, *part) for part in parts for kind in ("F", "B", "W")]  # type: ignore[arg-type]
        weight = {a: rng.random() * 3 + {"F": 0, "B": 2, "W": 4}[a.kind] + a.micro_batch * rng.choice((0, 1, 4)) for a in actions}
        lists.append(sorted(actions, key=weight.__getitem__))
    return PipelinePlan("random", rank_of, m, n, tuple(map(tuple, lists)))


def late_weights(rng: random.Random, plan: PipelinePlan) -> PipelinePlan:
    """The plan with every W put off by chance, still in the order of the sums."""
    lists = []
    for actions in plan.actions:
        order: list[Action] = [action for action in actions if action.kind != "W"]
        at: dict[int, int] = {}  # of each stage's last W
        for w in (action for action in actions if action.kind == "W"):
            index = rng.randint(max(order.index(w._replace(kind="B")), at.get(w.stage, 0)), len(order) - 1) + 1
            at = {stage: place + (place >= index) for stage, place in at.items()} | {w.stage: index}
            order.insert(index, w)
        lists.append(tuple(order))
    return replace(plan, actions=tuple(lists), splits=True)


def odd_plan(rng: random.Random, rank_of: Sequence[int], m: int, n: int = 1, *, splits: bool = True) -> PipelinePlan:
    """A plan that can be run: going through time, any rank takes any action that it may, with a leaning of its own for each kind."""
    p, last = max(rank_of) + 1, len(rank_of) - 1
    lists: list[list[Action]] = [[] for _ in range(p)]
    left = [Action(kind, stage, i, j) for stage in range(len(rank_of)) for i in range(m) for j in range(n) for kind in ("F", "B", "W")]  # type: ignore[arg-type]
    leaning = [{kind: rng.choice((0.02, 0.3, 1.0)) for kind in "FBW"} for _ in range(p)]
    done = set[Action]()

    def may(action: Action) -> bool:
        kind, stage, i, j = action
        f, b = action._replace(kind="F"), action._replace(kind="B")
        if kind == "F":
            return (stage == 0 or f._replace(stage=stage - 1) in done) and (j == 0 or f._replace(slice=j - 1) in done)
        if kind == "B":
            in_order = (splits and 0 < stage < last) or i == 0 or b._replace(micro_batch=i - 1, slice=0) in done
            return in_order and f in done and (stage == last or b._replace(stage=stage + 1) in done) and (
                j == n - 1 or b._replace(slice=j + 1) in done)  # fmt: skip
        before = action._replace(slice=j + 1) if j < n - 1 else action._replace(micro_batch=i - 1, slice=0)
        return b in done and (before.micro_batch < 0 or before in done)

    while left:
        open_ones = [action for action in left if may(action) and (splits or action.kind != "W")]
        chosen = rng.choices(open_ones, [leaning[rank_of[action.stage]][action.kind] for action in open_ones])[0]
        for action in (chosen, chosen._replace(kind="W"))[: 1 if splits or chosen.kind == "F" else 2]:
            lists[rank_of[action.stage]].append(action)
            done.add(action)
            left.remove(action)
    return PipelinePlan("odd", tuple(rank_of), m, n, tuple(map(tuple, lists)), splits)
