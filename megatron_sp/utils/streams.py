"""Standard streams that fail: a run goes on (``survive``), a program without its result fails (``checked``)."""

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
    """Standard output is the program's result, and cannot be written."""


class Stream:
    """A text stream whose writes never raise an OSError; a character that its encoding lacks is written as "?"."""

    def __init__(self, stream: Any, name: str, is_result: bool) -> None:
        # stream: None if it was closed before the program began; is_result: a failure ends the program (OutputLost)
        self._stream, self._name, self.is_result = stream, name, is_result
        self.error: OSError | None = None  # the first

    def write(self, text: str) -> int:
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
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def isatty(self) -> bool:
        try:
            return self._stream is not None and bool(self._stream.isatty())
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return int(self._opened().fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_stream"), name)

    def _opened(self) -> Any:
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream

    def _failed(self, error: OSError | ValueError) -> None:
        if self.error is not None:
            return
        # a ValueError: it has been closed
        self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, os.strerror(errno.EBADF))
        reason, name = self.error.strerror or str(self.error), _NAMES[self._name]
        if not self.is_result:
            lost = f"{name} cannot be written ({reason}): its output there is lost, the program continues"
            _say_elsewhere(self._name, f"warning: {lost}")
            return
        if self.error.errno != errno.EPIPE:
            _say_elsewhere(self._name, f"error: {name} cannot be written: {reason}")
        self.require()

    def require(self) -> None:
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
    """Return the errors of standard output and standard error since ``survive()``, by name."""
    streams = {name: getattr(sys, name) for name in _NAMES}
    return {
        name: stream.error.strerror or str(stream.error)
        for name, stream in streams.items()
        if isinstance(stream, Stream) and stream.error is not None
    }


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Ensure that a program's result has been written. Raises OutputLost: standard output has failed."""
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
                    # to /dev/null; otherwise flushing its buffer at exit would fail and change the exit code
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        null = os.open(os.devnull, os.O_WRONLY)
                        os.dup2(null, before[name].fileno())
                        os.close(null)
        ours["stdout"].require()


def complain(text: str) -> None:
    """Write a line to standard error, from any thread or signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _say_elsewhere(name: str, text: str) -> None:
    other = getattr(sys, "stdout" if name == "stderr" else "stderr", None)
    if name == "stderr" and isinstance(other, Stream) and other.is_result:
        return  # a result must not be mixed with it
    with contextlib.suppress(OSError, ValueError, AttributeError):
        other.write(f"{text}\n")  # type: ignore[union-attr]
        other.flush()  # type: ignore[union-attr]


def _fill_standard_descriptors() -> None:
    # open descriptors 0 to 2 if they are closed, so that no file of ours gets one of them and with it the output
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != wanted:
                os.dup2(opened, wanted)
                os.close(opened)
