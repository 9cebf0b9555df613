"""On-disk cache of index arrays: built once, then memory-mapped by every process, and verified at every load."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
import zlib
from collections.abc import Callable
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

# A set of arrays has a key, which contains a hash of everything that determines them. It is stored as {key}-{name}.npy
# and, written last, {key}.json with the CRC-32 of each. An incomplete set is rebuilt, a damaged one (a flipped bit, an
# array of objects) with a warning. Processes that need a set at once wait on a file lock for the one that builds it;
# the kernel releases the lock if that process is killed. Without locks in the file system every process builds, and
# renames still hide half-written files.


def cached_arrays(folder: str | Path | None, key: str, expected: Expected, build: Callable[[], Arrays]) -> Arrays:
    """Return read-only arrays of these shapes and dtypes: memory-mapped from ``folder``, or built (and stored) now.

    Without a folder, or where nothing can be written, the arrays stay in memory.
    """
    if folder is None:
        return build()
    folder = Path(folder)
    arrays = _load(folder, key, expected)
    if arrays is not None:
        return arrays
    built: Arrays | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX)
            arrays = _load(folder, key, expected, warn=True)  # whoever held the lock before may have built it
            if arrays is not None:
                return arrays
            built = build()
            _store(folder, key, built)
        finally:
            os.close(fd)
    except OSError as error:
        if str(folder) not in _warned:
            _warned.add(str(folder))
            logger.warning(
                "index cache %s cannot be written (%s): the indices stay in memory and are rebuilt at every start;"
                " choose another folder with --data-cache-path", folder, error.strerror or error,
            )  # fmt: skip
        return build() if built is None else built
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
        array: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # np.load takes archives and pickles as well
    except OSError:
        raise
    except Exception as error:  # a damaged header: whatever the parser and the tokenizer of this Python raise
        raise ValueError(f"{path.name} has no readable header: {error or type(error).__name__}") from error
    fits = len(array.shape) == len(shape) and all(
        wanted in (size, ANY_LENGTH) for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} is {array.dtype} {array.shape}, expected {dtype} {shape}")
    if _crc(array) != checksum:
        raise ValueError(f"{path.name} has changed since it was written (CRC-32 differs)")
    return array


def _store(folder: Path, key: str, arrays: Arrays) -> None:
    for path in folder.glob(f".{key}-*.tmp"):  # of a killed process; recent ones may still be written to
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
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


def _crc(array: np.ndarray) -> int:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    value = 0
    for start in range(0, raw.size, _CRC_BYTES):
        value = zlib.crc32(raw[start : start + _CRC_BYTES].data, value)
    return value
