"""The time line of a step, by a clock that is set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.comm.recorder import WAIT, Axis, CallSite, CudaClock, Direction, Pipe, Recorder, StepTimes, WallClock


class Clock:
    """Says what it was set to; a collective ends when its ``Work`` is told to."""

    def __init__(self) -> None:
        self.time = 100.0
        self.settled = 0
        self.lanes: list[Axis | Pipe] = []

    def now(self) -> float:
        return self.time

    def settle(self) -> None:
        self.settled += 1

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def when_done(self, work: Any, lane: Axis | Pipe, tell: Callable[[float], None]) -> None:
        self.lanes.append(lane)
        work.tell = tell


class Work:
    """A collective that ends at a given time, or whose end nobody tells."""

    def __init__(self, clock: Clock, ends: float, tells: bool = True) -> None:
        self.clock, self.ends, self.tells = clock, ends, tells
        self.tell: Callable[[float], None] = lambda _: None

    def wait(self) -> None:
        self.clock.time = max(self.clock.time, self.ends)
        if self.tells:
            self.tell(self.ends)


def start(place: CallSite, work: Any, name: str = "qkv", result: Tensor | None = None) -> Handle:
    flight = place.start("all_to_all", (4, 4), (4, 4), torch.float32, name)
    return Handle(work, torch.zeros(8) if result is None else result, "all_to_all").recorded(flight)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    recorder = Recorder(clock, num_steps=2)
    recorder.start_step()
    return recorder


def ended(recorder: Recorder) -> StepTimes:
    recorder.end_step()
    return recorder.steps[-1]


def test_a_wait_interrupts_what_is_computed(clock: Clock, recorder: Recorder) -> None:
    place = recorder.at("sp", 3)
    place.mark("projection")
    handle = start(place, Work(clock, 105.0))
    clock.time = 102.0
    place.mark("attention")
    clock.time = 103.0
    handle.wait()
    clock.time = 107.0
    place.mark("other")
    clock.time = 110.0
    step = ended(recorder)
    spans = [(s.label, s.layer, s.begin, s.end) for s in step.spans if s.end > s.begin]
    assert spans == [
        ("projection", 3, 0.0, 2.0), ("attention", 3, 2.0, 3.0), (WAIT, 3, 3.0, 5.0), ("attention", 3, 5.0, 7.0), ("other", 3, 7.0, 10.0),
    ]  # fmt: skip
    (flight,) = step.flights
    assert (flight.layer, flight.direction, flight.name, flight.begin, flight.end, flight.exposed) == (3, "forward", "qkv", 0.0, 5.0, 2.0)
    assert flight.what[:4] == ("sp", "all_to_all", (4, 4), (4, 4)) and flight.what.dtype == "float32"
    assert step.seconds == 10.0 and clock.settled == 1


@pytest.mark.parametrize(("ends", "tells", "waited_at", "times"), [
    (104.0, True, 109.0, (4.0, 0.0)),  # hidden: it ends before it is waited for
    (106.0, False, 100.0, (6.0, 6.0)),  # an end that nobody tells is that of the wait
])  # fmt: skip
def test_when_a_collective_ends(clock: Clock, recorder: Recorder, ends: float, tells: bool, waited_at: float, times: Any) -> None:
    done(torch.zeros(1)).recorded(recorder.at("sp", 0).start("all_to_all", (0,), (0,), torch.float32, "q")).wait()  # is no flight
    handle = start(recorder.at("sp", 0), work := Work(clock, ends, tells))
    clock.time = waited_at
    handle.wait()
    clock.time += 2
    if not tells:
        work.tell(clock.time - 1)  # gloo's thread had to wait for the interpreter
    (flight,) = ended(recorder).flights
    assert (flight.begin, flight.end, flight.exposed) == (0.0, *times)


def test_a_collective_that_nobody_waits_for(clock: Clock, recorder: Recorder) -> None:
    handle = start(recorder.at("sp", 0), Work(clock, 104.0))
    clock.time = 105.0
    (flight,) = ended(recorder).flights
    assert (flight.begin, flight.end, flight.exposed) == (0.0, 0.0, 0.0) and not handle.waited
    recorder.start_step()
    with pytest.warns(RuntimeWarning, match="was never called on"):
        del handle
    assert ended(recorder).flights == [], "what an error left is not in the next step"


def test_the_sum_behind_a_wait_is_computation(clock: Clock, recorder: Recorder) -> None:
    """gloo's reduce_scatter adds up after the exchange: nobody stands still then."""

    def add_up() -> Tensor:
        clock.time += 3.0
        return torch.ones(1)

    flight = recorder.at("tp", 0).start("reduce_scatter", (4,), (2,), torch.float32, "reduce-scatter")
    assert Handle(Work(clock, 102.0), torch.zeros(1), "reduce_scatter", add_up).recorded(flight).wait() == 1  # type: ignore[arg-type]
    assert [f.exposed for f in ended(recorder).flights] == [2.0]


