"""Outermost frame of every program: error reporting, exit codes and the end of the process."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import importlib.metadata
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import NoReturn

from megatron_sp.utils import streams
from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_DISK, EXIT_INTERRUPTED, EXIT_OK, ConfigError, ReportedError
from megatron_sp.utils.numbers import MAX_COUNT

# 2.10 brought what the code calls without asking: ``torch.addmm(..., out_dtype=, out=)``, with which 16-bit products
# are added to fp32 gradients in place, and a ``weights_only`` reader that a crafted file cannot make run code
# (CVE-2026-24747). 2.11 is the oldest that the tests are run on (``make test-oldest``).
OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 13)
# Address space, without which torch and numpy fail with import errors, aborts in C++, or silently. Measured in a
# process that has imported it: torch for CPUs, with its threads; numpy with a single one for linear algebra.
_NEEDED = {"torch": 1300 << 20, "numpy": 105 << 20}
_PID = os.getpid()
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory",
    "can't start new thread", "Storage size calculation overflowed", "integer multiplication overflow",
    "Trying to create tensor with negative dimension", "Invalid buffer size",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, numpy or the system could not allocate memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_gpu = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "memory" in str(error)
    of_host = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or of_gpu or of_host


def integer(high: int = MAX_COUNT) -> Callable[[str], int]:
    """Return a converter for argparse's ``type=`` that accepts integers in [-high, high]."""

    def convert(text: str) -> int:
        value = int(text)
        if abs(value) > high:
            raise argparse.ArgumentTypeError(f"{text if len(text) < 40 else text[:37] + '...'} must be at most {high}")
        return value

    convert.__name__ = "int"  # argparse's messages name it
    return convert


def first_words(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def code_of(main: Callable[[], int | None]) -> int:
    """Return the exit code of ``main``, or of its error, which is printed; a bug is raised."""
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
    """Run ``main`` and exit with its code, or with that of a failure of standard output."""
    code, as_usual = 1, True
    if not any(isinstance(finder, _BeforeImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeImports())
    try:
        with streams.checked():
            try:
                code = code_of(main)
                as_usual = code != EXIT_INTERRUPTED
            except SystemExit as end:
                if isinstance(end, streams.OutputLost):
                    raise
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                code = end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else 1
            except Exception:
                as_usual = False
                traceback.print_exc()
    except streams.OutputLost as lost:
        code = int(str(lost.code))
    leave(code, as_usual=as_usual)


def leave(code: int, *, as_usual: bool = True) -> NoReturn:
    """Exit with streams flushed, but without the interpreter's shutdown; for the main thread."""
    # as_usual: first wait for non-daemon threads and run ``atexit`` handlers; not after a failure.
    # The shutdown is unsafe for a process that has joined a process group: the threads of gloo and NCCL live as long as
    # their group is referenced, and one that requests the interpreter lock during shutdown (to release a tensor, for a
    # callback) is killed in the middle of C++ code, which aborts the process after all its work is done ("terminate
    # called without an active exception"). ``os._exit`` ends all threads at once.
    if "torch" not in sys.modules and os.getpid() == _PID:  # no backend, no threads of one
        sys.exit(code)
    if as_usual and os.getpid() == _PID:  # a forked child leaves trackers and temporary folders to its parent
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's processes do before os._exit
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # full or closed: it was reported when it happened
            stream.flush()
    os._exit(code)


# ------------------------------------------------------------------------------------------- before torch is imported


class _BeforeImports(MetaPathFinder):
    # finds nothing, but raises ConfigError before torch or numpy is imported if there is too little address space for
    # it, or torch is too old
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in _NEEDED:
            require_address_space(fullname)
        if fullname == "torch":
            require_torch()
        return None


def require_address_space(package: str = "torch") -> None:
    """Raise ConfigError if the process's address space limit is too low for a package."""
    try:
        import resource
    except ImportError:  # no such limits here
        return
    limit, needed = resource.getrlimit(resource.RLIMIT_AS)[0], _NEEDED[package]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"this process may have {limit / 2**20:.0f} MiB of address space (ulimit -v), and {package} alone takes"
            f" about {needed / 2**20:.0f}: raise the limit"
        )


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.13.0a0+cu1`` gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def require_torch() -> None:
    """Raise ConfigError if the installed torch is too old, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # one that pip does not know is not checked
        return
    installed = version_numbers(version or "")[:2]  # None: the metadata is damaged
    if installed and installed < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ConfigError(
            f"torch {version} is too old: this package needs {oldest} or later (torch.addmm with out_dtype and out,"
            f" safe reading of weights): pip install 'torch>={oldest}', or bash scripts/setup_env.sh in a folder"
            " without .venv"
        )
