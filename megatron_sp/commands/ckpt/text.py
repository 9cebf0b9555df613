"""Text output of the actions: aligned columns, dates, and a progress line on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Sequence

from megatron_sp.utils.format import format_bytes, format_duration

SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "  ") -> list[str]:
    """Return lines with aligned columns, without trailing spaces."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return [(indent + "  ".join(line)).rstrip() for line in cells]


def date(seconds: float) -> str:
    """Return a local date and time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Return a count with its noun, such as ``1 file`` or ``2 files``."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def warn(text: str) -> None:
    """Print a warning to standard error, so that it does not get into a pipe."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Progress:
    """Progress line on standard error with the bytes done and the time left; silent unless that is a terminal.

    Args:
        what: name of the activity.
        total: total bytes.
    """

    _EVERY_S = 0.2

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._shown = time.monotonic()
        self._lock = threading.Lock()  # files are read by several threads
        self._is_seen = sys.stderr.isatty()
        self._width = 0

    def add(self, num_bytes: int) -> None:
        """Add bytes that were done."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if self._is_seen and now - self._shown >= self._EVERY_S:
                self._shown = now
                left = (now - self._began) * (self._total - self._done) / max(self._done, 1)
                share = 100 * self._done // max(self._total, 1)
                words = f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)} ({share} %), {format_duration(left)} left"
                self._show(words)

    def close(self) -> None:
        """Erase the line."""
        if self._width:
            self._show("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, words: str) -> None:
        sys.stderr.write("\r" + words.ljust(self._width))
        sys.stderr.flush()
        self._width = len(words)
