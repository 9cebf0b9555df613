"""When collectives ran, when somebody waited for them, and what was computed meanwhile: one rank's time line of a step.

Nothing global: the objects that start collectives (``SequenceParallel``, ``TensorParallel``) carry a ``CallSite``, which is a recorder and
where in the model they stand. Without one nothing is recorded, at the price of one ``is None``.

    compute     | projection | attention ......... | wait | attention | output projection | ...     marks cut it, waits interrupt it
    exchanges     |--- qkv ---|   |------- qkv -------|                                             one record each, from start to end

A flight's *exposed* time is what its ``wait()`` blocked. On CPU times are those of the wall clock, and a flight ends when gloo's thread
says so. On CUDA they are events: those of marks and waits on the compute stream, so "blocked" means that the stream stood still, and the
end of a flight on a stream that waits for nothing but its group's collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

Axis = Literal["sp", "tp"]
Direction = Literal["forward", "backward", "update"]
Moment = Any  # what a clock's now() gives: seconds, or a CUDA event
WAIT = "wait"


class Clock(Protocol):
    """What time it is on the stream that computes."""

    def now(self) -> Moment:
        """This moment; no synchronization."""

    def settle(self) -> None:
        """Wait until all moments so far have come."""

    def seconds(self, begin: Moment, end: Moment) -> float:
        """From one moment to another; only behind ``settle``."""

    def when_done(self, work: dist.Work, axis: Axis, tell: Callable[[Moment], None]) -> None:
        """Tell the moment at which a collective ends, without making anybody wait; not at all if that cannot be known."""


class WallClock:
    """Of the host, for collectives on CPU tensors."""

    def now(self) -> Moment:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, begin: Moment, end: Moment) -> float:
        return float(end - begin)

    def when_done(self, work: dist.Work, axis: Axis, tell: Callable[[Moment], None]) -> None:
        try:
            future = work.get_future()
        except RuntimeError:  # a backend without futures: the flight then ends with its wait
            return
        future.add_done_callback(lambda _: tell(time.perf_counter()))


class CudaClock:
    """Events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watchers: dict[Axis, torch.cuda.Stream] = {"sp": torch.cuda.Stream(device), "tp": torch.cuda.Stream(device)}

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: Moment, end: Moment) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def when_done(self, work: dist.Work, axis: Axis, tell: Callable[[Moment], None]) -> None:
        # flights of one group end in the order in which they began, so one stream for each group can wait for them, one after another.
        # With this wait torch forgets the tensors: the handle keeps them until the compute stream has waited too.
        with torch.cuda.stream(self._watchers[axis]):
            work.wait()
            tell(self.now())


class Collective(NamedTuple):
    """What is needed to run a collective of the same size again.

    Attributes:
        axis: the group.
        op: all_to_all, all_reduce, all_gather or reduce_scatter.
        sends: elements this rank puts in; of an all_to_all for each rank.
        receives: elements it gets out; of an all_to_all from each rank.
        dtype: as torch names it, such as float32.
    """

    axis: Axis
    op: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    dtype: str


@dataclass
class CollectiveRecord:
    """One collective.

    Attributes:
        name: what it carries.
        layer: of which block; None: embedding or head.
        began: when it was started.
        ended: when its result was there; None: not known.
        waits: begin and end of the wait for it.
    """

    recorder: Recorder
    what: Collective
    name: str
    layer: int | None
    direction: Direction
    began: Moment
    ended: Moment | None = None
    waits: tuple[Moment, Moment] | None = None

    def watch(self, work: dist.Work) -> None:
        """The collective is on its way."""
        self.recorder.flights.append(self)
        self.recorder.clock.when_done(work, self.what.axis, self._end)

    def _end(self, moment: Moment) -> None:
        self.ended = moment

    def wait(self, work: dist.Work) -> None:
        """Wait for the collective, and write down how long."""
        begin = self.recorder.stop_computing()
        work.wait()
        self.waits = begin, self.recorder.go_on_computing(self)


class Mark(NamedTuple):
    """From here on this rank computes something else (or waits)."""

    at: Moment
    label: str
    layer: int | None
    direction: Direction


