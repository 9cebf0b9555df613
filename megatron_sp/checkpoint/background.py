"""Asynchronous saves: the training thread copies the tensors, a background thread hashes, writes and commits them.

Everything that a save needs is fixed when it starts: the tensors are copied (``HostCopy``), ``state.json`` is
encoded, the division of work is agreed on. After that the thread touches nothing of the run, and its ranks agree over a
process group that only it uses: on training's groups its collectives could be matched with those of training. One save
is in flight at a time. Its outcome, a report or an error, comes from ``poll`` or ``wait``. A step folder is created in
the same steps as by any other save (``saving.py``, ``commit.py``), so the files are identical byte for byte, and a
process that dies midway leaves the older checkpoints untouched.

    training    step | copy | step | step | ...        the copy is all that training waits for
    thread           |      | hash, write, commit      uses the copy alone

The memory is allocated and touched once, when the run starts, and reused by every save: the first touch of a page costs
more than the copy itself (2 to 3 s against 0.07 s for 1.5 GB). With a GPU it is pinned and filled on a stream of its
own; the host does not wait, but whatever changes the tensors must come after ``join``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint.checkpointer import Checkpointer, SaveReport, Snapshot
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.checkpoint.safetensors_file import NamedPiece
from megatron_sp.checkpoint.saving import idle_cores, size_words
from megatron_sp.checkpoint.together import Together
from megatron_sp.ops.allocator import host_empty
from megatron_sp.utils.numbers import round_up

_ALIGN = 64


class BackgroundSaves:
    """Saves of a ``Checkpointer`` that do not block training. All ranks make the same calls, except ``poll`` and ``join``.

    Args:
        checkpointer: that of the run; must not be used for a blocking save while one is in flight.
        group: a gloo group of all ranks that only the thread uses; None in a single process.
    """

    def __init__(self, checkpointer: Checkpointer, group: Any = None) -> None:
        self._checkpointer = checkpointer
        ranks = checkpointer.ranks
        self._ranks = Together(ranks.rank, ranks.world_size, group)
        self._copy: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory reserved for the copy."""
        return 0 if self._copy is None else self._copy.num_bytes

    @property
    def in_flight(self) -> bool:
        """True if a save has been started and its outcome has not been taken yet."""
        return self._thread is not None

    def reserve(self, tensors: dict[str, GlobalTensor], available: int | None = None) -> str | None:
        """Allocate host memory for the copies of these tensors. Collective.

        Args:
            tensors: with the shapes and dtypes that every save will have.
            available: bytes that this rank may use; None if unknown.
        Returns:
            Why background saves are impossible, the same on every rank; None if they are possible.
        """
        items = self._checkpointer.own_items(tensors)

        def take() -> str | None:
            needed = copy_bytes(items)
            if available is not None and needed > available:
                return f"the copy takes {size_words(needed)} of host memory and {size_words(max(available, 0))} are left for it"
            try:
                self._copy = HostCopy(items)
            except (RuntimeError, MemoryError) as error:
                why = str(error).splitlines()[0][:200] if str(error) else "none left"
                return f"{size_words(needed)} of host memory could not be allocated ({why})"
            return None

        reasons = self._checkpointer.ranks.each(take)
        rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if rank is None:
            return None
        self._copy = None
        return str(reasons[rank]) if len(reasons) == 1 else f"rank {rank}: {reasons[rank]}"

    def start(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> None:
        """Start a save; return when this rank's copy is made (on a GPU: started, see ``join``). Collective; none may be in flight.

        Arguments and errors are those of ``Checkpointer.save``.
        """
        if self._thread is not None or self._copy is None:
            raise RuntimeError("start() needs memory from reserve(), and no other save in flight")
        snapshot = self._checkpointer.snapshot(step, tensors, state)
        copies = self._copy.take(snapshot.items, lambda: self._checkpointer.faults.at("save.copy", step))
        self._report = self._error = None
        # a daemon thread: a process that ends for another reason must not wait for a disk
        self._thread = threading.Thread(
            target=self._work,
            args=(replace(snapshot, items=copies), self._copy),
            name=f"save of step {step}",
            daemon=True,
        )
        self._thread.start()

    def _work(self, snapshot: Snapshot, copy: HostCopy) -> None:
        began = time.monotonic()
        try:
            copy.wait()
            report = self._checkpointer.write(snapshot, self._ranks, beside=True)
            report.seconds = time.monotonic() - began
            self._report = report
        except BaseException as error:  # raised when the result is requested
            self._error = error

    def join(self) -> None:
        """Make the current stream wait for the copy: later work may change the tensors. No-op on a CPU, where ``start`` has copied them."""
        if self._copy is not None:
            self._copy.join()

    def poll(self) -> SaveReport | None:
        """Return the save's report if it has ended, else None; does not wait. Each outcome is returned once.

        Raises:
            Exception: an error in the thread, such as a lost peer; a disk error is part of the report instead.
        """
        return None if self._thread is None or self._thread.is_alive() else self._take_outcome()

    def wait(self, timeout_s: float | None = None) -> SaveReport | None:
        """Wait for the save to end and return its report, as ``poll``; None if no save is in flight or it has not ended in time."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        return self.poll()

    def _take_outcome(self) -> SaveReport:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._report is not None, "a save has ended without a result"
        return self._report


def copy_bytes(items: Sequence[NamedPiece]) -> int:
    """Return the bytes of memory that a copy of these items needs."""
    return sum(round_up(item.num_bytes, _ALIGN) for item in items)


class HostCopy:
    """Reusable host memory for the copy of one save at a time.

    Args:
        items: like those of every save; only their sizes and device matter, not their contents.
    Raises:
        RuntimeError, MemoryError: the memory cannot be allocated.
    """

    def __init__(self, items: Sequence[NamedPiece]) -> None:
        self.num_bytes = copy_bytes(items)
        devices = {item.piece.tensor.device for item in items if item.piece.tensor.is_cuda}
        self._device = devices.pop() if devices else torch.device("cpu")
        self._memory = host_empty((self.num_bytes,), torch.uint8, self._device)
        self._memory.zero_()  # touches every page, so that copies cause no page faults
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def take(self, items: Sequence[NamedPiece], reached: Callable[[], None] = lambda: None) -> list[NamedPiece]:
        """Copy the contents, and return the same items with the copies in place of the tensors.

        On a GPU the copies are complete after ``wait``, and the tensors may change after ``join``.

        Args:
            items: of no more bytes than those of the constructor.
            reached: called after the first copy.
        """
        if copy_bytes(items) > self.num_bytes:
            raise ValueError(f"{copy_bytes(items):,} bytes are to be copied into {self.num_bytes:,}")
        if self._stream is None:
            return self._fill(items, reached)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # after the update that produced these values
        with torch.cuda.stream(self._stream):
            copies = self._fill(items, reached)
            self._copied = self._stream.record_event()
        return copies

    def _fill(self, items: Sequence[NamedPiece], reached: Callable[[], None]) -> list[NamedPiece]:
        copies, moves, at = [], [], 0
        for item in items:
            source = item.piece.tensor.detach()
            to = self._view(at, source)
            moves.append((to, source))
            copies.append(item._replace(piece=Piece(item.piece.offsets, to)))
            at += round_up(item.num_bytes, _ALIGN)
        head, tail = (
            _halves(moves) if self._stream is None and torch.get_num_threads() == 1 and idle_cores() else (moves, [])
        )
        with ThreadPoolExecutor(
            1
        ) as helper:  # one core does not use the memory's bandwidth: 0.10 s per GB, with two cores 0.06
            other = helper.submit(_copy, tail)
            _copy(head[:1])
            reached()
            _copy(head[1:])
            other.result()
        return copies

    def _view(self, at: int, like: Tensor) -> Tensor:
        num_bytes = like.numel() * like.element_size()
        return self._memory[at : at + num_bytes].view(like.dtype).view(like.shape)

    def join(self) -> None:
        """Make the current stream wait for the copy, so that later work on it may change the tensors; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are complete; may be called from any thread."""
        if self._copied is not None:
            self._copied.synchronize()


def _halves(moves: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Split a list of copies in two at half of the bytes, before the tensor that crosses it (the first part is never empty)."""
    total, taken = sum(to.nbytes for to, _ in moves), 0
    for index, (to, _) in enumerate(moves):
        if 2 * (taken := taken + to.nbytes) > total:
            return moves[: max(index, 1)], moves[max(index, 1) :]
    return moves, []


def _copy(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    for to, source in moves:
        to.copy_(source, non_blocking=True)
