"""Check of a pipeline schedule before it runs: every action once, in an order that ends, and sums in a fixed order.

``check_plan`` goes through the lists as the ranks would: a rank does its next action as soon as what it needs has
arrived, and a send waits for nobody. So a plan that passes cannot hang: some rank can always go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan, PlanError


def check_plan(plan: PipelinePlan) -> None:
    """Check a plan. Raises PlanError: what is wrong, with the rank and the action."""
    for found in (_missing, _misplaced, _out_of_order, _stuck):  # each may rely on those before
        if (problem := next(found(plan), None)) is not None:
            raise PlanError(f"the pipeline schedule {plan.kind!r} is invalid: {problem}")


def _missing(plan: PipelinePlan) -> Iterator[str]:
    counts = Counter(action for actions in plan.actions for action in actions)
    parts = [
        (stage, i, j)
        for stage in range(plan.num_stages)
        for i in range(plan.num_micro_batches)
        for j in range(plan.num_slices)
    ]
    wanted = [Action(kind, *part) for part in parts for kind in ("F", "B", "W")]  # type: ignore[arg-type]
    for action in wanted:
        if counts[action] != 1:
            yield f"{action} is there {counts[action]} times"
    for action in counts.keys() - set(wanted):
        yield f"{action} is of no stage, micro-batch and slice"


def _misplaced(plan: PipelinePlan) -> Iterator[str]:
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if plan.rank_of[action.stage] != rank:
                yield f"rank {rank} has {action}, and stage {action.stage} is rank {plan.rank_of[action.stage]}'s"


def _out_of_order(plan: PipelinePlan) -> Iterator[str]:
    # actions that come before what they need on their own rank, or whose sums would be in another order
    for rank, actions in enumerate(plan.actions):
        at = {action: index for index, action in enumerate(actions)}
        for stage in plan.stages_of(rank):
            last: Action | None = None
            has_more = stage in (0, plan.num_stages - 1)  # an embedding or a head, whose gradients are summed by B
            for i in range(plan.num_micro_batches):
                for j in range(plan.num_slices):
                    f, b, w = (Action(kind, stage, i, j) for kind in ("F", "B", "W"))  # type: ignore[arg-type]
                    if not at[f] < at[b] < at[w]:
                        yield f"rank {rank} has {f}, {b} and {w} in another order"
                    if not plan.splits and at[w] != at[b] + 1:
                        yield f"rank {rank} has {w} not right after {b}, and one backward pass computes the two"
                    if j > 0 and at[f] < at[f._replace(slice=j - 1)]:
                        yield f"rank {rank} has {f} before the slice whose keys it needs"
                    if j > 0 and at[b] > at[b._replace(slice=j - 1)]:
                        yield f"rank {rank} has {b} after the slice that needs the gradient of its keys"
                # the order of the sums: micro-batches in order, and in each of them the slices as backward goes through them
                for j in reversed(range(plan.num_slices)):
                    w = Action("W", stage, i, j)
                    if last is not None and at[w] < at[last]:
                        yield f"rank {rank} has {w} before {last}: the sums of gradients would be in another order than with 1f1b"
                    b, last_b = w._replace(kind="B"), last and last._replace(kind="B")
                    if has_more and last_b is not None and at[b] < at[last_b]:
                        yield f"rank {rank} has {b} before {last_b}: the sums of the embedding or the head would be in another order"
                    last = w


def _stuck(plan: PipelinePlan) -> Iterator[str]:
    at, done = [0] * plan.num_ranks, set[Action]()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while at[rank] < len(actions):
                source = plan.source(actions[at[rank]])
                if source is not None and source not in done:
                    break
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    waits = [f"rank {r} at {actions[at[r]]}" for r, actions in enumerate(plan.actions) if at[r] < len(actions)]
    if waits:
        yield f"it ends nowhere: {', '.join(waits[:8])} wait for each other"
