"""SIGTERM and SIGINT ask for a stop; all ranks agree on the step, save, and exit with code 75.

A handler only sets a flag; the flag travels with the step's first all_reduce, so a signal to one rank stops all of them after
the same step. A second signal, not the same key press fanned out by the launcher, ends this process at once.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from megatron_sp.utils.output import complain

_ECHO_SECONDS = 2.0  # a Ctrl-C reaches us from the terminal and again from torchrun


class StopSignals:
    """Installs the handlers on ``install``; ``requested`` says whether a stop was asked for."""

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._first > _ECHO_SECONDS:
            complain("second signal: leaving at once, the last checkpoint stays valid")
            os._exit(128 + number)
        if not self.requested:
            self.requested, self._first = True, now
            complain("stop requested: saving after this step (a second signal leaves at once)")
