"""Atomic write of a conversion (check, write beside the output, rename), and its progress on the terminal."""

from __future__ import annotations

import glob
import json
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_sp.convert.formats.format import Progress, Writer
from megatron_sp.convert.options import Options
from megatron_sp.utils.errors import CheckpointError, DiskError
from megatron_sp.utils.files import free_bytes, fsync_dir, write_synced

REPORT = "conversion.json"
_SPACE_FACTOR = 1.05


def convert(
    model: Any,
    target: Writer,
    output: Path,
    options: Options,
    progress: Progress,
    report: dict[str, Any],
    tell: Callable[[str], None],
) -> None:
    """Write ``output`` completely or not at all.

    Args:
        model: as returned by the reader.
        output: must not exist; appears by a single rename once everything is on disk.
        report: written into it as conversion.json.
        tell: called with messages for the user.
    Raises:
        CheckpointError: ``output`` exists, or the target cannot store the model.
        DiskError: no space, no permission, or a disk failure; nothing is left behind, not even new parent folders.
        KeyboardInterrupt: SIGTERM or SIGINT; nothing is left behind either.
    """
    require_absent(output)
    options.output = output.absolute()
    needed = int(_SPACE_FACTOR * target.size(model, options))
    made = [folder for folder in output.absolute().parents if not folder.exists()]  # deepest first
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if (free := free_bytes(output.parent)) < needed:
            raise DiskError(f"{output.parent} has {free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB are needed: nothing"
                            " was written")  # fmt: skip
        for path in sorted(output.parent.glob(f".{glob.escape(output.name)}.part-*")):
            tell(f"note: {path} is left over from a conversion that was cut off, or another one is writing it now: if"
                 " not, delete it")  # fmt: skip
        staging = output.parent / f".{output.name}.part-{uuid.uuid4().hex[:12]}"
        with _removed_unless_done(staging):
            target.write(model, staging, options, progress)
            write_synced(staging / REPORT, (json.dumps(report, indent=1) + "\n").encode("utf-8"))
            fsync_dir(staging)
            require_absent(output)
            staging.rename(output)
            fsync_dir(output.parent)
    except OSError as error:
        raise DiskError(f"{output} was not written: {error.strerror or error} ({error.filename or output})") from None
    except DiskError as error:  # the writer knows only its temporary folder
        raise DiskError(str(error) if str(output) in str(error) else f"{output} was not written: {error}") from None
    except KeyboardInterrupt:
        if not output.exists():
            tell(f"{output} was not written: a signal stopped the conversion, and nothing of it is left")
        raise
    finally:
        if not output.exists():
            with suppress(OSError):  # another program has put something there in the meantime
                for folder in made:
                    folder.rmdir()


def require_absent(output: Path) -> None:
    try:
        is_there = output.exists() or output.is_symlink()
    except OSError as error:
        raise DiskError(f"--output {str(output)[:300]} cannot be written: {error.strerror or error}") from None
    if is_there:
        raise CheckpointError(f"--output {output} is there already: nothing is ever written over, name a folder that"
                              " does not exist")  # fmt: skip


@contextmanager
def _removed_unless_done(staging: Path) -> Iterator[None]:
    """Remove the staging folder after a failure or SIGTERM; after SIGKILL it remains, under a name that nothing
    reads.
    """

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        if staging.exists():
            shutil.rmtree(staging, ignore_errors=True)


_SECONDS = 10.0  # between two lines


class Bar:
    """Progress display, used in a ``with`` statement."""

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
        self.done += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            print(f"{100 * self.done / self.total:.0f} % of {self.total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
