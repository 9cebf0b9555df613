"""How long a pipeline schedule takes, given the times of its actions. Plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_sp.parallel.pipeline_plan import Action, Costs, PipelinePlan


@dataclass(frozen=True)
class Replay:
    """Times of a step.

    Attributes:
        start, stop: of each action, from the beginning of the step.
    """

    start: dict[Action, float]
    stop: dict[Action, float]
    time: float
    busy: tuple[float, ...]  # time that each rank computes

    @property
    def bubble(self) -> float:
        """Share of the step in which the ranks wait."""
        return 1 - sum(self.busy) / (self.time * len(self.busy)) if self.time else 0.0


def replay(
    plan: PipelinePlan, seconds: Callable[[Action], float], message: Callable[[Action], float] = lambda action: 0.0
) -> Replay:
    """Return when each action begins and ends if every rank goes through its list and waits for nothing but what it needs.

    Args:
        plan: a plan that ``pipeline_check.check_plan`` passes.
        seconds: time of an action.
        message: time from an action's end until its result is on the next rank.
    """
    start, stop, there = dict[Action, float](), dict[Action, float](), dict[Action, float]()
    at, free_at, busy = [0] * plan.num_ranks, [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
    ready = list(range(plan.num_ranks))
    waiting: dict[Action, int] = {}  # the rank that waits for an action
    while ready:
        rank = ready.pop()
        while at[rank] < len(plan.actions[rank]):
            action = plan.actions[rank][at[rank]]
            source, begin = plan.source(action), free_at[rank]
            if source is not None:
                if source not in there:
                    waiting[source] = rank
                    break
                crosses = plan.rank_of[source.stage] != rank
                begin = max(begin, there[source] + (message(source) if crosses else 0.0))
            took = seconds(action)
            start[action], stop[action] = begin, begin + took
            free_at[rank], busy[rank] = begin + took, busy[rank] + took
            at[rank] += 1
            made = action
            if not plan.splits and action.kind != "F":  # the gradient of the input is there when both have run
                made = action._replace(kind="B")
                if action.kind == "B":
                    continue
            there[made] = begin + took
            if made in waiting:
                ready.append(waiting.pop(made))
    return Replay(start, stop, max(free_at), tuple(busy))


def replay_costs(plan: PipelinePlan, costs: Costs) -> Replay:
    """Return the replay of a plan whose stages all take the same time."""
    return replay(plan, lambda action: costs.of(action.kind), lambda action: costs.message)
