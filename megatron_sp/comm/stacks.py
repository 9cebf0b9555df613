"""The stack of a rank that cannot write it itself: it is stopped, or stands still where no Python code runs.

Every rank opens a file in memory when it joins, and lets a signal of its own dump the main thread's stack into it; the handler is C code,
which needs no interpreter. Another rank of the same host sends that signal and reads the file through /proc. Linux only; elsewhere there
is no such stack.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

from megatron_sp.utils.processes import is_stopped

_PATIENCE_S = 20.0  # a process that computes on a busy machine; one that has ended is not waited for
_NONE = -1


def offer_stack() -> int:
    """Let other ranks of this host have this process's stacks; returns the file descriptor they ask for, -1 where that cannot be."""
    number = _signal()
    if not number or not hasattr(os, "memfd_create"):
        return _NONE
    descriptor = os.memfd_create("stacks")
    faulthandler.register(
        number, file=descriptor, all_threads=False, chain=False
    )  # other threads run on: their frames are not safe to read
    return descriptor


def take_stack(pid: int, descriptor: int) -> str:
    """The stacks of another process of this host, "" if they cannot be had.

    A stopped process is woken (SIGCONT) for it, for a stopped one does not handle signals: it belongs to a job that has failed, and
    can end by itself then.
    """
    number = _signal()
    if not number or descriptor == _NONE:
        return ""
    try:
        before = os.stat(f"/proc/{pid}/fd/{descriptor}").st_size
        os.kill(pid, number)
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
        return _grown(f"/proc/{pid}/fd/{descriptor}", before)
    except OSError:
        return ""


def _grown(path: str, before: int) -> str:
    """What was added to a file, when no more comes."""
    deadline, size = time.monotonic() + _PATIENCE_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, os.stat(path).st_size
        if before < last == size:
            break
    with open(path, "rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", "replace")


def _signal() -> int:
    """A real-time signal, which nothing else uses; 0 where there are none."""
    first = getattr(signal, "SIGRTMIN", None)
    return int(first) + 9 if first is not None else 0
