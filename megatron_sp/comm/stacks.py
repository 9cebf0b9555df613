"""The stack of a rank that cannot write it itself: it is stopped, or stands still where no Python code runs.

Every rank opens a file in memory when it joins, and lets a signal of its own dump the main thread's stack into it; the handler is C code,
which needs no interpreter. Another rank of the same host sends that signal and reads the file through /proc. Linux only; elsewhere there
is no such stack.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from typing import BinaryIO

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
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # now: who is woken may end at once, and the path with it
            if os.fstat(file.fileno()).st_size == 0:  # else another rank has asked, and it may have gone on since
                _signal_main_thread(pid, number)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
            return _settled(file)
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    """A stopped process gives a signal that is for all of it to any thread when it goes on, also to one without a Python stack."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or tgkill(pid, pid, number) != 0:
        os.kill(pid, number)


def _settled(file: BinaryIO) -> str:
    """All of a file, when no more comes."""
    deadline, size = time.monotonic() + _PATIENCE_S, 0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, os.fstat(file.fileno()).st_size
        if 0 < last == size:
            break
    return file.read().decode("utf-8", "replace")


def _signal() -> int:
    """A real-time signal, which nothing else uses; 0 where there are none."""
    first = getattr(signal, "SIGRTMIN", None)
    return int(first) + 9 if first is not None else 0