def test_directions_and_layers(clock: Clock, recorder: Recorder) -> None:
    directions: list[Direction] = ["forward", "backward", "update"]
    for direction in directions:
        recorder.enter(direction)
        start(recorder.at("sp", 1), Work(clock, clock.time)).wait()
        start(recorder.at("tp"), Work(clock, clock.time), "all-reduce").wait()
    flights = ended(recorder).flights
    assert [(f.direction, f.what.axis, f.layer) for f in flights] == [
        (d, a, layer) for d in directions for a, layer in (("sp", 1), ("tp", None))
    ]


def test_messages_belong_to_what_made_them(clock: Clock, recorder: Recorder) -> None:
    """Whatever pass is computed when their receive is posted; each pair of ranks has a lane of its own."""
    for pipe, direction, stage in (((1, 0), "backward", 1), ((0, 1), "forward", 0)):
        site = CallSite(recorder, "pp", stage, pipe, direction)  # type: ignore[arg-type]
        flight = site.start("receive", (), (8,), torch.bfloat16, "made")
        Handle(Work(clock, clock.time + 1), torch.zeros(8), "receive").recorded(flight).wait()  # type: ignore[arg-type]
    start(recorder.at("sp", 0), Work(clock, clock.time)).wait()
    flights = ended(recorder).flights
    assert [(f.what.pipe, f.direction, f.layer, f.exposed) for f in flights] == [
        ((1, 0), "backward", 1, 1.0), ((0, 1), "forward", 0, 1.0), (None, "forward", 0, 0.0),
    ]  # fmt: skip
    assert flights[0].what == ("pp", "receive", (), (8,), "bfloat16", (1, 0)) and clock.lanes == [(1, 0), (0, 1), "sp"]


def test_actions_are_those_of_their_step(clock: Clock, recorder: Recorder) -> None:
    recorder.actions = [("F", 101.0, 102.0)]
    recorder.start_step()  # an error has ended the step before
    assert recorder.actions == []
    recorder.actions = [("F", 101.0, 102.0), ("B", 102.5, 104.0)]
    assert ended(recorder).actions == [("F", 1.0, 2.0), ("B", 2.5, 4.0)] and recorder.actions == []


def test_it_stops_after_its_steps(clock: Clock, recorder: Recorder) -> None:
    assert not recorder.is_complete
    for _ in range(4):
        recorder.end_step()
        recorder.start_step()
    place = recorder.at("sp", 0)
    place.mark("attention")
    assert len(recorder.steps) == 2 and recorder.is_complete
    assert place.start("all_to_all", (1,), (1,), torch.float32, "q") is None
    handle = start(place, Work(clock, 101.0))
    assert handle.wait().shape == (8,) and recorder.flights == []


def test_the_wall_clock() -> None:
    clock = WallClock()
    begin = clock.now()
    assert clock.seconds(begin, clock.now()) >= 0.0

    class NoFuture:
        def get_future(self) -> None:
            raise RuntimeError("not supported")

    told: list[float] = []
    clock.when_done(NoFuture(), "sp", told.append)  # type: ignore[arg-type]
    assert told == []


def test_each_pipe_has_a_stream_of_its_own_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one pair of ranks waits for holds up nobody else's end; without a GPU streams and events are names here."""
    made: list[str] = []
    entered: list[str] = []

    class On:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            entered.append(self.stream)

        def __exit__(self, *error: object) -> None:
            pass

    def stream(device: object) -> str:
        made.append(f"stream {len(made)}")
        return made[-1]

    class Waited:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(CudaClock, "now", lambda self: entered[-1])
    clock, of_axes, work, told = CudaClock(torch.device("cuda")), len(made), Waited(), list[str]()
    lanes: list[Axis | Pipe] = [(0, 1), "sp", (1, 0), (0, 1), "sp"]
    for lane in lanes:
        clock.when_done(work, lane, told.append)  # type: ignore[arg-type]
    assert told == entered and work.waits == len(lanes) and len(made) == of_axes + 2
    assert told[0] == told[3] and told[1] == told[4] and len(set(told)) == 3
