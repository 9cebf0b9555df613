"""Memory of the fake device: who reads and writes which bytes when, when it is freed, and how much there is of it.

The rules are those of CUDA and of torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp):

- two accesses to the same bytes, one of them a write, must be ordered by streams, events or the host;
- a block belongs to the stream that was current when it was allocated. It may be one that was freed a moment ago, while
  work that the stream was given before is still using it: work on another stream must come after what was queued at the
  allocation. Once freed it may be handed out again at once for work on its stream: work on any *other* stream that
  still uses it must be complete before what its own stream does next, or ``record_stream`` must have told the allocator
  of it, which then waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_gpu.allocator import Entry
from fake_gpu.captures import Recording, Use, as_use
from fake_gpu.clocks import Clocks

_ROUND = 512  # the allocator's smallest block


@dataclass(frozen=True)
class Problem:
    """A mistake that a run on a real device may or may not show.

    Attributes:
        kind: "race", "freed", or "stale": memory of graphs that holds nothing.
        what: the later work, or what was freed, with its stream and place in the code.
        other: the earlier work.
    """

    kind: str
    what: str
    other: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}; {self.other}"


@dataclass(frozen=True)
class Access:
    """Work that touches bytes ``start`` to ``end`` of a block."""

    start: int
    end: int
    stream: int
    number: int
    writes: bool
    op: str
    where: str


@dataclass
class Block:
    """A storage: on the device, or pinned host memory."""

    num_bytes: int
    stream: int
    where: str
    pinned: bool
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    freed_at: str = ""  # place, once it is freed
    made_in: Recording | None = None  # the capture that has allocated it
    stale: str = ""  # why it holds nothing: what a capture allocates is written by replays


@dataclass(frozen=True)
class Range:
    """Bytes ``start`` to ``end`` of the storage ``key``."""

    key: int
    start: int
    end: int


class Memory:
    """All storages of the fake device, and the host memory that its copies use.

    Args:
        clocks: order of all work.
        name_of: name of a stream, for messages.
    """

    def __init__(self, clocks: Clocks, name_of: Callable[[int], str]) -> None:
        self._clocks, self._name_of = clocks, name_of
        self._blocks: dict[int, Block] = {}
        self.problems: dict[Problem, int] = {}
        self.history: list[Entry] = []  # of the device's storages
        self.num_accesses = 0
        self._last_borrowed = 0  # keys of storages are above 0
        self.num_bytes = 0  # allocated on the device now, rounded as the allocator does
        self.peak = 0

    def knows(self, key: int) -> bool:
        """True if the storage has been allocated and not freed."""
        return key in self._blocks

    def allocate(
        self, key: int, num_bytes: int, stream: int, where: str, *, pinned: bool = False, recording: Recording | None = None
    ) -> None:  # fmt: skip
        """Take note of a new storage; ``pinned``: of the host; ``recording``: the capture under way."""
        assert key not in self._blocks, "a storage is allocated once"
        block = self._blocks[key] = Block(num_bytes, stream, where, pinned)
        if not pinned:
            of_block, clocks = block.accesses, self._clocks
            if recording is not None:
                block.made_in, block.stale = recording, "was allocated by a capture, which no replay has followed"
                recording.pool.blocks.append((recording.number, block))
                of_block, clocks = recording.accesses_of(block), recording.clocks
            of_block.append(Access(0, num_bytes, stream, clocks.start(stream), writes=True, op="earlier work", where=where))
            if num_bytes:
                self.history.append(Entry(key, num_bytes, stream, where))
            self.num_bytes += _rounded(num_bytes)
            self.peak = max(self.peak, self.num_bytes)

    def free(self, key: int, where: str = "", recording: Recording | None = None) -> None:
        """Take note that a storage has been freed; host memory is kept until copies that use it are complete, as torch does.

        Args:
            where: place in the package.
            recording: the capture under way.
        """
        block = self._blocks.pop(key, None)
        if block is None:
            return
        block.freed_at = where or "some place"
        if block.pinned:
            return
        if block.num_bytes:
            self.history.append(Entry(key, 0, block.stream, where=""))
        self.num_bytes -= _rounded(block.num_bytes)
        if recording is not None and id(block) in recording.accesses:
            if block.made_in is None or block.made_in.pool is not recording.pool:
                self._report(
                    "freed", f"memory allocated at {block.where}", f"it is freed at {where} in a capture that uses it ({recording.where})"
                )
            self._require_complete(block, recording.accesses_of(block), recording.clocks)
        self._require_complete(block, block.accesses, self._clocks)

    def _require_complete(self, block: Block, accesses: list[Access], clocks: Clocks) -> None:
        """Report accesses that may still be under way when the stream of a freed block goes on."""
        for access in accesses:
            if access.stream in block.recorded or clocks.is_before(access.stream, access.number, block.stream):
                continue
            self._report(
                "freed", f"memory of stream {self._name_of(block.stream)}, allocated at {block.where}",
                f"{access.op} on {self._name_of(access.stream)} at {access.where} may still use it",
            )  # fmt: skip

    def borrow(self, num_bytes: int, stream: int, where: str) -> None:
        """Take note of memory that one kernel takes and gives back."""
        self._last_borrowed -= 1
        self.history += [Entry(self._last_borrowed, num_bytes, stream, where), Entry(self._last_borrowed, 0, stream, where="")]
        self.peak = max(self.peak, self.num_bytes + _rounded(num_bytes))

    def record_stream(self, key: int, stream: int) -> None:
        """Take note that the allocator knows that ``stream`` uses the storage."""
        self._blocks[key].recorded.add(stream)

    def access(
        self, stream: int, reads: Sequence[Range], writes: Sequence[Range], op: str, where: str, recording: Recording | None = None
    ) -> None:  # fmt: skip
        """Run ``op`` on a stream (``clocks.HOST``: by the host), which reads and writes bytes; ``recording``: the capture under way."""
        use = as_use(stream, reads, writes, self._blocks.__getitem__, op, where)
        if recording is None:
            self._run(use, self._clocks.start(stream))
            return
        number = recording.use(use)
        for touched, is_write in _touched(use):
            block, start, end = touched
            accesses = recording.accesses_of(block)
            accesses[:] = self._after(block, accesses, recording.clocks, Access(start, end, stream, number, is_write, op, where))

    def replay(self, use: Use) -> None:
        """Run the work of a graph again."""
        number = self._clocks.start(use.stream)
        for block in {id(block): block for (block, _, _), _ in _touched(use)}.values():
            if block.freed_at and block.made_in is None:
                self._report(
                    "freed",
                    f"a replay of {use.op} at {use.where} uses memory allocated at {block.where}",
                    f"it was freed at {block.freed_at}",
                )
        for block, _, _ in use.writes:
            block.stale = ""
        self._run(use, number)

    def overwrite(self, recording: Recording, stream: int) -> None:
        """Take note that a replay may write whatever later captures of its pool have allocated."""
        for number, block in recording.pool.blocks:
            if number > recording.number and not block.freed_at and block.num_bytes:
                access = Access(0, block.num_bytes, stream, self._clocks.start(stream), True, "a replay", recording.where)
                block.accesses = self._after(block, block.accesses, self._clocks, access)
                block.stale = f"may have been overwritten by a replay of the graph of {recording.where}, captured earlier"

    def _run(self, use: Use, number: int) -> None:
        for (block, start, end), is_write in _touched(use):
            if block.made_in is not None and block.freed_at:
                continue  # inside of a graph; its capture has been checked
            if block.stale and not is_write:
                self._report(
                    "stale", f"{use.op} on {self._name_of(use.stream)} at {use.where} reads what", f"{block.stale} ({block.where})"
                )
            new = Access(start, end, use.stream, number, is_write, use.op, use.where)
            block.accesses = self._after(block, block.accesses, self._clocks, new)

    def _after(self, block: Block, accesses: list[Access], clocks: Clocks, new: Access) -> list[Access]:
        """Check an access against those before it, and return those that later ones are to be checked against."""
        self.num_accesses += 1
        kept = []
        for old in accesses:
            meets = old.start < new.end and new.start < old.end
            ordered = old.stream == new.stream or clocks.is_before(old.stream, old.number, new.stream)
            if meets and (old.writes or new.writes) and not ordered:
                verb = "writes" if new.writes else "reads"
                self._report(
                    "race", f"{new.op} on {self._name_of(new.stream)} at {new.where} {verb} what",
                    f"{old.op} on {self._name_of(old.stream)} at {old.where} may still be {'writing' if old.writes else 'reading'}"
                    f" (memory of {block.where})",
                )  # fmt: skip
            # what the new access covers on its own stream need not be kept: whoever is ordered after the new one is
            # after the old one
            covered = old.stream == new.stream and new.start <= old.start and old.end <= new.end and (new.writes or not old.writes)
            if not covered:
                kept.append(old)
        kept.append(new)
        return kept

    def _report(self, kind: str, what: str, other: str) -> None:
        problem = Problem(kind, what, other)
        self.problems[problem] = self.problems.get(problem, 0) + 1


def _touched(use: Use) -> list[tuple[tuple[Block, int, int], bool]]:
    return [*((touched, False) for touched in use.reads), *((touched, True) for touched in use.writes)]


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ROUND) * _ROUND
