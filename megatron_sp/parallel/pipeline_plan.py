"""Pipeline schedules as data: which rank computes what, in which order. Plain numbers, no torch.

A model is cut into stages, runs of its layers, and each rank has one or several. A batch is cut into micro-batches, and with
slices a micro-batch into runs of positions. What is left is a list of actions for each rank:

    F  forward of (stage, micro-batch, slice); its input comes from the stage before
    B  gradient of its input, which goes to the stage before, and of everything small (norms, biases, tables)
    W  gradients of its weight matrices, which nobody waits for

``pipeline_orders.py`` has the orders that the field knows; ``pipeline_check.py`` proves one before it runs, and
``pipeline_replay.py`` says how long it takes. Sends and receives follow from the actions (``PipelinePlan.messages``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "W"]
PipelineKind = Literal["1f1b", "interleaved", "zb1p", "zbv", "slices"]
KINDS: tuple[PipelineKind, ...] = ("1f1b", "interleaved", "zb1p", "zbv", "slices")


class Action(NamedTuple):
    """One piece of work of a rank; ``slice`` is 0 where micro-batches are whole."""

    kind: ActionKind
    stage: int
    micro_batch: int
    slice: int = 0

    def __str__(self) -> str:
        of_slice = f".{self.slice}" if self.slice else ""
        return f"{self.kind}{self.stage}:{self.micro_batch}{of_slice}"


class Costs(NamedTuple):
    """Time of the three kinds of actions of one stage, and of a message, in any unit.

    The order of zbv, and of zb1p with several stages on a rank, follows from them: what is put off goes where there is room for it.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    message: float = 0.0

    def of(self, kind: ActionKind) -> float:
        """Return the time of a kind of action."""
        return self.forward if kind == "F" else self.backward if kind == "B" else self.weights


SAME_COSTS = Costs()


class Message(NamedTuple):
    """A tensor that goes from one rank to another: the output of ``action``, or with B the gradient of its input."""

    source: int
    target: int
    action: Action
    needed_by: Action


@dataclass(frozen=True)
class PipelinePlan:
    """Order of a step.

    Attributes:
        num_micro_batches, num_slices: of a step, and of a micro-batch.
    """

    kind: str
    rank_of: tuple[int, ...]  # the rank of each stage, in the order of the stages
    num_micro_batches: int
    num_slices: int
    actions: tuple[tuple[Action, ...], ...]  # of each rank, in order
    # a B computes the gradient of its input alone, and sends it before its W runs. Else its W follows at once, and the
    # two are one backward pass, whose result is there at its end.
    splits: bool = True

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, p."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the layers."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def source(self, action: Action) -> Action | None:
        """Return the action of another stage that an action waits for; None: it needs nothing but its own rank's work."""
        neighbour = action.stage + (-1 if action.kind == "F" else 1)
        if action.kind == "W" or not 0 <= neighbour < self.num_stages:
            return None
        return action._replace(stage=neighbour)

    def messages(self, rank: int) -> list[Message]:
        """Return what a rank sends to others, in the order in which it is made."""
        found = []
        for action in self.actions[rank]:
            neighbour = action.stage + (1 if action.kind == "F" else -1)
            if action.kind == "W" or not 0 <= neighbour < self.num_stages or self.rank_of[neighbour] == rank:
                continue
            found.append(Message(rank, self.rank_of[neighbour], action, action._replace(stage=neighbour)))
        return found

    def _neighbours(self, rank: int) -> list[int]:
        pairs = zip(self.rank_of, self.rank_of[1:], strict=False)
        return sorted({a + b - rank for a, b in pairs if rank in (a, b) and a != b})

    def posts(self, rank: int) -> dict[int, list[Message]]:
        """Return the messages whose receives a rank posts before each action: one action ahead, in the order of each channel."""
        place = {action: index for index, action in enumerate(self.actions[rank])}
        found: dict[int, list[Message]] = {}
        for source in self._neighbours(rank):
            due = len(place)
            for message in reversed([m for m in self.messages(source) if m.target == rank]):
                due = min(due, max(0, place[message.needed_by] - 1))
                found.setdefault(due, []).insert(0, message)
        return found

    def received_before(self, rank: int) -> dict[Action, int]:
        """Return for each message to a rank, by what makes it, how many of the rank's own to its maker have been received before."""
        found: dict[Action, int] = {}
        sent = self.messages(rank)
        for source in self._neighbours(rank):
            needed = [message.needed_by for message in sent if message.target == source]
            mine = {message.action for message in self.messages(source) if message.target == rank}
            at, done = 0, set[Action]()
            for action in self.actions[source]:
                done.add(action)
                while at < len(needed) and needed[at] in done:
                    at += 1
                if action in mine:
                    found[action] = at
        return found

    def in_flight(self, rank: int) -> int:
        """Return the most (stage, micro-batch, slice) whose activations a rank holds at a time, from F until W has run."""
        most = now = 0
        for action in self.actions[rank]:
            now += {"F": 1, "B": 0, "W": -1}[action.kind]
            most = max(most, now)
        return most

    def text(self) -> str:
        """Return the actions, a line for each rank."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))


class PlanError(ValueError):
    """Sizes that a kind of schedule does not have."""
