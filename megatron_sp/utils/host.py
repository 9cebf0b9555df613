"""This host: its processes, its cores, and the memory that is left to this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroups of version 1 have no word for it, but the largest number of pages


def machine() -> str:
    """Return an identifier of the host, as far as pids are valid."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc; elsewhere host names do not do: containers and cloned images share theirs
        return socket.gethostname()


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False without /proc."""
    try:
        return _state(pid) in ("T", "t")
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return _state(pid) not in ("Z", "X")  # a zombie has died; its parent has not reaped it yet
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


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


# -------------------------------------------------------------------------------------------------------------- memory


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes still available to this process in its host and cgroups; None if unknown."""
    limits = [] if (free := _meminfo(root, "MemAvailable")) is None else [free]
    # the page cache of files is reclaimed when needed, so it does not count as used
    for folder in _cgroups(root, "", ""):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            limits.append(limit - used + _cached(folder, "inactive_file"))
    for folder in _cgroups(root, "memory", "memory"):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            limits.append(limit - used + _cached(folder, "total_inactive_file"))
    return max(0, min(limits)) if limits else None


def swap_bytes(root: Path = Path("/")) -> int:
    """Return the free swap space in bytes, of the host or the tightest cgroup; 0 if unknown."""
    free = _meminfo(root, "SwapFree") or 0
    for folder in _cgroups(root, "", ""):
        limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
        if limit is not None and used is not None:
            free = min(free, limit - used)
    return max(0, free)


def _meminfo(root: Path, name: str) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        return int(lines[name].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _cgroups(root: Path, controller: str, mount: str) -> Iterator[Path]:
    # the folders of this process's cgroup and those around it, the mount itself last. controller: memory for
    # version 1, nothing for version 2. mount: folder under /sys/fs/cgroup.
    path = ""
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, of_group = line.split(":", 2)
            path = of_group if controller in controllers.split(",") else path
    except (OSError, ValueError):
        pass
    own = Path(path.strip("/"))
    for inner in (own, *own.parents):  # a container may see its own cgroup as the mount, and not the path to it
        if ".." not in inner.parts:
            yield root / "sys/fs/cgroup" / mount / inner


def _cached(folder: Path, name: str) -> int:
    try:
        return int(dict(line.split() for line in (folder / "memory.stat").read_text().splitlines()).get(name, 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    # the number in a file; None if there is none, or it is "max"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
