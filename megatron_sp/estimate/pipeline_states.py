"""Counts of what a pipeline rank holds while it computes an action of its plan: other passes, what is put off, messages.

A plan is walked as ``parallel/pipeline.py`` runs it. Everything is counted, nothing is in bytes: that is left to
``estimate/memory_pipeline.py``. Of many actions that differ only in what they hold, those are left that hold most.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from megatron_sp.parallel.pipeline_plan import Action, ActionKind, PipelinePlan


class Part(NamedTuple):
    """Units of a stage whose gradients come in the same actions.

    Attributes:
        stage: among the rank's stages, from 0.
        blocks: True: its blocks; False: embedding and head, whose gradients are never put off.
    """

    stage: int
    blocks: bool


class PassState(NamedTuple):
    """Counts of what a rank holds beside an action that it computes.

    Attributes:
        kind, slice: of the action.
        stage: of the action, among the rank's stages, from 0.
        is_last: a B or W that completes the step's last micro-batch.
        alive: passes between F and B, of each stage and slice (``stage * num_slices + slice``), without the action's own.
        waiting: backward passes whose W is to come, in the same places; with W the action's own are among them.
        messages: tensors received and not used yet or on their way in either direction, of each slice.
        begun: parts that have gradients of this step already.
        ended: parts that are complete, in that order.
        latest: part that has been completed last, of any micro-batch.
        is_new: it was for the first time.
        partial: micro-batches of which some slices have been backward, of each stage, and others have not.
    """

    kind: ActionKind
    stage: int
    slice: int
    is_last: bool
    alive: tuple[int, ...]
    waiting: tuple[int, ...]
    messages: tuple[int, ...]
    begun: frozenset[Part]
    ended: tuple[Part, ...]
    latest: Part | None
    is_new: bool
    partial: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """All counts."""
        return (*self.alive, *self.waiting, *self.messages)


@lru_cache(maxsize=256)
def states_of(plan: PipelinePlan, rank: int, zero_stage: int) -> tuple[PassState, ...]:
    """Return the states of a rank in a step, without those in which another of the same action holds as much of everything.

    Args:
        plan: schedule of a step.
        rank: pipeline rank.
        zero_stage: at 0 it does not matter which gradients are complete.
    """
    walk = _Walk(plan, rank)
    largest: dict[tuple[object, ...], list[PassState]] = {}
    for index, action in enumerate(plan.actions[rank]):
        state = walk.step(index, action)
        if action.kind == "W" and not plan.splits:
            continue  # B has done it
        if zero_stage == 0:
            state = state._replace(ended=(), latest=None, is_new=False)
        elif zero_stage == 1:
            state = state._replace(latest=None, is_new=False)
        else:
            state = state._replace(ended=(), is_last=False)
        alike = largest.setdefault((*state[:4], *state[7:]), [])
        if not any(_is_within(state, other) for other in alike):
            alike[:] = [other for other in alike if not _is_within(other, state)] + [state]
    return tuple(state for alike in largest.values() for state in alike)


def _is_within(state: PassState, other: PassState) -> bool:
    return all(a <= b for a, b in zip(state.held, other.held, strict=True))


class _Walk:
    """A rank on its way through its actions."""

    def __init__(self, plan: PipelinePlan, rank: int) -> None:
        self.plan, self.rank, self.stages = plan, rank, plan.stages_of(rank)
        size = len(self.stages) * plan.num_slices
        self.alive, self.waiting, self.messages = [0] * size, [0] * size, [0] * plan.num_slices
        self.partial = [0] * len(self.stages)
        self.begun: set[Part] = set()
        self.ended: list[Part] = []
        self.latest: Part | None = None
        self.is_new = False
        self._posts, self._received = plan.posts(rank), plan.received_before(rank)
        self._sent: dict[int, list[Action]] = {}  # to each rank, those not known to have arrived
        self._gone: dict[int, int] = {}

    def step(self, index: int, action: Action) -> PassState:
        """Do an action; return what is held beside it."""
        for message in self._posts.get(index, ()):
            self.messages[message.action.slice] += 1
        self._take(action)
        stage = self.stages.index(action.stage)
        at = stage * self.plan.num_slices + action.slice
        if action.kind == "B":
            self.alive[at] -= 1
        is_last = action.kind != "F" and action.micro_batch == self.plan.num_micro_batches - 1 and action.slice == 0
        state = PassState(
            action.kind, stage, action.slice, is_last, tuple(self.alive), tuple(self.waiting), tuple(self.messages), frozenset(self.begun),
            tuple(self.ended), self.latest, self.is_new, tuple(self.partial),
        )  # fmt: skip
        if action.kind == "B" and self.plan.num_slices > 1:  # the last slice comes first
            self.partial[stage] += (action.slice == self.plan.num_slices - 1) - (action.slice == 0)
        if action.kind == "F":
            self.alive[at] += 1
        elif self.plan.splits:
            self.waiting[at] += 1 if action.kind == "B" else -1
        self._give(action)
        for part in self._parts(action, stage):
            if action.slice == 0:
                self.latest, self.is_new = part, action.micro_batch == 0
            self.begun.add(part)
            if is_last:
                self.ended.append(part)
        return state

    def _take(self, action: Action) -> None:
        """Use what an action waits for; a message shows that others have arrived before."""
        source = self.plan.source(action)
        if source is None:
            return
        self.messages[source.slice] -= 1
        other = self.plan.rank_of[source.stage]
        if other == self.rank:
            return
        sent = self._sent.setdefault(other, [])
        while self._gone.get(other, 0) < self._received[source]:
            self.messages[sent.pop(0).slice] -= 1
            self._gone[other] = self._gone.get(other, 0) + 1

    def _give(self, action: Action) -> None:
        """Send the result of an action, or keep it for another stage of this rank."""
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= neighbour < self.plan.num_stages:
            return
        self.messages[action.slice] += 1
        if (target := self.plan.rank_of[neighbour]) != self.rank:
            self._sent.setdefault(target, []).append(action)

    def _parts(self, action: Action, stage: int) -> Iterable[Part]:
        """Return the parts that an action has written gradients of, in that order."""
        blocks, last = action.kind == ("W" if self.plan.splits else "B"), self.plan.num_stages - 1
        if action.kind == "B" and action.stage == last:
            yield Part(stage, blocks=False)
        if blocks:
            yield Part(stage, blocks=True)
        if action.kind == "B" and action.stage == 0 < last:
            yield Part(stage, blocks=False)
