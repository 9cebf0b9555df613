"""Reading and writing of files: those of our own, and those whose path a flag gives."""

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

# file systems that cannot open or sync a folder
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
_MODES = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "rb+"}
_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a disk",
}  # fmt: skip
_MOST_LINKS = 40
_OPEN_FILES = ("/dev/fd/", "/proc/")  # names of files that are already open: /dev/stdout links to one


def file_system(where: int | str | Path) -> str:
    """Return the type of a file's file system; "" if unknown."""
    device = os.stat(where).st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for fields in map(str.split, mounts):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-", 6) + 1]
    return ""


def free_bytes(path: str | Path) -> int:
    """Return the free bytes at a path, which need not exist."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def fsync_dir(path: str | Path) -> None:
    """Fsync a folder's entries, where that is supported."""
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


@contextlib.contextmanager
def held_folder(folder: str | Path, patience_s: float = 10.0) -> Iterator[None]:
    """Keep other processes out of a folder, for a look and a write that belong together."""
    # after ``patience_s``, or where the file system has no locks for folders, it goes on without
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


# --------------------------------------------------------------------------------------------------- files of our own
#
# They are never links, and are replaced atomically: a crash or power failure leaves the old contents or the new ones.
# The order is always: write under a temporary name in the same folder, fsync the file, rename it over the old one,
# fsync the folder.


def require_own(path: str | Path) -> None:
    """Raise OSError unless a path is free or a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and should be a file", str(path))


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not a regular one, such as "a folder"."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def open_own(path: str | Path, flags: int) -> BinaryIO:
    """Open a regular file of our own; never follows a link, never blocks."""
    require_own(path)
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return cast("BinaryIO", open(fd, _MODES[flags & (os.O_WRONLY | os.O_RDWR)]))
    except BaseException:
        os.close(fd)
        raise


def write_synced(path: str | Path, data: bytes) -> None:
    """Create a new file with these contents and fsync it. Raises FileExistsError."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def atomic_write_text(path: str | Path, text: str) -> None:
    """Replace a file of our own by this text (UTF-8). Raises OSError: nothing was replaced."""
    require_own(path)
    atomic_replace(Path(path), text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Replace a file of our own by indented JSON, as ``atomic_write_text``."""
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")


def atomic_replace(path: Path, data: bytes, *, keep_mode: bool = False) -> None:
    """Replace the contents of what the caller knows to be a regular file."""
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


# -------------------------------------------------------------------------------------------- paths given by a flag
#
# What a flag names (--output, --json, --report, ...) may be a FIFO or a device, which is written to, as by a shell's >;
# of a link to a regular file the target is replaced.


def open_readable(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; never blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and should be a file", str(path))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_text(path: str | Path, name: str, max_bytes: int, kind: str) -> str:
    """Read a text file, which messages call ``name`` and expect to be ``kind``. Raises ConfigError."""
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


def require_place(path: str | Path, flag: str, *, only_file: bool = False) -> None:
    """Raise ConfigError if a result cannot be written to a path; ``only_file``: nor to a FIFO or a device."""
    try:
        place = file_place(path) if only_file else regular_place(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if place is not None and not place.parent.is_dir():
        folder = place.parent if os.path.islink(path) else Path(path).parent
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {folder}")


def regular_place(path: str | Path) -> Path | None:
    """Resolve a path to its regular file; None for a FIFO, a device or an open file. Raises OSError."""
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):  # one by one: the last link of /dev/stdout may lead to a regular file
        if name.startswith(_OPEN_FILES):
            return None
        if not os.path.islink(name):
            break
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISREG(mode):
        return Path(os.path.realpath(path))
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return None
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, f"it is {kind_of(mode)}; give a file", str(path))


def file_place(path: str | Path) -> Path:
    """Resolve a path like ``regular_place``, for output that is not written in one go."""
    place = regular_place(path)
    if place is None:
        raise OSError(errno.EINVAL, "it is a FIFO or a device; give a file", str(path))
    return place


def write_output(path: str | Path, data: str | bytes) -> None:
    """Replace a regular file, or write to a FIFO or device. Raises OSError: a regular file is unchanged."""
    data = data.encode("utf-8") if isinstance(data, str) else data
    place = regular_place(path)
    if place is not None:
        atomic_replace(place, data, keep_mode=True)
        return
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
