"""Timeline of a step on one rank: when collectives ran, when it waited for them, and what it computed meanwhile.

    compute     | projection | attention ......... | wait | attention | output projection | ...     marks cut it
    exchanges     |--- qkv ---|   |------- qkv -------|                                             one record each

The *exposed* time of a collective is the time that its ``wait()`` blocked; on a GPU, the compute stream was idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist

Axis = Literal["cp", "ep", "pp", "sp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
Pipe = tuple[int, int]  # source and target of messages, as ranks of a pipeline
Direction = Literal["forward", "backward", "update"]
Moment = Any  # what a clock's now() gives: seconds, or a CUDA event
WAIT = "wait"


class Clock(Protocol):
    """Clock of the stream that computes: ``now`` does not wait, ``seconds`` may be asked after ``settle``."""

    def now(self) -> Moment: ...

    def settle(self) -> None: ...

    def seconds(self, begin: Moment, end: Moment) -> float: ...

    # call ``tell`` with the moment at which a collective ends, if it is known; a lane keeps its order
    def when_done(self, work: dist.Work, lane: Axis | Pipe, tell: Callable[[Moment], None]) -> None: ...


class WallClock:
    """Clock of the host."""

    def now(self) -> Moment:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, begin: Moment, end: Moment) -> float:
        return float(end - begin)

    def when_done(self, work: dist.Work, lane: Axis | Pipe, tell: Callable[[Moment], None]) -> None:
        try:
            future = work.get_future()
        except RuntimeError:  # a backend without futures: the flight then ends with its wait
            return
        future.add_done_callback(lambda _: tell(time.perf_counter()))


class CudaClock:
    """Clock of CUDA events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watchers: dict[Axis | Pipe, torch.cuda.Stream] = {axis: torch.cuda.Stream(device) for axis in AXES}

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: Moment, end: Moment) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def when_done(self, work: dist.Work, lane: Axis | Pipe, tell: Callable[[Moment], None]) -> None:
        # flights of a group end in the order in which they began, so one stream for each group can wait for them. With
        # this wait torch forgets the tensors: the handle keeps them until the compute stream has waited too
        if lane not in self._watchers:
            self._watchers[lane] = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._watchers[lane]):
            work.wait()
            tell(self.now())


class Collective(NamedTuple):
    """Enough to run a collective of the same size."""

    axis: Axis
    op: str  # all_to_all, all_reduce, all_gather or reduce_scatter; between stages send or receive
    sends: tuple[int, ...]  # elements of the input; of an all_to_all, to each rank; of a receive none
    receives: tuple[int, ...]  # elements of the output; of an all_to_all, from each rank; of a send none
    dtype: str  # torch's name, such as float32
    pipe: Pipe | None = None  # source and target of a message; None for a collective


@dataclass
class CollectiveRecord:
    """When a collective was started, waited for and complete."""

    recorder: Recorder
    what: Collective
    name: str  # what it transfers; of a message the action that made it
    layer: int | None  # index of its block; None for embedding or head; of a message the stage that made it
    direction: Direction
    began: Moment
    ended: Moment | None = None  # None: not known
    waits: tuple[Moment, Moment] | None = None  # begin and end of the wait for it; None if nobody has waited

    def watch(self, work: dist.Work) -> None:
        # once the collective has been started
        self.recorder.flights.append(self)
        self.recorder.clock.when_done(work, self.what.pipe or self.what.axis, partial(setattr, self, "ended"))

    def wait(self, work: dist.Work) -> None:
        recorder, computing = self.recorder, self.recorder.marks[-1]
        begin = recorder.clock.now()
        recorder.marks.append(Mark(begin, WAIT, computing.layer, recorder.direction))
        work.wait()
        self.waits = begin, recorder.clock.now()
        # the computation before the wait goes on
        recorder.marks.append(Mark(self.waits[1], computing.label, computing.layer, recorder.direction))


class Mark(NamedTuple):
    """Moment from which this rank computes something else, or waits."""

    at: Moment
    label: str
    layer: int | None
    direction: Direction


