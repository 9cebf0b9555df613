"""Saving while training goes on: the training's thread copies, a thread of its own hashes, writes and commits.

Everything that a save needs is fixed when it starts: the tensors are copied (``host_copy.py``), ``state.json`` is encoded, the division of
the work is agreed on. From there on the thread touches nothing of the run, and every agreement goes over a process group that only it uses:
a collective of the background between two of the training's would be answered by the wrong ones. One save is in flight at a time.
What it comes to, a report or an error, is told by ``poll`` and ``wait``; the steps in which a folder appears are those of every save
(``saving.py``, ``commit.py``), so the files are the same to the byte, and a process that dies on the way leaves the older checkpoints as
they were.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from megatron_sp.checkpoint.checkpointer import Checkpointer, SaveReport, Snapshot
from megatron_sp.checkpoint.host_copy import HostCopy, copy_bytes
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.checkpoint.saving import size_words
from megatron_sp.checkpoint.together import Together


class BackgroundSaves:
    """Saves of a ``Checkpointer`` that training does not wait for. All ranks make the same calls, but for ``poll`` and ``join``.

    Args:
        checkpointer: of the run; it must not save by itself while one is in flight.
        group: a gloo group of all ranks for the thread alone; None in a single process.
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
        """Host memory that is kept for the copy."""
        return 0 if self._copy is None else self._copy.num_bytes

    @property
    def in_flight(self) -> bool:
        """Whether a save has been started whose outcome has not been asked for."""
        return self._thread is not None

    def reserve(self, tensors: dict[str, GlobalTensor], available: int | None = None) -> str | None:
        """Take the memory for the copies of these tensors. Collective.

        Args:
            tensors: as every save will bring them.
            available: bytes that this rank may take; None: that is not known.
        Returns:
            Why there can be no saves in the background, the same on every rank; None when there can.
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
                return f"{size_words(needed)} of host memory could not be had ({why})"
            return None

        reasons = self._checkpointer.ranks.each(take)
        rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if rank is None:
            return None
        self._copy = None
        return str(reasons[rank]) if len(reasons) == 1 else f"rank {rank}: {reasons[rank]}"

    def start(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> None:
        """Begin a save: returns when this rank's copy is made, or on a GPU under way (``join``). Collective; none may be in flight.

        Args, and what it raises: as of ``Checkpointer.save``.
        """
        if self._thread is not None or self._copy is None:
            raise RuntimeError("start() needs memory from reserve(), and no other save in flight")
        snapshot = self._checkpointer.snapshot(step, tensors, state)
        copies = self._copy.take(snapshot.items, lambda: self._checkpointer.faults.at("save.copy", step))
        self._report = self._error = None
        # a daemon: a process that ends for another reason must not be held up by a disk
        self._thread = threading.Thread(
            target=self._work, args=(replace(snapshot, items=copies), self._copy), name=f"save of step {step}", daemon=True
        )
        self._thread.start()

    def _work(self, snapshot: Snapshot, copy: HostCopy) -> None:
        began = time.monotonic()
        try:
            copy.wait()
            report = self._checkpointer.write(snapshot, self._ranks, beside=True)
            report.seconds = time.monotonic() - began
            self._report = report
        except BaseException as error:  # raised where somebody asks
            self._error = error

    def join(self) -> None:
        """What is computed from now on may change the tensors (on a GPU; on a CPU ``start`` has copied them)."""
        if self._copy is not None:
            self._copy.join()

    def poll(self) -> SaveReport | None:
        """The outcome of the save, once, if it has ended; does not wait.

        Raises:
            Exception: what the thread met, a lost peer for example; a disk that refuses is a report, not an error.
        """
        return None if self._thread is None or self._thread.is_alive() else self._take_outcome()

    def wait(self, timeout_s: float | None = None) -> SaveReport | None:
        """As ``poll``, but when it has ended; None when there is none in flight, or it has not ended in time."""
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
        assert self._report is not None, "a save has ended without a word"
        return self._report
