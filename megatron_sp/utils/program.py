"""The outermost frame of every program, and the only way out of its process.

The interpreter's own tear-down is not for a process that has joined a process group: gloo's and NCCL's threads live as long as anybody
refers to their group, and one that asks for the interpreter's lock meanwhile (to let go of a tensor, to call back) is ended by force in the
middle of C++, which aborts the process (`terminate called without an active exception`), after all its work was done. So nobody waits for
that: what was registered for the end is done, what was said is flushed, and ``os._exit`` ends all threads at once.
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
from megatron_sp.utils.address_space import watch_imports
from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_DISK, EXIT_INTERRUPTED, EXIT_OK, ReportedError
from megatron_sp.utils.flag_field import MAX_COUNT

_PID = os.getpid()
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory", "can't start new thread",
    "Storage size calculation overflowed", "integer multiplication overflow", "Trying to create tensor with negative dimension",
    "Invalid buffer size",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU, torch's or numpy's allocator, or the system could not give the memory that was asked for."""
    if isinstance(error, MemoryError) or (type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "memory" in str(error)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def integer(high: int = MAX_COUNT) -> Callable[[str], int]:
    """For argparse's ``type=``: an integer that nothing behind the flag has to be afraid of.

    Args:
        high: the largest, and with a minus the smallest.
    """

    def convert(text: str) -> int:
        value = int(text)
        if abs(value) > high:
            raise argparse.ArgumentTypeError(f"{text if len(text) < 40 else text[:37] + '...'} must be at most {high}")
        return value

    convert.__name__ = "int"  # argparse's messages name it
    return convert


def first_words(error: BaseException) -> str:
    """The first line of what a library says, for a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def code_of(main: Callable[[], int | None], name: str = "") -> int:
    """Call ``main`` and return its exit code, or that of what went wrong, said on standard error.

    A message of ours, Ctrl-C, memory that is not there and the disk are answered; a mistake of ours is raised.

    Args:
        main: does the work.
        name: of the program, in front of the message.
    """
    prefix = name or "error"
    try:
        return main() or EXIT_OK
    except ReportedError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            print(f"{prefix}: out of memory: {first_words(error)}: ask for less, or raise the limit", file=sys.stderr)
            return EXIT_CONFIG
        if isinstance(error, OSError) and error.strerror:
            place = str(error.filename or "the system")
            print(f"{prefix}: {place if len(place) < 200 else place[:60] + '...'}: {error.strerror}", file=sys.stderr)
            return EXIT_CONFIG if error.errno == errno.ENAMETOOLONG else EXIT_DISK
        raise


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's ``main`` and leave the process with its code; never returns.

    A failure of standard output has a code of its own (``utils/output.py``); the others are as ``code_of`` has them.
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
    """End this process, with everything flushed, but without the interpreter's tear-down. From the main thread.

    Args:
        as_usual: do first what an ordinary end does: wait for threads that are no daemons, call what was registered with ``atexit``
            (trackers, temporary folders). After a failure nobody waits. A fork leaves what was registered to its parent.
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
        with contextlib.suppress(Exception):  # full or closed: that was told when it happened
            stream.flush()
    os._exit(code)
