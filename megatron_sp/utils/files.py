"""Atomic file writes: a crash or power failure leaves the old contents or the new ones, never a mixture.

The order is always: write under a temporary name in the same folder, fsync the file, rename it over the old one, fsync
the folder. A rename within one folder is atomic; the two fsyncs ensure that it is on the disk, not only in the kernel's
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_sp.utils.errors import ConfigError

_NOT_SUPPORTED = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EBADF,
    errno.EACCES,
)  # file systems that cannot open or sync a folder

_MODES = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "rb+"}


def file_system(where: int | str | Path) -> str:
    """Return the type of a file's file system (by descriptor or path) according to /proc; "" if unknown."""
    device = os.stat(where).st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for fields in map(str.split, mounts):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-", 6) + 1]
    return ""


def fsync_dir(path: str | Path) -> None:
    """Fsync a folder's entries (files created, renamed or removed in it); a no-op where that is not supported."""
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
    """Create a new file with these contents and fsync it.

    Raises:
        FileExistsError: the file exists; it is left unchanged.
        OSError: as from any write.
    """
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_own(path: str | Path, flags: int) -> BinaryIO:
    """Open a file of our own, such as a run's: links are not followed, only a regular file is opened, and the call never blocks.

    Raises:
        OSError: as from any open; or it is a link, a folder, a FIFO, a device or a socket, as stated in ``strerror``.
    """
    require_own(path)
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return cast("BinaryIO", open(fd, _MODES[flags & (os.O_WRONLY | os.O_RDWR)]))
    except BaseException:
        os.close(fd)
        raise


def open_readable(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; links are followed, and the call never blocks.

    Raises:
        OSError: as from any open; or it is a folder, a FIFO, a device or a socket, as stated in ``strerror``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and should be a file", str(path))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def require_own(path: str | Path) -> None:
    """Check that a path is free or a regular file, before it is read or written as a file of our own.

    Raises:
        OSError: it exists and is not a regular file, as stated in ``strerror``.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and should be a file", str(path))


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not a regular one, such as "a folder"."""
    kinds = {
        stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a disk",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "a device")


def atomic_write_text(path: str | Path, text: str) -> None:
    """Replace a file of our own by this text (UTF-8), atomically, even across a power failure.

    For a path given by a flag use ``utils/output_file.py``.

    Raises:
        OSError: nothing was replaced, and no temporary file is left; also raised if the path is a link or anything but
            a regular file.
    """
    require_own(path)
    atomic_replace(Path(path), text.encode("utf-8"))


def atomic_replace(path: Path, data: bytes, *, keep_mode: bool = False) -> None:
    """Replace a file's contents atomically; the caller must have checked that the path is free or a regular file.

    Args:
        keep_mode: keep the permissions of the old file.
    Raises:
        OSError: nothing was replaced, and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_synced(temporary, data)
        if keep_mode:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode) & 0o777)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


@contextlib.contextmanager
def held_folder(folder: str | Path, patience_s: float = 10.0) -> Iterator[None]:
    """Keep other processes out of a folder that ask for it likewise, for a look and a write that belong together.

    Nobody waits for ever: after ``patience_s``, or where the file system has no locks for folders, it goes on without.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # the next write will report it
        yield
        return
    try:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Replace a file of our own by indented JSON, as ``atomic_write_text``.

    Raises:
        TypeError, ValueError: the value is not JSON; the file is left unchanged.
        OSError: as ``atomic_write_text``.
    """
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")


def free_bytes(path: str | Path) -> int:
    """Return the bytes an ordinary user can still write to the file system of ``path`` (or of its nearest existing parent)."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def read_text(path: str | Path, name: str, max_bytes: int, kind: str) -> str:
    """Read the text of a file.

    Args:
        name: name of the file in messages, with the flag that gave it.
        kind: the expected kind, such as "a file of flags".
    Raises:
        ConfigError: it cannot be read, is too large, or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: larger than {max_bytes} bytes; this is not {kind}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text") from None
