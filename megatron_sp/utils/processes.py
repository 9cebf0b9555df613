"""State of the processes of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def machine() -> str:
    """Return an identifier of the host as far as pids are valid: boot id and pid namespace; without /proc the host name.

    Host names do not identify a host: containers and cloned images share theirs.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP, SIGTSTP) or a debugger; False if /proc is unavailable."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in (
                "Z",
                "X",
            )  # a zombie has died; its parent has not reaped it yet
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    except OSError:
        pass
    try:  # no /proc (macOS)
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
