"""Processes of a part, and their end: none stays behind, whoever started it and whatever group it has moved to.

A part and everything that it starts inherit a mark in their environment. ``/proc`` tells who has it; where there is no
``/proc``, the process group of the part is what is ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MARK = "FIRST_LIGHT_PART"


def marked(mark: str) -> list[int]:
    """Return the processes, other than this one, whose environment has the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def end_marked(mark: str, patience_s: float = 30.0) -> None:
    """Kill everything that has the mark; what a driver holds in the kernel may outlive ``patience_s`` seconds, and is left."""
    deadline = time.monotonic() + patience_s
    while (
        pids := marked(mark)
    ) and time.monotonic() < deadline:  # what one of them has started meanwhile is found the next time
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a part's process and its group; ``grace_s``: seconds between SIGTERM and SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)  # after SIGKILL, too: one that a driver holds does not end


def end_with_parent(scratch: Path) -> None:
    """Have this process and everything that it has started end as soon as its standard input is closed: its parent is no more.

    Args:
        scratch: a folder that is then removed.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        shutil.rmtree(scratch, ignore_errors=True)
        end_marked(os.environ[MARK])
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    sys.stdout.flush()
    threading.Thread(target=watch, daemon=True).start()
