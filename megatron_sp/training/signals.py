"""Graceful stop on SIGTERM, SIGINT, SIGHUP or a file: all ranks agree on the step, save, and exit with code 75."""

# A handler only sets a flag, which is sent with the step's first all_reduce, so that a signal to one rank stops all
# of them after the same step. A second signal (not the same key press forwarded by the launcher) ends this process at
# once, unless that would break off the save, which takes a third one. It does so even while the process is blocked in
# a collective, where Python runs no handlers: the interpreter's C code writes signals to a pipe, which a thread
# reads.

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.utils.errors import EXIT_PEER
from megatron_sp.utils.files import open_own
from megatron_sp.utils.streams import complain

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_registered = threading.Event()
_ECHO_SECONDS = 2.0  # under a launcher a Ctrl-C reaches us from the terminal and again from that


class StopSignals:
    """Signal handlers that set ``requested`` when a stop is requested; active from ``install`` to ``restore``."""

    # launched: a launcher forwards signals, so one that follows the first within a moment is not a second one;
    # speaks: False if another rank, which a terminal's Ctrl-C reaches as well, tells the user

    def __init__(self, launched: bool = True, speaks: bool = True) -> None:
        self.requested = self.saving = False
        self.speaks = speaks  # False also once the run ends for a reason of its own
        self._launched = launched
        self._first: float | None = None
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def install(self) -> None:
        """Install the handlers, from the main thread."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if not _registered.is_set():  # a fork must not write to this process's pipe
            _registered.set()
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="stop-signals", daemon=True)
        self._thread.start()
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._previous[number] = signal.signal(number, lambda *_: self._asked(time.monotonic()))

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])
            self._thread.join()
            os.close(self._pipe[0])
            self._pipe = None

    def _asked(self, now: float) -> None:
        if self._first is None:
            self._first = now
        self.requested = True

    def _watch(self, reports: int) -> None:
        announced = spared = False
        while numbers := os.read(reports, 512):
            now = time.monotonic()
            for number in (number for number in numbers if number in _SIGNALS):
                self._asked(now)
                if not announced:
                    announced = True
                    self._say("stop requested: saving after this step (a second signal leaves at once)")
                elif self._launched and self._first is not None and now - self._first <= _ECHO_SECONDS:
                    continue  # the same key press, forwarded by the launcher
                elif self.saving and not spared:
                    spared = True
                    self._first = now  # this one has an echo, too
                    self._say(
                        "second signal: the save is under way and goes on (a third one leaves at once, without it)"
                    )
                else:
                    number_word = "third" if spared else "second"
                    self._say(f"{number_word} signal: leaving at once, the last checkpoint stays valid")
                    os._exit(128 + number)

    def _say(self, line: str) -> None:
        if self.speaks:
            complain(line)


class KillSwitch:
    """A file (--kill-switch-path) that stops the run when it appears, where signals do not reach it."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._seen = False

    def is_thrown(self) -> bool:
        """Return whether the file is there, or was: a stop that has begun is not called off."""
        self._seen = self._seen or (self._path is not None and os.path.lexists(self._path))
        return self._seen


class Watchdog:
    """Ends the process with exit code 7 if ``beat`` is not called for ``timeout_s`` seconds."""

    # locate: returns, for messages, the stages of this rank and its place in what the last beat announced

    def __init__(
        self, timeout_s: float, report: Path, rank: int, on_end: Callable[[str], None] = lambda _: None,
        startup_s: float = 600.0,
    ) -> None:  # fmt: skip
        self._timeout_s, self._report, self._rank, self._on_end = timeout_s, report, rank, on_end
        self._deadline = time.monotonic() + timeout_s + startup_s
        self._what = "start-up"
        self.locate: Callable[[], tuple[str, str]] = lambda: ("", "")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, what: str) -> None:
        """Reset the timeout; ``what`` comes next."""
        self._what = what
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def place(self) -> str:
        """Return what the last beat has announced, for messages."""
        _, where = self.locate()
        return f"'{self._what}'" + (f", {where}" if where else "")

    def close(self) -> None:
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
