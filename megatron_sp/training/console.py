"""Console output of a run: lines from rank 0, and on a terminal a progress bar with the time left."""

from __future__ import annotations

import sys
from typing import Any


class Console:
    """Console output of rank 0; other ranks print nothing.

    Args:
        rank: this process's rank.
        progress_bar: draw a bar if standard output is a terminal.
    """

    def __init__(self, rank: int, progress_bar: bool = True) -> None:
        self._speaks = rank == 0
        self._bar: Any = None
        self._task: Any = None
        self._wants_bar = progress_bar and self._speaks and sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        """Print a line, above the progress bar if there is one. Only rank 0 prints."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def start_progress(self, total: int, done: int) -> None:
        """Show the progress bar of a run of ``total`` steps, ``done`` of which are complete."""
        if not self._wants_bar:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("train", total=total, completed=done, status="")
        self._bar.start()

    def progress(self, done: int, status: str) -> None:
        """Move the progress bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
