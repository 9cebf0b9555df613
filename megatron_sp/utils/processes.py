"""Processes of this host."""

from __future__ import annotations

import os


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")  # a zombie has died, only its parent has not looked yet
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