@dataclass(frozen=True)
class CallSite:
    """A recorder with its user's place in the model."""

    recorder: Recorder
    axis: Axis  # axis of its collectives
    layer: int | None = None  # its block; None for embedding or head; for messages the stage that makes them
    pipe: Pipe | None = None  # source and target of its messages
    direction: Direction | None = None  # pass that its messages belong to; None: the one that is computed

    def start(
        self, op: str, sends: tuple[int, ...], receives: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> CollectiveRecord | None:
        # a new record right before a collective is started; None while nothing is recorded
        recorder = self.recorder
        if not recorder.recording:
            return None
        what = Collective(self.axis, op, sends, receives, str(dtype).removeprefix("torch."), self.pipe)
        direction = self.direction or recorder.direction
        return CollectiveRecord(recorder, what, name, self.layer, direction, recorder.clock.now())

    def mark(self, label: str) -> None:
        if self.recorder.recording:
            self.recorder.mark(label, self.layer)


class Span(NamedTuple):
    """A computation or a wait, in seconds of the step."""

    label: str
    layer: int | None
    direction: Direction
    begin: float
    end: float


class CollectiveTimes(NamedTuple):
    """A collective, in seconds of the step."""

    what: Collective
    name: str
    layer: int | None
    direction: Direction
    begin: float
    end: float
    exposed: float


@dataclass
class StepTimes:
    """One step, in seconds after its start."""

    seconds: float
    spans: list[Span] = field(default_factory=list)  # computations and waits, without gaps
    flights: list[CollectiveTimes] = field(default_factory=list)  # collectives and messages
    # with a pipeline, the actions of its schedule as (action, begin, end)
    actions: list[tuple[Any, float, float]] = field(default_factory=list)


class Recorder:
    """Computations and collectives of some steps."""

    def __init__(self, clock: Clock, num_steps: int) -> None:
        self.clock, self.num_steps = clock, num_steps
        self.steps: list[StepTimes] = []
        self.recording = False
        self.direction: Direction = "forward"
        self.flights: list[CollectiveRecord] = []
        # of a pipeline; set by who runs them (``pipeline.Timeline``)
        self.actions: list[tuple[Any, Moment, Moment]] = []
        self.marks: list[Mark] = []
        self._began: Moment = None

    def at(self, axis: Axis, layer: int | None = None) -> CallSite:
        return CallSite(self, axis, layer)

    @property
    def is_complete(self) -> bool:
        return len(self.steps) >= self.num_steps

    def start_step(self) -> None:
        # drops what an error has left of an earlier step
        self.flights, self.actions, self.marks = [], [], []
        self.recording = not self.is_complete
        if self.recording:
            self._began = self.clock.now()
            self.enter("forward")

    def enter(self, direction: Direction) -> None:
        # a pass of the step; recomputation counts as part of the backward pass
        self.direction = direction
        if self.recording:
            self.mark("other", None)

    def end_step(self) -> None:
        # waits for the device
        if not self.recording:
            return
        self.recording = False
        end = self.clock.now()
        self.clock.settle()
        at = lambda moment: self.clock.seconds(self._began, moment)
        step = StepTimes(at(end))
        for mark, following in zip(self.marks, [*(m.at for m in self.marks[1:]), end], strict=True):
            step.spans.append(Span(mark.label, mark.layer, mark.direction, at(mark.at), at(following)))
        for flight in self.flights:
            begin = at(flight.began)
            waited = None if flight.waits is None else (at(flight.waits[0]), at(flight.waits[1]))
            # gloo's thread may report it only after the waiting thread has gone on
            ends = [at(flight.ended)] if flight.ended is not None else []
            ends += [waited[1]] if waited is not None else []
            exposed = 0.0 if waited is None else waited[1] - waited[0]
            times = begin, max(begin, min(ends, default=begin)), exposed
            step.flights.append(CollectiveTimes(flight.what, flight.name, flight.layer, flight.direction, *times))
        step.actions = [(action, at(begin), at(end)) for action, begin, end in self.actions]
        self.steps.append(step)
        self.flights, self.actions, self.marks = [], [], []

    def mark(self, label: str, layer: int | None) -> None:
        self.marks.append(Mark(self.clock.now(), label, layer, self.direction))
