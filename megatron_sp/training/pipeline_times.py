"""When the ranks of a pipeline computed what in a step, and when they would have with nothing to wait for but each other.

    measured   begin and end of each action on each rank (``pipeline.Timeline``), on one time axis
    planned    the same schedule replayed (``pipeline_replay.py``), each action as long as those of its kind, stage and slice took on
               average in that step, and messages free

Both have the same work; the measured one is longer by messages, by the host, and by actions that took longer than others.

Each rank has times of its own clock since the start of its step. All ranks start together: a step with a pipeline begins
with a comparison of what they have read (``same_sequences.py``), and the recorder with its end, at which on a GPU nothing is
queued (the recorded step before has settled). What is left of a difference is corrected by messages: none has arrived before
it was sent (``clock_shifts``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from megatron_sp.comm.recorder import StepTimes
from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan
from megatron_sp.parallel.pipeline_replay import replay


class Box(NamedTuple):
    """An action with its begin and end, in seconds."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """Actions of a step.

    Attributes:
        rows: of each pipeline rank, in order; times since the first of them began.
    """

    rows: tuple[tuple[Box, ...], ...]

    @property
    def seconds(self) -> float:
        """Time from the begin of the first action to the end of the last."""
        return max((box.end for row in self.rows for box in row), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of this time in which the ranks wait."""
        busy = sum(box.end - box.begin for row in self.rows for box in row)
        return 1 - busy / (self.seconds * len(self.rows)) if self.seconds else 0.0


@dataclass(frozen=True)
class RankTimes:
    """Times of a rank in a step, in seconds of its clock since the step began there.

    Attributes:
        actions: in order.
        sent: when each message was sent, by the action that made it.
        received: when each message was there at the latest, and how long the rank waited for it until then.
    """

    actions: list[Box]
    sent: dict[str, float]
    received: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, step: StepTimes) -> RankTimes:
        """Take what a recorder knows of a step."""
        messages = [flight for flight in step.flights if flight.what.pipe is not None]
        return cls(
            [Box(*each) for each in step.actions],
            {flight.name: flight.begin for flight in messages if flight.what.op == "send"},
            {flight.name: (flight.end, flight.exposed) for flight in messages if flight.what.op == "receive"},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the same in lists and dictionaries."""
        return {"actions": [[*box.action, box.begin, box.end] for box in self.actions], "sent": self.sent, "received": self.received}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> RankTimes:
        """Return what ``as_json`` was made of."""
        actions = [Box(Action(*row[:4]), *row[4:]) for row in found["actions"]]
        return cls(actions, found["sent"], {name: (end, exposed) for name, (end, exposed) in found["received"].items()})


def clock_shifts(ranks: Sequence[RankTimes]) -> list[float]:
    """Return the seconds to add to each rank's times: the least that lets no message arrive before it was sent; 0 for the first rank.

    A message from a rank to the next says that the next one's clock is at most so much behind, a message back at most so much
    ahead.
    """
    shifts = [0.0]
    for above, below in pairwise(ranks):
        down, up = _delays(above, below), _delays(below, above)
        least, most = max((-delay for delay in down), default=-math.inf), min(up, default=math.inf)
        shifts.append(shifts[-1] + max(least, min(0.0, most)))
    return shifts


def _delays(source: RankTimes, target: RankTimes) -> list[float]:
    """Return the time of each message from one rank to another, each end by the clock of its rank."""
    return [end - source.sent[name] for name, (end, _) in target.received.items() if name in source.sent]


def measured(plan: PipelinePlan, ranks: Sequence[RankTimes]) -> Timetable:
    """Return the timetable that the ranks have measured; backward passes that are one have one box, a B."""
    rows = []
    for rank, shift in zip(ranks, clock_shifts(ranks), strict=True):
        row: list[Box] = []
        for action, begin, end in rank.actions:
            if action.kind == "W" and not plan.splits:
                row[-1] = row[-1]._replace(end=end + shift)
            else:
                row.append(Box(action, begin + shift, end + shift))
        rows.append(row)
    first = min((box.begin for row in rows for box in row), default=0.0)
    return Timetable(tuple(tuple(Box(action, begin - first, end - first) for action, begin, end in row) for row in rows))


def planned(plan: PipelinePlan, took: Timetable) -> Timetable:
    """Return the replay of a plan, with the mean times of the actions of a measured timetable."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in took.rows:
        for (kind, stage, _, part), begin, end in row:
            times[kind, stage, part].append(end - begin)
    mean = {key: fmean(values) for key, values in times.items()}
    # a W that has no box is part of its B
    found = replay(plan, lambda action: mean.get((action.kind, action.stage, action.slice), 0.0))
    drawn = [[action for action in actions if plan.splits or action.kind != "W"] for actions in plan.actions]
    return Timetable(tuple(tuple(Box(action, found.start[action], found.stop[action]) for action in actions) for actions in drawn))


class Waits(NamedTuple):
    """Seconds that the ranks of a pipeline waited for messages in a step, added up: until they were sent, and until they were there."""

    until_sent: float
    under_way: float


def waits_for_messages(ranks: Sequence[RankTimes]) -> Waits:
    """Return how long ranks waited for what had not been sent, and how long for messages under way."""
    shifts = clock_shifts(ranks)
    sent = {name: at + shift for rank, shift in zip(ranks, shifts, strict=True) for name, at in rank.sent.items()}
    before = after = 0.0
    for rank, shift in zip(ranks, shifts, strict=True):
        for name, (end, exposed) in rank.received.items():
            # a sender's clock may be known less well than a message is short
            idle = min(exposed, max(0.0, sent[name] - (end + shift - exposed)))
            before, after = before + idle, after + exposed - idle
    return Waits(before, after)
