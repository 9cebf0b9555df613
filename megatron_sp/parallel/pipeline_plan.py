"""Pipeline schedules as data: who computes what, in which order; their check and replay."""

# A model is cut into stages, runs of its layers, and each rank has one or several. A batch is cut into micro-batches,
# and with slices a micro-batch into runs of positions. What is left is a list of actions for each rank:
#
#     F  forward of (stage, micro-batch, slice); its input comes from the stage before
#     B  gradient of its input, which goes to the stage before, and of everything small (norms, biases, tables)
#     W  gradients of its weight matrices, which nobody waits for

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "W"]
PipelineKind = Literal["1f1b", "interleaved", "zb1p", "zbv", "slices"]
KINDS: tuple[PipelineKind, ...] = ("1f1b", "interleaved", "zb1p", "zbv", "slices")


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: ActionKind
    stage: int
    micro_batch: int
    slice: int = 0  # where micro-batches are whole

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}:{self.micro_batch}" + (f".{self.slice}" if self.slice else "")


class Costs(NamedTuple):
    """Times of the kinds of actions of a stage, and of a message, in any unit."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    message: float = 0.0

    def of(self, kind: ActionKind) -> float:
        return self.forward if kind == "F" else self.backward if kind == "B" else self.weights


SAME_COSTS = Costs()


class Message(NamedTuple):
    """A result on its way to another rank."""

    source: int
    target: int
    action: Action
    needed_by: Action


class PlanError(ValueError):
    """Sizes that a kind of schedule does not have, or an order that cannot run."""


@dataclass(frozen=True)
class PipelinePlan:
    """Order of a step."""

    kind: str
    rank_of: tuple[int, ...]  # the rank of each stage, in the order of the stages
    num_micro_batches: int  # of a step
    num_slices: int  # of a micro-batch
    actions: tuple[tuple[Action, ...], ...]  # of each rank, in order
    # a B computes the gradient of its input alone, and sends it before its W runs. Else its W follows at once, and the
    # two are one backward pass, whose result is there at its end.
    splits: bool = True

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def source(self, action: Action) -> Action | None:
        """Return the action of another stage that an action waits for."""
        neighbour = action.stage + (-1 if action.kind == "F" else 1)
        has_source = action.kind != "W" and 0 <= neighbour < self.num_stages
        return action._replace(stage=neighbour) if has_source else None

    def messages(self, rank: int) -> list[Message]:
        """Return what a rank sends to others, in the order in which it is made."""
        sent = []
        for action in self.actions[rank]:
            neighbour = action.stage + (1 if action.kind == "F" else -1)
            if action.kind != "W" and 0 <= neighbour < self.num_stages and self.rank_of[neighbour] != rank:
                sent.append(Message(rank, self.rank_of[neighbour], action, action._replace(stage=neighbour)))
        return sent

    def _neighbours(self, rank: int) -> list[int]:
        pairs = zip(self.rank_of, self.rank_of[1:], strict=False)
        return sorted({a + b - rank for a, b in pairs if rank in (a, b) and a != b})

    def posts(self, rank: int) -> dict[int, list[Message]]:
        """Return what a rank starts to receive before each action, one ahead."""
        place = {action: index for index, action in enumerate(self.actions[rank])}
        posts: dict[int, list[Message]] = {}
        for source in self._neighbours(rank):
            due = len(place)
            # from the last one: a receive is posted no later than those behind it in its channel
            for message in reversed([m for m in self.messages(source) if m.target == rank]):
                due = min(due, max(0, place[message.needed_by] - 1))
                posts.setdefault(due, []).insert(0, message)
        return posts

    def received_before(self, rank: int) -> dict[Action, int]:
        """Return, by each message to a rank, how many of its own the maker has by then."""
        counts: dict[Action, int] = {}
        own = self.messages(rank)
        for source in self._neighbours(rank):
            needed = [message.needed_by for message in own if message.target == source]
            to_rank = {message.action for message in self.messages(source) if message.target == rank}
            num_received, done = 0, set[Action]()
            for action in self.actions[source]:
                done.add(action)
                while num_received < len(needed) and needed[num_received] in done:
                    num_received += 1
                if action in to_rank:
                    counts[action] = num_received
        return counts

    def in_flight(self, rank: int) -> int:  # most parts whose activations a rank holds at a time, from F until W
        most = now = 0
        for action in self.actions[rank]:
            now += {"F": 1, "B": 0, "W": -1}[action.kind]
            most = max(most, now)
        return most

    def text(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))


def check_plan(plan: PipelinePlan) -> None:
    """Prove that a plan has every action once, cannot hang and sums in the order of 1F1B."""
    if (problem := next(_problems(plan), None)) is not None:
        raise PlanError(f"the pipeline schedule {plan.kind!r} is invalid: {problem}")


def _problems(plan: PipelinePlan) -> Iterator[str]:
    # only the first one is asked for: each part relies on those before it
    counts = Counter(action for actions in plan.actions for action in actions)
    parts = product(range(plan.num_stages), range(plan.num_micro_batches), range(plan.num_slices))
    wanted = [Action(kind, *part) for part in parts for kind in ("F", "B", "W")]  # type: ignore[arg-type]
    for action in wanted:
        if counts[action] != 1:
            yield f"{action} is there {counts[action]} times"
    for action in counts.keys() - set(wanted):
        yield f"{action} is of no stage, micro-batch and slice"
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if plan.rank_of[action.stage] != rank:
                yield f"rank {rank} has {action}, and stage {action.stage} is rank {plan.rank_of[action.stage]}'s"
    for rank in range(plan.num_ranks):
        yield from _problems_of_order(plan, rank)

    # the ranks' lists as they would run: a rank does its next action once what it needs has been made, and a send waits
    # for nobody. Where none can go on before the end, all would wait for ever.
    place, done = [0] * plan.num_ranks, set[Action]()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while place[rank] < len(actions):
                source = plan.source(actions[place[rank]])
                if source is not None and source not in done:
                    break
                done.add(actions[place[rank]])
                place[rank] += 1
                moved = True
    waits = [f"rank {r} at {actions[place[r]]}" for r, actions in enumerate(plan.actions) if place[r] < len(actions)]
    if waits:
        yield f"it ends nowhere: {', '.join(waits[:8])} wait for each other"


def _problems_of_order(plan: PipelinePlan, rank: int) -> Iterator[str]:
    # actions that come before what they need on their own rank, or whose sums would be in another order
    place = {action: index for index, action in enumerate(plan.actions[rank])}
    for stage in plan.stages_of(rank):
        last: Action | None = None
        has_more = stage in (0, plan.num_stages - 1)  # an embedding or a head, whose gradients are summed by B
        for i in range(plan.num_micro_batches):
            for j in range(plan.num_slices):
                f, b, w = (Action(kind, stage, i, j) for kind in ("F", "B", "W"))  # type: ignore[arg-type]
                if not place[f] < place[b] < place[w]:
                    yield f"rank {rank} has {f}, {b} and {w} in another order"
                if not plan.splits and place[w] != place[b] + 1:
                    yield f"rank {rank} has {w} not right after {b}, and one backward pass computes the two"
                if j > 0 and place[f] < place[f._replace(slice=j - 1)]:
                    yield f"rank {rank} has {f} before the slice whose keys it needs"
                if j > 0 and place[b] > place[b._replace(slice=j - 1)]:
                    yield f"rank {rank} has {b} after the slice that needs the gradient of its keys"
            # the sums: micro-batches in order, and in each of them the slices as backward goes through them
            for j in reversed(range(plan.num_slices)):
                w = Action("W", stage, i, j)
                if last is not None and place[w] < place[last]:
                    text = "the sums of gradients would be in another order than with 1f1b"
                    yield f"rank {rank} has {w} before {last}: {text}"
                b, last_b = w._replace(kind="B"), last and last._replace(kind="B")
                if has_more and last_b is not None and place[b] < place[last_b]:
                    text = "the sums of the embedding or the head would be in another order"
                    yield f"rank {rank} has {b} before {last_b}: {text}"
                last = w


@dataclass(frozen=True)
class Replay:
    """Times of a step, from its beginning."""

    start: dict[Action, float]
    stop: dict[Action, float]
    time: float
    busy: tuple[float, ...]  # time that each rank computes

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / (self.time * len(self.busy)) if self.time else 0.0


def replay(
    plan: PipelinePlan, seconds: Callable[[Action], float], message: Callable[[Action], float] = lambda action: 0.0
) -> Replay:
    """Return when each action begins and ends if a rank waits for its inputs alone.

    ``message``: time from an action's end until its result is on the next rank.
    """
    start, stop, made_at = dict[Action, float](), dict[Action, float](), dict[Action, float]()
    place, free_at, busy = [0] * plan.num_ranks, [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
    ready = list(range(plan.num_ranks))
    waiting: dict[Action, int] = {}  # the rank that waits for an action
    while ready:
        rank = ready.pop()
        while place[rank] < len(plan.actions[rank]):
            action = plan.actions[rank][place[rank]]
            source, begin = plan.source(action), free_at[rank]
            if source is not None:
                if source not in made_at:
                    waiting[source] = rank
                    break
                crosses = plan.rank_of[source.stage] != rank
                begin = max(begin, made_at[source] + (message(source) if crosses else 0.0))
            took = seconds(action)
            start[action], stop[action] = begin, begin + took
            free_at[rank], busy[rank] = begin + took, busy[rank] + took
            place[rank] += 1
            output = action
            if not plan.splits and action.kind != "F":  # the gradient of the input is there when both have run
                output = action._replace(kind="B")
                if action.kind == "B":
                    continue
            made_at[output] = begin + took
            if output in waiting:
                ready.append(waiting.pop(output))
    return Replay(start, stop, max(free_at), tuple(busy))


def replay_costs(plan: PipelinePlan, costs: Costs) -> Replay:
    """Return the replay of a plan whose stages all take the same time."""
    return replay(plan, lambda action: costs.of(action.kind), lambda action: costs.message)
