"""Records of a run: always to ``metrics.jsonl``, and to TensorBoard and Weights & Biases on request."""

# Nothing here may stop training: a full or read-only disk costs one warning and the records of that time.
#
# Each line of the file is one JSON object with ``kind``: ``start`` (a process began or resumed: configuration and
# environment), ``train`` (a logged step), ``valid``, ``test``, ``classification`` (a classifier's final results),
# ``save``, ``prediction`` (predicted and measured memory) and ``lost_output`` (standard output or error could not be
# written). Floats that a resumed run must reproduce are also stored in hexadecimal (``loss_hex``), which is exact.

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import LoggingConfig
from megatron_sp.ops import availability
from megatron_sp.utils import streams
from megatron_sp.utils.files import open_own

_LEAST_FREE = 64 << 10  # bytes on the disk, below which what another process writes there counts as lost


class MetricsLog:
    """Writer of records to ``run_dir/metrics.jsonl`` and beyond, on rank 0."""

    def __init__(self, run_dir: Path, config: LoggingConfig, rank: int, resolved: dict[str, Any]) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._sinks: list[tuple[str, Callable[[dict[str, Any]], None]]] = []
        self._closers: list[tuple[str, Callable[[], None]]] = []
        self.lost: dict[str, str] = {}  # what could not be written at least once, and why
        self._is_first = True
        self._lost_streams: dict[str, str] = {}
        if rank != 0:
            return
        self._sinks.append(("metrics.jsonl", self._append))
        if config.tensorboard_dir:
            self._watch_threads("tensorboard", "TensorBoard")
            self._guard("TensorBoard", lambda: self._add_tensorboard(config))
        if config.wandb_project:
            self._watch_threads("wandb", "W&B")
            self._guard("W&B", lambda: self._add_wandb(config, run_dir, resolved))

    def write(self, kind: str, **values: Any) -> None:
        """Write a record, with the time added."""
        if (lost := streams.lost()) != self._lost_streams:  # on a lost stream nobody could have read of it
            self._lost_streams = lost
            self.write("lost_output", step=values.get("step", 0), **lost)
        record = {"kind": kind, "time": time.time(), **values}
        for what, sink in self._sinks:
            self._guard(what, lambda sink=sink: sink(record))  # type: ignore[misc]

    def close(self) -> None:
        # the last opened first; failures are warnings
        while self._closers:
            self._guard(*self._closers.pop())

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps({k: _plain(v) for k, v in record.items()}) + "\n"
        follows_whole_line = not self._is_first
        self._is_first = True  # until this line is complete
        with open_own(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            if not follows_whole_line and file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                # after a kill or on a full disk: this record must not be appended to an incomplete line
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(line.encode())
        self._is_first = False

    def _add_tensorboard(self, config: LoggingConfig) -> None:
        tensorboard = availability.load("tensorboard")
        writer = tensorboard.SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size)

        def sink(record: dict[str, Any]) -> None:
            for key, value in record.items():
                if isinstance(value, (int, float)) and key not in ("step", "time") and math.isfinite(value):
                    writer.add_scalar(f"{record['kind']}/{key}", value, record.get("step", 0))

        self._sinks.append(("TensorBoard", sink))
        self._closers.append(("TensorBoard", writer.close))

    def _add_wandb(self, config: LoggingConfig, run_dir: Path, resolved: dict[str, Any]) -> None:
        restore = functools.partial(setattr, logging, "raiseExceptions", logging.raiseExceptions)
        self._closers.append(("logging", restore))
        # W&B's own log may be on a full disk: logging would print a traceback for each of its lines
        logging.raiseExceptions = False
        run = availability.load("wandb").init(
            project=config.wandb_project, name=config.wandb_exp_name, dir=str(run_dir), config=resolved
        )

        def sink(record: dict[str, Any]) -> None:
            values = {f"{record['kind']}/{k}": v for k, v in record.items() if isinstance(v, (int, float))}
            run.log(values, step=record.get("step"))
            # W&B's own process writes them, and does not report failures
            if shutil.disk_usage(run_dir).free < _LEAST_FREE:
                raise OSError(errno.ENOSPC, "hardly any space is left on the device", str(run_dir))

        self._sinks.append(("W&B", sink))
        self._closers.append(("W&B", run.finish))

    def _watch_threads(self, package: str, what: str) -> None:
        # until ``close()``, report an error that ends a tracker's thread like any other error of it, not as a traceback
        before = threading.excepthook

        def hook(ended: threading.ExceptHookArgs) -> None:
            trace = ended.exc_traceback
            while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != package:
                trace = trace.tb_next
            if ended.exc_value is not None and trace is not None:  # a frame of it is in code of the package
                self._lose(what, ended.exc_value)
            else:
                before(ended)

        def restore() -> None:
            if threading.excepthook is hook:
                threading.excepthook = before

        threading.excepthook = hook
        self._closers.append((what, restore))

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no failure of a tracker may end the training
            self._lose(what, error)

    def _lose(self, what: str, error: BaseException) -> None:
        if what not in self.lost:
            self.lost[what] = (
                error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            )
            print(
                f"warning: {what} cannot be written ({error}); training goes on without it", file=sys.stderr, flush=True
            )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Console:
    """Console output of rank 0."""

    def __init__(self, rank: int, progress_bar: bool = True) -> None:
        self._speaks = rank == 0
        self._bar: Any = None
        self._task: Any = None
        self._wants_bar = progress_bar and self._speaks and sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def start_progress(self, total: int, done: int) -> None:
        """Show the progress bar of a run."""
        if not self._wants_bar:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("train", total=total, completed=done, status="")
        self._bar.start()

    def progress(self, done: int, status: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
