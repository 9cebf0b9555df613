"""Progress of a conversion: a bar on a terminal, otherwise an occasional line."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_SECONDS = 10.0  # between two lines


class Bar:
    """Progress display, used in a ``with`` statement.

    Args:
        total: bytes to be written.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = max(1, total), 0
        self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total)
        return self

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more bytes as written."""
        self.done += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            print(f"{100 * self.done / self.total:.0f} % of {self.total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
