"""Asynchronous saves: training waits for a copy alone, which a background thread hashes, writes and commits.

One save is in flight at a time; its files are those of any other save, byte for byte.
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

from megatron_sp.checkpoint.checkpointer import Checkpointer, SaveReport, Snapshot, Together
from megatron_sp.checkpoint.commit import size_words
from megatron_sp.checkpoint.pieces import GlobalTensor, NamedPiece, Piece
from megatron_sp.checkpoint.safetensors_file import idle_cores
from megatron_sp.ops.allocator import host_empty
from megatron_sp.utils.numbers import round_up

_ALIGN = 64


class BackgroundSaves:
    """Saves that do not block training, over a gloo ``group`` that only the thread uses."""

    def __init__(self, checkpointer: Checkpointer, group: Any = None) -> None:
        self._checkpointer = checkpointer
        # on training's groups the thread's collectives could be matched with those of training
        self._ranks = Together(checkpointer.ranks.rank, checkpointer.ranks.world_size, group)
        self._copy: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.num_bytes

    @property
    def in_flight(self) -> bool:
        return self._thread is not None

    def reserve(self, tensors: dict[str, GlobalTensor], available: int | None = None) -> str | None:
        """Allocate host memory for such tensors; return why it cannot be. Collective."""
        ranks = self._checkpointer.ranks
        items = self._checkpointer.plan(tensors)[0].items_of(ranks.rank, tensors)

        def take() -> str | None:
            needed = copy_bytes(items)
            if available is not None and needed > available:
                left = size_words(max(available, 0))
                return f"the copy takes {size_words(needed)} of host memory and {left} are left for it"
            try:
                self._copy = HostCopy(items)
            except (RuntimeError, MemoryError) as error:
                why = str(error).splitlines()[0][:200] if str(error) else "none left"
                return f"{size_words(needed)} of host memory could not be allocated ({why})"
            return None

        reasons = ranks.each(take)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                self._copy = None
                return str(reason) if len(reasons) == 1 else f"rank {rank}: {reason}"
        return None

    def start(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> None:
        """Start a save; return when the copy is made (on a GPU: see ``join``). Collective."""
        if self._thread is not None or self._copy is None:
            raise RuntimeError("start() needs memory from reserve(), and no other save in flight")
        snapshot = self._checkpointer.snapshot(step, tensors, state)
        copies = self._copy.take(snapshot.items, lambda: self._checkpointer.faults.at("save.copy", step))
        self._report = self._error = None
        work = (replace(snapshot, items=copies), self._copy)
        # a daemon: a process that ends for another reason must not wait for a disk
        self._thread = threading.Thread(target=self._work, args=work, name=f"save of step {step}", daemon=True)
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
        # later work on the current stream may change the tensors
        if self._copy is not None:
            self._copy.join()

    def poll(self) -> SaveReport | None:
        """Return the report of a save that has ended, once, or raise the thread's error."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._report is not None, "a save has ended without a result"
        return self._report

    def wait(self, timeout_s: float | None = None) -> SaveReport | None:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.poll()


def copy_bytes(items: Sequence[NamedPiece]) -> int:
    return sum(round_up(item.num_bytes, _ALIGN) for item in items)


class HostCopy:
    """Reusable host memory for copies of such items."""

    def __init__(self, items: Sequence[NamedPiece]) -> None:
        self.num_bytes = copy_bytes(items)
        devices = {item.piece.tensor.device for item in items if item.piece.tensor.is_cuda}
        self._device = devices.pop() if devices else torch.device("cpu")
        self._memory = host_empty((self.num_bytes,), torch.uint8, self._device)  # pinned if there is a GPU
        # touch every page: the first touch costs more than the copy (2 to 3 s against 0.07 s for 1.5 GB)
        self._memory.zero_()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def take(self, items: Sequence[NamedPiece], reached: Callable[[], None] = lambda: None) -> list[NamedPiece]:
        # the copies are complete after ``wait``, and the tensors may change after ``join``
        if copy_bytes(items) > self.num_bytes:
            raise ValueError(f"{copy_bytes(items):,} bytes are to be copied into {self.num_bytes:,}")
        copies, moves, position = [], [], 0
        for item in items:
            source = item.piece.tensor.detach()
            target = self._memory[position : position + item.num_bytes].view(source.dtype).view(source.shape)
            moves.append((target, source))
            copies.append(item._replace(piece=Piece(item.piece.offsets, target)))
            position += round_up(item.num_bytes, _ALIGN)
        if self._stream is not None:
            # after the update that produced these values
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                _copy(moves[:1])
                reached()
                _copy(moves[1:])
                self._copied = self._stream.record_event()
            return copies
        # one core does not use the memory's bandwidth: 0.10 s per GB, with two cores 0.06
        can_halve = torch.get_num_threads() == 1 and idle_cores()
        head, tail = _halves(moves) if can_halve else (moves, [])
        with ThreadPoolExecutor(1) as helper:
            other = helper.submit(_copy, tail)
            _copy(head[:1])
            reached()
            _copy(head[1:])
            other.result()
        return copies

    def join(self) -> None:
        # the current stream waits, the host does not
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        # from any thread
        if self._copied is not None:
            self._copied.synchronize()


def _halves(moves: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    # cut at half of the bytes, before the tensor that crosses it; the first part is never empty
    total, taken = sum(target.nbytes for target, _ in moves), 0
    for index, (target, _) in enumerate(moves):
        taken += target.nbytes
        if 2 * taken > total:
            return moves[: max(index, 1)], moves[max(index, 1) :]
    return moves, []


def _copy(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in moves:
        target.copy_(source, non_blocking=True)
