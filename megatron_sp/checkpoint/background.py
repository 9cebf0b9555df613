"""Asynchronous saves: the training thread copies the tensors, a background thread hashes, writes and commits them.

Everything that a save needs is fixed when it starts: the tensors are copied (``host_copy.py``), ``state.json`` is
encoded, the division of work is agreed on. After that the thread touches nothing of the run, and its ranks agree over a
process group that only it uses: on training's groups its collectives could be matched with those of training. One save
is in flight at a time. Its outcome, a report or an error, comes from ``poll`` or ``wait``. A step folder is created in
the same steps as by any other save (``saving.py``, ``commit.py``), so the files are identical byte for byte, and a
process that dies midway leaves the older checkpoints untouched.
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
