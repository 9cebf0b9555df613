"""The checker itself: what it must find in accesses to memory, and what it must not."""

from __future__ import annotations

import pytest

from fake_gpu.clocks import DEFAULT, HOST, Clocks
from fake_gpu.memory import Memory, Range

SIDE, OTHER = 101, 102


class Machine:
    """A memory with its clocks, and one storage of 4096 bytes of the compute stream."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.memory = Memory(self.clocks, str)
        self.memory.allocate(1, 4096, DEFAULT, "here")
        self._event = 0

    def begin(self) -> None:
        """The side streams come after the allocation."""
        self.order(SIDE, DEFAULT)
        self.order(OTHER, DEFAULT)
        self.clocks.host_waits_for(DEFAULT)

    def read(self, stream: int, start: int = 0, end: int = 4096, key: int = 1) -> None:
        self.memory.access(stream, [Range(key, start, end)], [], "read", "a.py:1")

    def write(self, stream: int, start: int = 0, end: int = 4096, key: int = 1) -> None:
        self.memory.access(stream, [], [Range(key, start, end)], "write", "a.py:2")

    def order(self, later: int, earlier: int) -> None:
        """What ``later`` does from now on comes after what ``earlier`` has been given."""
        self._event += 1
        self.clocks.record(self._event, earlier)
        self.clocks.wait(later, self._event)

    @property
    def kinds(self) -> list[str]:
        return [problem.kind for problem in self.memory.problems]


@pytest.fixture
def machine() -> Machine:
    """Everything comes after the allocation."""
    new = Machine()
    new.begin()
    return new


@pytest.mark.parametrize(
    ("first", "second", "races"), [("read", "read", 0), ("read", "write", 1), ("write", "read", 1), ("write", "write", 1)]
)
def test_two_streams_race_if_one_of_them_writes(machine: Machine, first: str, second: str, races: int) -> None:
    getattr(machine, first)(DEFAULT)
    getattr(machine, second)(SIDE)
    assert machine.kinds == ["race"] * races


def test_one_stream_is_in_order(machine: Machine) -> None:
    machine.write(SIDE)
    machine.read(SIDE)
    machine.write(SIDE)
    assert not machine.kinds


def test_an_event_orders(machine: Machine) -> None:
    machine.write(DEFAULT)
    machine.order(SIDE, DEFAULT)
    machine.write(SIDE)
    assert not machine.kinds


def test_an_event_orders_only_what_was_queued_before_it(machine: Machine) -> None:
    machine.order(SIDE, DEFAULT)
    machine.write(DEFAULT)
    machine.read(SIDE)
    assert machine.kinds == ["race"]


def test_an_event_that_is_waited_for_by_another_stream_does_not_order(machine: Machine) -> None:
    machine.write(DEFAULT)
    machine.order(OTHER, DEFAULT)
    machine.read(SIDE)
    assert machine.kinds == ["race"]


def test_order_passes_through_a_third_stream(machine: Machine) -> None:
    machine.write(DEFAULT)
    machine.order(OTHER, DEFAULT)
    machine.order(SIDE, OTHER)
    machine.write(SIDE)
    assert not machine.kinds


def test_other_bytes_are_other_memory(machine: Machine) -> None:
    machine.write(DEFAULT, 0, 512)
    machine.write(SIDE, 512, 1024)
    assert not machine.kinds
    machine.write(OTHER, 511, 513)
    assert machine.kinds == ["race", "race"]


def test_a_small_access_does_not_hide_a_large_one(machine: Machine) -> None:
    """An access that is kept because it is not covered is still found after others of its stream."""
    machine.write(SIDE, 0, 4096)
    machine.write(SIDE, 0, 16)
    machine.read(DEFAULT, 100, 200)
    assert machine.kinds == ["race"]


def test_a_later_read_does_not_hide_a_write(machine: Machine) -> None:
    machine.write(SIDE)
    machine.read(SIDE)
    machine.read(DEFAULT)
    assert machine.kinds == ["race"]


def test_the_host_waits_for_a_stream(machine: Machine) -> None:
    machine.write(SIDE)
    machine.read(HOST)
    assert machine.kinds == ["race"]
    machine.clocks.host_waits_for(SIDE)
    machine.write(HOST)
    assert machine.kinds == ["race"]


def test_what_is_launched_comes_after_what_the_host_did(machine: Machine) -> None:
    machine.write(HOST)
    machine.write(SIDE)
    machine.clocks.host_waits_for(SIDE)
    machine.write(DEFAULT)
    assert not machine.kinds, "the host has seen the end of it before it launched the next"


def test_waiting_for_one_stream_says_nothing_of_another(machine: Machine) -> None:
    machine.write(SIDE)
    machine.clocks.host_waits_for(OTHER)
    machine.read(HOST)
    assert machine.kinds == ["race"]


def test_waiting_for_the_device_orders_everything(machine: Machine) -> None:
    machine.write(SIDE, 0, 100)
    machine.write(OTHER, 100, 200)
    machine.clocks.host_waits_for_all()
    machine.write(HOST)
    assert not machine.kinds


def test_an_event_that_was_never_recorded_is_complete(machine: Machine) -> None:
    machine.write(DEFAULT)
    machine.clocks.wait(SIDE, 99)
    machine.write(SIDE)
    assert machine.kinds == ["race"], "waiting for it orders nothing"


def test_memory_is_freed_while_another_stream_reads_it(machine: Machine) -> None:
    machine.order(SIDE, DEFAULT)
    machine.read(SIDE)
    machine.memory.free(1)
    assert machine.kinds == ["freed"]


def test_memory_is_freed_after_its_stream_has_waited(machine: Machine) -> None:
    machine.read(SIDE)
    machine.order(DEFAULT, SIDE)
    machine.memory.free(1)
    assert not machine.kinds


def test_the_allocator_is_told_by_record_stream(machine: Machine) -> None:
    machine.read(SIDE)
    machine.memory.record_stream(1, SIDE)
    machine.memory.free(1)
    assert not machine.kinds


def test_record_stream_is_for_that_stream_alone(machine: Machine) -> None:
    machine.read(SIDE)
    machine.memory.record_stream(1, OTHER)
    machine.memory.free(1)
    assert machine.kinds == ["freed"]


def test_memory_belongs_to_the_stream_that_allocated_it(machine: Machine) -> None:
    """Freed memory of a side stream is handed out on that stream: the compute stream's work must be complete there."""
    machine.memory.allocate(2, 100, SIDE, "there")
    machine.order(DEFAULT, SIDE)
    machine.read(DEFAULT, 0, 100, key=2)
    machine.memory.free(2)
    assert machine.kinds == ["freed"]


