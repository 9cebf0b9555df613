"""The outermost frame of a small program: whatever happens ends in one message and an exit code, never in a traceback."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable

from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_DISK, EXIT_OK, ReportedError
from megatron_sp.utils.flag_field import MAX_COUNT

EXIT_INTERRUPTED = 130
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


def run_program(main: Callable[[], int], name: str = "") -> int:
    """Call ``main`` and return its exit code, or that of what went wrong, said on standard error.

    Args:
        main: does the work; ReportedErrors of its own, an interrupt, a closed pipe, memory and the disk are answered here.
        name: of the program, in front of the message.
    """
    prefix = f"{name}: " if name else "error: "
    try:
        return main()
    except ReportedError as error:
        print(f"{prefix}{error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            print(f"{prefix}out of memory: {first_words(error)}: make what is asked for smaller, or raise the limit", file=sys.stderr)
            return EXIT_CONFIG
        if isinstance(error, OSError) and error.strerror:
            place = str(error.filename or "the system")
            print(f"{prefix}{place if len(place) < 200 else place[:60] + '...'}: {error.strerror}", file=sys.stderr)
            return EXIT_CONFIG if error.errno == errno.ENAMETOOLONG else EXIT_DISK
        raise
