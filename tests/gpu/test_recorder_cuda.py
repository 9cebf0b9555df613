"""The recorder's clock on a GPU: what a wait blocks is time of the compute stream, not of the host."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.comm.collectives import Handle
from megatron_sp.comm.recorder import CollectiveTimes, CudaClock, Recorder

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # some 30 ms


class Work:
    """Something that takes a while on a stream of its own, as NCCL's does; ``wait`` blocks the current stream, not the host."""

    def __init__(self, cycles: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            self.done.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


def flight_of(exchange: int, compute: int) -> tuple[CollectiveTimes, float]:
    """(a flight with so many cycles of computation before its wait, seconds of the step)."""
    recorder = Recorder(CudaClock(torch.device("cuda", torch.cuda.current_device())), 1)
    recorder.start_step()
    flight = recorder.at("sp", 0).start("all_to_all", (1,), (1,), torch.float32, "qkv")
    handle = Handle(Work(exchange), torch.zeros(1, device="cuda"), "all_to_all").recorded(flight)  # type: ignore[arg-type]
    torch.cuda._sleep(compute)
    handle.wait()
    recorder.end_step()
    (step,) = recorder.steps
    return step.flights[0], step.seconds


def test_a_hidden_exchange_ends_early_and_blocks_nothing() -> None:
    flight_of(1000, 1000)
    flight, seconds = flight_of(CYCLES, 3 * CYCLES)
    assert flight.exposed < 0.05 * seconds
    assert 0.2 * seconds < flight.end - flight.begin < 0.5 * seconds


def test_an_exposed_exchange_blocks_the_compute_stream() -> None:
    flight_of(1000, 1000)
    flight, seconds = flight_of(3 * CYCLES, CYCLES)
    assert 0.5 * seconds < flight.exposed < 0.8 * seconds
    assert flight.end - flight.begin > 0.9 * seconds
