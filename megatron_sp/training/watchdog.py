"""Watchdog that ends a rank without progress, with a stack dump, instead of letting it block the job for hours.

The collectives' own timeout ends the ranks that wait; the watchdog ends the rank they wait for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_sp.utils.errors import EXIT_PEER
from megatron_sp.utils.files import open_own
from megatron_sp.utils.output import complain


class Watchdog:
    """Watchdog thread that ends the process with exit code 7 if ``beat`` is not called for ``timeout_s`` seconds.

    Args:
        timeout_s: longest time between two beats; the first may take ``startup_s`` longer.
        report: file for the stacks of all threads.
        rank: this process's rank, for the message.
        on_end: called with the message before the process ends.
        startup_s: additional time for the first beat.

    Attributes:
        locate: called from the watchdog's thread; returns what this rank has of the model, and its place inside of what was
            said with the last beat, both for messages and empty if there is nothing to be said (``Pipeline.locate``).
    """

    def __init__(
        self, timeout_s: float, report: Path, rank: int, on_end: Callable[[str], None] = lambda _: None, startup_s: float = 600.0
    ) -> None:
        self._timeout_s, self._report, self._rank, self._on_end = timeout_s, report, rank, on_end
        self._deadline = time.monotonic() + timeout_s + startup_s
        self._what = "start-up"
        self.locate: Callable[[], tuple[str, str]] = lambda: ("", "")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, what: str) -> None:
        """Reset the timeout: progress was made, and ``what`` comes next."""
        self._what = what
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def place(self) -> str:
        """Step and action, or what else the last beat has announced, for messages."""
        _, where = self.locate()
        return f"'{self._what}'" + (f", {where}" if where else "")

    def close(self) -> None:
        """Stop the watching thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            if self._is_late():
                self._end()

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _end(self) -> None:
        part, where = self.locate()
        who = f"rank {self._rank} ({part})" if part else f"rank {self._rank}"
        message = f"{who}: no progress in {self.place}{',' if where else ''} for {self._timeout_s:.0f} s"
        try:
            with open_own(self._report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                file.write(f"{message}\n".encode())
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            message += f": the stacks of this rank are in {self._report}"
        except OSError:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(2, all_threads=True)
        message += ". Raise --distributed-timeout-minutes if a step may take that long."
        complain(message)
        self._on_end(message)
        os._exit(EXIT_PEER)