@dataclass(frozen=True)
class CallSite:
    """A recorder, and where in the model its user stands: the axis of its collectives, and the block (None: embedding or head)."""

    recorder: Recorder
    axis: Axis
    layer: int | None = None

    def start(self, op: str, sends: tuple[int, ...], receives: tuple[int, ...], dtype: torch.dtype, name: str) -> CollectiveRecord | None:
        """To be called right before a collective is started; None while nothing is recorded."""
        recorder = self.recorder
        if not recorder.recording:
            return None
        what = Collective(self.axis, op, sends, receives, str(dtype).removeprefix("torch."))
        return CollectiveRecord(recorder, what, name, self.layer, recorder.direction, recorder.clock.now())

    def mark(self, label: str) -> None:
        """What is computed from here on."""
        if self.recorder.recording:
            self.recorder.mark(label, self.layer)


class Span(NamedTuple):
    """Something that took a while: a computation, or a wait. Seconds after the step began."""

    label: str
    layer: int | None
    direction: Direction
    begin: float
    end: float


class CollectiveTimes(NamedTuple):
    """A flight in seconds after the step began, and how long somebody stood still for it."""

    what: Collective
    name: str
    layer: int | None
    direction: Direction
    begin: float
    end: float
    exposed: float


@dataclass
class StepTimes:
    """One step: how long it took, what was computed (and waited for) without gaps, and the collectives."""

    seconds: float
    spans: list[Span] = field(default_factory=list)
    flights: list[CollectiveTimes] = field(default_factory=list)


class Recorder:
    """Writes down the collectives of some steps.

    Args:
        clock: of the device that computes.
        num_steps: it stops recording after so many.
    """

    def __init__(self, clock: Clock, num_steps: int) -> None:
        self.clock, self.num_steps = clock, num_steps
        self.steps: list[StepTimes] = []
        self.recording = False
        self.direction: Direction = "forward"
        self.flights: list[CollectiveRecord] = []
        self._marks: list[Mark] = []
        self._began: Moment = None

    def at(self, axis: Axis, layer: int | None = None) -> CallSite:
        """For those who start collectives there."""
        return CallSite(self, axis, layer)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to record."""
        return len(self.steps) >= self.num_steps

    def start_step(self) -> None:
        """A step begins. What an error left of an earlier one is dropped."""
        self.flights, self._marks = [], []
        self.recording = not self.is_complete
        if self.recording:
            self._began = self.clock.now()
            self.enter("forward")

    def enter(self, direction: Direction) -> None:
        """Which pass of the step begins; recomputation counts to the backward pass, in which it happens."""
        self.direction = direction
        if self.recording:
            self.mark("other", None)

    def end_step(self) -> None:
        """The step is over. Waits for the device."""
        if not self.recording:
            return
        self.recording = False
        end = self.clock.now()
        self.clock.settle()
        at = lambda moment: self.clock.seconds(self._began, moment)
        step = StepTimes(at(end))
        for mark, following in zip(self._marks, [*(m.at for m in self._marks[1:]), end], strict=True):
            step.spans.append(Span(mark.label, mark.layer, mark.direction, at(mark.at), at(following)))
        for flight in self.flights:
            begin = at(flight.began)
            waited = None if flight.waits is None else (at(flight.waits[0]), at(flight.waits[1]))
            # gloo's thread may get to say so only after whoever waited has gone on
            known = [t for t in (None if flight.ended is None else at(flight.ended), waited and waited[1]) if t is not None]
            exposed = 0.0 if waited is None else waited[1] - waited[0]
            finish = max(begin, min(known, default=begin))
            step.flights.append(CollectiveTimes(flight.what, flight.name, flight.layer, flight.direction, begin, finish, exposed))
        self.steps.append(step)
        self.flights, self._marks = [], []

    def mark(self, label: str, layer: int | None) -> None:
        """What is computed from here on."""
        self._marks.append(Mark(self.clock.now(), label, layer, self.direction))

    def stop_computing(self) -> Moment:
        """A wait begins."""
        now = self.clock.now()
        last = self._marks[-1]
        self._marks.append(Mark(now, WAIT, last.layer, self.direction))
        return now

    def go_on_computing(self, flight: CollectiveRecord) -> Moment:
        """The wait is over, and what was computed before it goes on."""
        now = self.clock.now()
        before = self._marks[-2]
        self._marks.append(Mark(now, before.label, before.layer, self.direction))
        return now
