"""Outermost frame of every program: error reporting, exit codes and the end of the process.

The interpreter's normal shutdown is unsafe for a process that has joined a process group: the threads of gloo and NCCL
live as long as their group is referenced, and one that requests the interpreter lock during shutdown (to release a
tensor, for a callback) is killed in the middle of C++ code, which aborts the process (`terminate called without an
active exception`) after all its work is done. So the shutdown is skipped: exit handlers are run, streams are flushed,
and ``os._exit`` ends all threads at once.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_sp.utils import output
from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_DISK, EXIT_INTERRUPTED, EXIT_OK, ReportedError
from megatron_sp.utils.import_checks import watch_imports
from megatron_sp.utils.numbers import MAX_COUNT

_PID = os.getpid()
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory", "can't start new thread",
    "Storage size calculation overflowed", "integer multiplication overflow", "Trying to create tensor with negative dimension",
    "Invalid buffer size",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated, on a GPU, by torch, by numpy or by the system."""
    if isinstance(error, MemoryError) or (
        type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "memory" in str(error)
    ):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def integer(high: int = MAX_COUNT) -> Callable[[str], int]:
    """Return a converter for argparse's ``type=`` that accepts integers in [-high, high].

    Args:
        high: the largest absolute value.
    """

    def convert(text: str) -> int:
        value = int(text)
        if abs(value) > high:
            raise argparse.ArgumentTypeError(f"{text if len(text) < 40 else text[:37] + '...'} must be at most {high}")
        return value

    convert.__name__ = "int"  # argparse's messages name it
    return convert


def first_words(error: BaseException) -> str:
    """Return the first line of an error's text (at most 300 characters), or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def code_of(main: Callable[[], int | None]) -> int:
    """Call ``main`` and return its exit code, or that of its error, which is printed on standard error.

    Handles ``ReportedError``, Ctrl-C, out of memory and OSError; any other exception is a bug and is raised.
    """
    try:
        return main() or EXIT_OK
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            print(f"error: out of memory: {first_words(error)}: ask for less, or raise the limit", file=sys.stderr)
            return EXIT_CONFIG
        if isinstance(error, OSError) and error.strerror:
            place = str(error.filename or "the system")
            print(f"error: {place if len(place) < 200 else place[:60] + '...'}: {error.strerror}", file=sys.stderr)
            return EXIT_CONFIG if error.errno == errno.ENAMETOOLONG else EXIT_DISK
        raise


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's ``main`` and exit with its code; never returns.

    A failure of standard output has a code of its own (``utils/output.py``); others have those of ``code_of``.
    """
    code, as_usual = 1, True
    watch_imports()
    try:
        with output.checked():
            try:
                code = code_of(main)
                as_usual = code != EXIT_INTERRUPTED
            except SystemExit as end:
                if isinstance(end, output.OutputLost):
                    raise
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                code = end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else 1
            except Exception:
                as_usual = False
                traceback.print_exc()
    except output.OutputLost as lost:
        code = int(str(lost.code))
    leave(code, as_usual=as_usual)


def leave(code: int, *, as_usual: bool = True) -> NoReturn:
    """Exit this process with streams flushed, but without the interpreter's shutdown. Call it from the main thread.

    Args:
        as_usual: first wait for non-daemon threads and run ``atexit`` handlers (trackers, temporary folders), as a
            normal exit does; not after a failure. A forked child leaves the handlers to its parent.
    """
    if "torch" not in sys.modules and os.getpid() == _PID:  # no backend, no threads of one
        sys.exit(code)
    if as_usual and os.getpid() == _PID:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's processes do, which also end by os._exit
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # full or closed: it was reported when it happened
            stream.flush()
    os._exit(code)