def test_pinned_memory_is_kept_by_the_allocator(machine: Machine) -> None:
    machine.memory.allocate(2, 100, HOST, "there", pinned=True)
    machine.read(SIDE, 0, 100, key=2)
    machine.memory.free(2)
    assert not machine.kinds


def test_new_memory_may_be_in_use_by_earlier_work_of_its_stream() -> None:
    machine = Machine()
    machine.write(SIDE)
    assert machine.kinds == ["race"]


def test_what_a_kernel_borrows_counts_for_the_peak(machine: Machine) -> None:
    machine.memory.borrow(1000, SIDE, "there")
    assert (machine.memory.num_bytes, machine.memory.peak) == (4096, 4096 + 1024)
    assert [entry.num_bytes for entry in machine.memory.history] == [4096, 1000, 0]


def test_bytes_are_counted_in_blocks(machine: Machine) -> None:
    assert machine.memory.num_bytes == 4096
    machine.memory.allocate(2, 1, SIDE, "there")
    machine.memory.allocate(3, 10**6, HOST, "there", pinned=True)
    assert machine.memory.num_bytes == machine.memory.peak == 4096 + 512
    machine.memory.free(1)
    machine.memory.free(3)
    assert (machine.memory.num_bytes, machine.memory.peak) == (512, 4608)
