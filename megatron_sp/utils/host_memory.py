"""Memory of this host, or of the container or batch job that a process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroups of version 1 have no word for it, but the largest number of pages


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes still available to this process, by its host and the cgroups around it; None if they cannot be read."""
    limits = [free for free in (_meminfo(root, "MemAvailable"), *_free_in_cgroups(root)) if free is not None]
    return max(0, min(limits)) if limits else None


def swap_bytes(root: Path = Path("/")) -> int:
    """Return the free swap space of this host in bytes, or of the tightest cgroup around this process; 0 if it cannot be read."""
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


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes left in each cgroup around this process that has a limit; the page cache of files is reclaimed when needed."""
    for folder in _cgroups(root, "", ""):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            yield limit - used + _cached(folder, "inactive_file")
    for folder in _cgroups(root, "memory", "memory"):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            yield limit - used + _cached(folder, "total_inactive_file")


def _cgroups(root: Path, controller: str, mount: str) -> Iterator[Path]:
    # Yield the folders of this process's cgroup and those around it, the mount itself last. controller: memory for
    # version 1, nothing for version 2. mount: folder under /sys/fs/cgroup.
    base, path = root / "sys/fs/cgroup" / mount, ""
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, of_group = line.split(":", 2)
            path = of_group if controller in controllers.split(",") else path
    except (OSError, ValueError):
        pass
    own = Path(path.strip("/"))
    for inner in (own, *own.parents):  # a container may see its own cgroup as the mount, and not the path to it
        if ".." not in inner.parts:
            yield base / inner


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
