"""Handling of failing standard output and standard error: full disks, closed pipes, vanished terminals.

A training run must not end because its output cannot be written: ``survive()`` replaces the streams with ones that drop
such output and remember the reason. A program whose output is its result must not report success then: within
``checked()`` the first failure of standard output ends the program with an exit code and, if standard error still
works, a message; a closed pipe ends it quietly, as ``cat``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from megatron_sp.utils.errors import EXIT_DISK

EXIT_READER_GONE = 128 + signal.SIGPIPE  # as the shell reports programs that SIGPIPE ends
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class OutputLost(SystemExit):
    """Raised when standard output is the program's result and cannot be written; ends the program with ``code``."""


class Stream:
    """A text stream whose writes never raise an OSError.

    A character that its encoding lacks is written as "?".

    Args:
        stream: the underlying stream; None if it was closed before the program began.
        name: stdout or stderr.
        is_result: the output is the program's result, so a failure ends the program (``OutputLost``).
    """

    def __init__(self, stream: Any, name: str, is_result: bool) -> None:
        self._stream, self._name, self.is_result = stream, name, is_result
        self.error: OSError | None = None  # the first

    def write(self, text: str) -> int:
        """Write text; what cannot be encoded is replaced, and a failure ends the stream."""
        try:
            self._opened().write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush; a failure ends the stream."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self._stream is not None and bool(self._stream.isatty())
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """File descriptor of the stream."""
        return int(self._opened().fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_stream"), name)

    def _opened(self) -> Any:
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream

    def _failed(self, error: OSError | ValueError) -> None:
        is_first = self.error is None
        if self.error is None:  # a ValueError: it has been closed
            self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not is_first:
            return
        reason, name = self.error.strerror or str(self.error), _NAMES[self._name]
        if not self.is_result:
            _say_elsewhere(
                self._name,
                f"warning: {name} cannot be written ({reason}): its output there is lost, the program continues",
            )
            return
        if self.error.errno != errno.EPIPE:
            _say_elsewhere(self._name, f"error: {name} cannot be written: {reason}")
        self.require()

    def require(self) -> None:
        """Raise OutputLost if the stream is the program's result and some of it has been lost."""
        if self.is_result and self.error is not None:
            raise OutputLost(EXIT_READER_GONE if self.error.errno == errno.EPIPE else EXIT_DISK)


def survive() -> None:
    """Make failing output non-fatal from now on; for a process whose output is not its result."""
    _fill_standard_descriptors()
    for name in _NAMES:
        stream = getattr(sys, name)
        if isinstance(stream, Stream):
            stream.is_result = False
        else:
            setattr(sys, name, Stream(stream, name, is_result=False))


def lost() -> dict[str, str]:
    """Return the errors of standard output and standard error since ``survive()``, by name; empty if there were none."""
    streams = {name: getattr(sys, name) for name in _NAMES}
    return {
        name: stream.error.strerror or str(stream.error)
        for name, stream in streams.items()
        if isinstance(stream, Stream) and stream.error is not None
    }


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Context manager for printing a program's result: on exit all of it has been written.

    Raises:
        OutputLost: standard output could not be written; output after the failure is dropped.
    """
    _fill_standard_descriptors()
    before = {name: getattr(sys, name) for name in _NAMES}
    if any(isinstance(stream, Stream) for stream in before.values()):  # nested in another one
        yield
        return
    ours = {name: Stream(stream, name, is_result=name == "stdout") for name, stream in before.items()}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        try:
            for stream in ours.values():
                stream.flush()
        finally:
            for name, stream in ours.items():
                setattr(sys, name, before[name])
                if stream.error is not None:
                    _silence(before[name])
        ours["stdout"].require()


def complain(text: str) -> None:
    """Write a line to standard error, ignoring errors; may be called from a signal handler or a thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _say_elsewhere(name: str, text: str) -> None:
    other = getattr(sys, "stdout" if name == "stderr" else "stderr", None)
    if name == "stderr" and isinstance(other, Stream) and other.is_result:
        return  # a result must not be mixed with it
    with contextlib.suppress(OSError, ValueError, AttributeError):
        other.write(f"{text}\n")  # type: ignore[union-attr]
        other.flush()  # type: ignore[union-attr]


def _silence(stream: Any) -> None:
    # redirect a failed stream to /dev/null; otherwise flushing its buffer at exit would fail and change the exit code
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _fill_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed, so that no file of ours gets one of them and with it the program's output."""
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != wanted:
                os.dup2(opened, wanted)
                os.close(opened)
