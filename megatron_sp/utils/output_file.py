"""Writing to a path given by a flag, of whatever kind: ``--output``, ``--json``, ``--html``, ``--report``, ``--picture``.

A regular file is replaced atomically and keeps its permissions; a link to one is kept, and its target is replaced. A
FIFO, a terminal or another character device (``/dev/stdout`` too) is written to, as by a shell's ``>``, and never
replaced. A folder, a socket, a disk, a link to one of these and a loop of links are rejected with a message. Files of
our own follow other rules: ``utils/files.py``.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import atomic_replace, kind_of

_MOST_LINKS = 40
_OPEN_FILES = ("/dev/fd/", "/proc/")  # names of files that are already open: /dev/stdout links to one


def require_place(path: str | Path, flag: str, *, only_file: bool = False) -> None:
    """Check, before the work is done, that its result can be written to a path.

    Args:
        only_file: reject a FIFO or a device, too.
    Raises:
        ConfigError: the folder does not exist, or the path is a folder, a disk, a socket, or a loop of links.
    """
    try:
        place = file_place(path) if only_file else regular_place(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if place is not None and not place.parent.is_dir():
        folder = place.parent if os.path.islink(path) else Path(path).parent
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {folder}")


def regular_place(path: str | Path) -> Path | None:
    """Resolve a path to its regular file, existing or not; None for a FIFO, a device or an open file, which is to be written to.

    Raises:
        OSError: it is neither, as stated in ``strerror``.
    """
    if _is_open_already(path):
        return None
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISREG(mode):
        return Path(os.path.realpath(path))
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return None
    raise OSError(
        errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {kind_of(mode)}; give a file", str(path)
    )


def write_output(path: str | Path, data: str | bytes) -> None:
    """Replace a regular file, or write to a FIFO or device.

    Args:
        data: text is written as UTF-8.
    Raises:
        OSError: the reason is in ``strerror``; a regular file is unchanged.
    """
    data = data.encode("utf-8") if isinstance(data, str) else data
    place = regular_place(path)
    if place is None:
        _write_into(path, data)
    else:
        atomic_replace(place, data, keep_mode=True)


def file_place(path: str | Path) -> Path:
    """Resolve a path like ``regular_place``, for output that must be a file because it is not written in one go.

    Raises:
        OSError: as from ``regular_place``; also for a FIFO or a device.
    """
    place = regular_place(path)
    if place is None:
        raise OSError(errno.EINVAL, "it is a FIFO or a device; give a file", str(path))
    return place


def _is_open_already(path: str | Path) -> bool:
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        if name.startswith(_OPEN_FILES):
            return True
        if not os.path.islink(name):
            return False
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return False


def _write_into(path: str | Path, data: bytes) -> None:
    try:  # without waiting for a FIFO's reader, which may never come
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "nobody reads this FIFO: start its reader first", str(path)) from None
    with open(fd, "wb", buffering=0) as file:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        os.set_blocking(fd, True)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
