"""Stack of a rank that cannot write it itself, because it is stopped or hangs in code outside Python.

Every rank opens an in-memory file when it joins, and registers a signal that dumps the main thread's stack into it; the
handler is C code, which does not need the interpreter. Another rank of the same host sends that signal and reads the
file through /proc. Linux only; elsewhere no stack is available.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from typing import BinaryIO

from megatron_sp.utils.processes import is_stopped

_PATIENCE_S = 20.0  # enough for a process that computes on a busy machine; one that has ended is not waited for
_NONE = -1


def offer_stack() -> int:
    """Let other ranks of this host read this process's stack; return the file descriptor to read it from, -1 if unsupported."""
    number = _signal()
    if not number or not hasattr(os, "memfd_create"):
        return _NONE
    descriptor = os.memfd_create("stacks")
    faulthandler.register(
        number, file=descriptor, all_threads=False, chain=False
    )  # other threads run on: their frames are not safe to read
    return descriptor


def take_stack(pid: int, descriptor: int) -> str:
    """Return the stack of another process of this host; "" if it is unavailable.

    A stopped process is resumed (SIGCONT), since it handles no signals while stopped: it belongs to a job that has
    failed, and can then end by itself.
    """
    number = _signal()
    if not number or descriptor == _NONE:
        return ""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # before waking it: a woken process may end at once, and its path with it
            if os.fstat(file.fileno()).st_size == 0:  # otherwise another rank has asked, and it may have gone on since
                _signal_main_thread(pid, number)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
            return _settled(file)
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread: one sent to a stopped process may go to any thread, even one without a Python stack."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or tgkill(pid, pid, number) != 0:
        os.kill(pid, number)


def _settled(file: BinaryIO) -> str:
    """Return the contents of a file once it has stopped growing."""
    deadline, size = time.monotonic() + _PATIENCE_S, 0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, os.fstat(file.fileno()).st_size
        if 0 < last == size:
            break
    return file.read().decode("utf-8", "replace")


def _signal() -> int:
    """Return the number of a real-time signal that nothing else uses; 0 if there are none."""
    first = getattr(signal, "SIGRTMIN", None)
    return int(first) + 9 if first is not None else 0
