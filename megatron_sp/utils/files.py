"""Writing files so that a crash or a power cut leaves the old contents or the new ones, never a mixture.

The order is always: write under a temporary name in the same folder, fsync the file, rename it over the old one, fsync the
folder. A rename within one folder is atomic; the two fsyncs put it on the disk, not only in the kernel's memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # file systems that cannot open or sync a folder


def fsync_dir(path: str | Path) -> None:
    """Put a folder's entries (files created, renamed or removed in it) on the disk; a no-op where that is not supported."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return
        raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(fd)


def write_synced(path: str | Path, data: bytes) -> None:
    """Create a new file with these contents and put it on the disk.

    Raises:
        FileExistsError: there is such a file; it is left as it is.
        OSError: as any write.
    """
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def atomic_write_text(path: str | Path, text: str) -> None:
    """Replace a file by this text (UTF-8): readers see the old contents or the new ones, even across a power cut.

    Raises:
        OSError: nothing was replaced, and no temporary file is left.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_synced(temporary, text.encode("utf-8"))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def atomic_write_json(path: str | Path, value: Any) -> None:
    """``atomic_write_text`` of indented JSON with a newline at its end.

    Raises:
        TypeError, ValueError: the value is not JSON; the file is left as it was.
        OSError: as ``atomic_write_text``.
    """
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")


def free_bytes(path: str | Path) -> int:
    """Bytes an ordinary user can still write to the file system of ``path`` (or of its nearest existing parent)."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
