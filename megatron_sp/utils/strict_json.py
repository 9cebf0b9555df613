"""Reading JSON and small files that may be damaged or malicious."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

from megatron_sp.utils.errors import CheckpointError

MAX_VALUES = 1_000_000
MAX_DEPTH = 32


def open_regular(path: Path) -> int:
    """Open for reading, without following a link or blocking. Raises CheckpointError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            why = "a checkpoint consists of plain files, copy the file there"
            raise CheckpointError(f"{path} is a symbolic link: {why}") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a plain file")
    return fd


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file. Raises CheckpointError: also if it is larger than ``max_bytes``."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size:,} bytes: more than the {max_bytes:,} that such a file can have")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def parse_object(data: bytes, where: str, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object of limited size, named ``where`` in messages. Raises CheckpointError."""
    # Python's parser needs some 64 bytes per value, so a few megabytes of ``[[],[],...`` would take hundreds: commas
    # and opening brackets are counted first. Those inside strings count too, which only makes the limit stricter.
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > max_values:
        raise CheckpointError(f"{where} has more than {max_values:,} values: refused")
    try:
        result = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply: refused") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(result, dict):
        raise CheckpointError(f"{where} must be a JSON object, not {type(result).__name__}")
    if _deeper_than(result, MAX_DEPTH):
        raise CheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels: refused")
    return result


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name[:100]!r} is given twice")
        result[name] = value
    return result


def _deeper_than(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in inner)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_counts(value: Any) -> TypeGuard[list[int]]:
    """Return whether a JSON value is a list of these."""
    return isinstance(value, list) and all(is_count(v) for v in value)
