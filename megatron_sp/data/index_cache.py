"""On-disk cache of index arrays: built once, then memory-mapped by every process, and verified at every load.

A set of arrays has a key, which contains a hash of everything that determines them. It is stored as
``{key}-{name}.npy`` files and, written last, a ``{key}.json`` with the CRC-32 of each. A set is used only if every
array has the expected shape and dtype and the stored CRC-32; an incomplete set is rebuilt, a damaged one (a flipped
bit, an array of objects) with a warning. Files are written under temporary names and renamed. Processes that need the
same set at once wait on a file lock for the one that builds it; the kernel releases the lock if that process is killed.
Where the file system has no locks, every process builds, and the renames still hide half-written files. If nothing can
be written, the arrays stay in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_sp.utils.files import atomic_write_json, open_readable, require_own

try:
    import fcntl
except ImportError:  # not a POSIX system: no locks, so everyone builds
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]
Expected = dict[str, tuple[tuple[int, ...], np.dtype]]
ANY_LENGTH = -1
"""In an expected shape: how long this dimension is, is known only once the arrays are built."""
_CRC_BYTES = 1 << 24
_STALE_SECONDS = 3600.0
_warned: set[str] = set()


def cached_arrays(folder: str | Path | None, key: str, expected: Expected, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``key``, not to be written to: memory-mapped from ``folder``, or built (and stored) now.

    Args:
        folder: folder of the files; None keeps everything in memory.
        expected: shape (``ANY_LENGTH`` for unknown dimensions) and dtype that each array must have.
    """
    if folder is None:
        return build()
    folder = Path(folder)
    arrays = _load(folder, key, expected)
    if arrays is not None:
        return arrays
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            arrays = _load(folder, key, expected, warn=True)  # whoever held the lock before may have built it
            if arrays is not None:
                return arrays
            built = build()
            try:
                _store(folder, key, built)
            except OSError as error:
                _warn_once(folder, error)
                return built
    except OSError as error:
        _warn_once(folder, error)
        return build()
    return _load(folder, key, expected) or built


def _load(folder: Path, key: str, expected: Expected, warn: bool = False) -> Arrays | None:
    # the stored set if it is complete and intact, else None; ``warn``: log a warning if it is damaged
    record_path = folder / f"{key}.json"
    try:
        with open_readable(record_path) as file:
            record = json.loads(file.read())
        return {name: _load_one(folder / f"{key}-{name}.npy", record[name], *expected[name]) for name in expected}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError, EOFError) as error:
        if warn:
            logger.warning("index cache %s is damaged and is rebuilt: %s", record_path, error)
        return None


def _load_one(path: Path, checksum: object, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    try:
        open_readable(path).close()
        array: np.ndarray = np.lib.format.open_memmap(
            path, mode="r"
        )  # not np.load: that takes archives and pickles as well
    except OSError:
        raise
    except Exception as error:  # a damaged header: whatever the parser and the tokenizer of this Python raise
        raise ValueError(f"{path.name} has no readable header: {error or type(error).__name__}") from error
    if not _fits(array.shape, shape) or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} is {array.dtype} {array.shape}, expected {dtype} {shape}")
    if _crc(array) != checksum:
        raise ValueError(f"{path.name} has changed since it was written (CRC-32 differs)")
    return array


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(found) == len(expected) and all(b in (a, ANY_LENGTH) for a, b in zip(found, expected, strict=True))


def _store(folder: Path, key: str, arrays: Arrays) -> None:
    _remove_stale(folder, key)
    record = {}
    for name, array in arrays.items():
        path = folder / f"{key}-{name}.npy"
        temporary = folder / f".{key}-{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(temporary, "xb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            require_own(path)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        record[name] = _crc(array)
    atomic_write_json(folder / f"{key}.json", record)


def _remove_stale(folder: Path, key: str) -> None:
    # delete temporary files of a killed process; recent ones may still be written to on a file system without locks
    for path in folder.glob(f".{key}-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file if the file system supports locks; it is released at the latest when the process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _crc(array: np.ndarray) -> int:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    value = 0
    for start in range(0, raw.size, _CRC_BYTES):
        value = zlib.crc32(raw[start : start + _CRC_BYTES].data, value)
    return value


def _warn_once(folder: Path, error: OSError) -> None:
    if str(folder) not in _warned:
        _warned.add(str(folder))
        logger.warning(
            "index cache %s cannot be written (%s): the indices stay in memory and are rebuilt at every start; choose another"
            " folder with --data-cache-path",
            folder,
            error.strerror or error,
        )
