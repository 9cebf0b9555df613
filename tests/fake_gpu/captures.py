"""Graphs of the fake device: what is captured is checked and written down, and a replay does it again with the same memory.

Rules of CUDA's stream capture, of torch's pools (c10/cuda/CUDACachingAllocator.cpp) and of graphs in general:

- the host takes no part: it does not wait, ask an event, pin memory, seed a generator, or create a communicator (``Device``,
  ``stand_ins`` and ``nccl`` refuse that, with its place);
- a stream joins a capture by waiting for an event of it, and has been waited for at its end; nothing in it waits for work from outside;
- a graph reads and writes the same addresses in every replay: memory from outside must live as long as it is replayed, and it cannot
  be the host's;
- memory that a capture allocates belongs to its pool. What is freed in it may be handed out again in it and in later captures of the
  pool: a replay overwrites what later ones have allocated, and what nobody has replayed holds nothing.

During a capture its work has clocks of its own; a replay goes through the device's, as if everything were launched again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fake_gpu.clocks import HOST, Clocks

if TYPE_CHECKING:
    from fake_gpu.memory import Access, Block


class CaptureError(RuntimeError):
    """What CUDA refuses in a capture."""


@dataclass
class Pool:
    """Memory that graphs share.

    Attributes:
        num_captures: captures so far.
        blocks: what has been allocated in them and is not freed, with the number of the capture.
    """

    num_captures: int = 0
    blocks: list[tuple[int, Block]] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """Work on a stream: bytes of blocks that it reads and writes."""

    stream: int
    reads: tuple[tuple[Block, int, int], ...]
    writes: tuple[tuple[Block, int, int], ...]
    op: str
    where: str


class Recording:
    """A capture under way, and afterwards what was captured.

    Args:
        stream: on which it began.
        pool: of its memory.
        where: place in the package.
        name_of: name of a stream, for messages.
        is_known: returns whether an event was recorded outside.
    """

    def __init__(self, stream: int, pool: Pool, where: str, name_of: Callable[[int], str], is_known: Callable[[int], bool]) -> None:
        self.stream, self.pool, self.where = stream, pool, where
        self._name_of, self._is_known = name_of, is_known
        self.number = pool.num_captures
        pool.num_captures += 1
        self.clocks = Clocks()
        self.entries: list[tuple[str, Any, Any]] = []
        self.accesses: dict[int, tuple[Block, list[Access]]] = {}  # by identity of the block
        self._streams, self._events = {stream}, set[int]()
        self._last: dict[int, int] = {}  # number of the last work of each stream

    def has(self, stream: int) -> bool:
        """True if a stream is part of the capture."""
        return stream in self._streams

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream of the capture."""
        self._events.add(event)
        self.clocks.record(event, stream)
        self.entries.append(("record", event, stream))

    def wait(self, stream: int, event: int, where: str) -> bool:
        """Make a stream wait; return False if that is no matter of the capture.

        Raises:
            CaptureError: work from outside is waited for.
        """
        if event in self._events:
            if stream == HOST:
                raise refused("a wait of the host for an event", where)
            self._streams.add(stream)
            self.clocks.wait(stream, event)
            self.entries.append(("wait", event, stream))
            return True
        if self.has(stream) and self._is_known(event):
            raise refused("a wait for work that is not captured", where)
        return False

    def use(self, use: Use) -> int:
        """Take note of work, and return its number."""
        if not self.has(use.stream):
            raise refused(f"{use.op} on {self._name_of(use.stream)}, which has not joined", use.where)
        for block, _, _ in (*use.reads, *use.writes):
            if block.pinned:
                raise refused(f"{use.op} of the host's memory, which every replay would read at this address", use.where)
        self.entries.append(("use", use, None))
        self._last[use.stream] = self.clocks.start(use.stream)
        return self._last[use.stream]

    def accesses_of(self, block: Block) -> list[Access]:
        """Return what the capture has done with a block."""
        return self.accesses.setdefault(id(block), (block, []))[1]

    def finish(self) -> None:
        """End the capture.

        Raises:
            CaptureError: a stream that has joined is not waited for.
        """
        for stream, number in self._last.items():
            if stream != self.stream and self.clocks.seen(self.stream, stream) < number:
                raise CaptureError(f"the capture at {self.where} ends with work of {self._name_of(stream)} that was not waited for")


def refused(what: str, where: str) -> CaptureError:
    """Return CUDA's error about an operation in a capture."""
    return CaptureError(f"operation not permitted when stream is capturing: {what} at {where}")


def as_use(stream: int, reads: Sequence[Any], writes: Sequence[Any], find: Callable[[int], Block], op: str, where: str) -> Use:
    """Return work on ranges (``memory.Range``) as work on blocks."""
    made = [tuple((find(r.key), r.start, r.end) for r in ranges if r.end > r.start) for ranges in (reads, writes)]
    return Use(stream, made[0], made[1], op, where)
