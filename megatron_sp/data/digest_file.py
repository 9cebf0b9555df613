"""Digest file ``PREFIX.sha256`` beside ``PREFIX.bin`` and ``PREFIX.idx``: the SHA-256 that both files must have.

It has the format that ``sha256sum`` writes and ``sha256sum -c`` reads: one line per file with 64 hexadecimal digits,
two spaces and the file name. It is written together with the data set (``writer``); ``megatron-sp data verify`` checks
it, and can create one for data without it. A pair that was renamed together with it is still recognised: files are
identified by their suffix.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

from megatron_sp.utils.errors import DataError, DiskError
from megatron_sp.utils.files import atomic_write_text

SUFFIX = ".sha256"
_MAX_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22
_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.+(\.bin|\.idx))")


def text_of(prefix: str, digests: Mapping[str, str]) -> str:
    """Return the contents of a digest file.

    Args:
        digests: suffix (".bin", ".idx") -> SHA-256 in hexadecimal digits.
    """
    return "".join(f"{digest}  {os.path.basename(prefix)}{suffix}\n" for suffix, digest in digests.items())


def write(prefix: str, digests: Mapping[str, str]) -> None:
    """Write the digest file. Raises DiskError."""
    try:
        atomic_write_text(prefix + SUFFIX, text_of(prefix, digests))
    except OSError as error:
        raise DiskError(f"{prefix}{SUFFIX} cannot be written: {error.strerror}") from None


def read(prefix: str) -> dict[str, str] | None:
    """Read the digests by suffix; None if there is no digest file.

    Raises:
        DataError: the file cannot be read, or does not list each file of the pair exactly once.
    """
    path = prefix + SUFFIX
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = [_LINE.fullmatch(line) for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    digests = {match[3]: match[1] for match in lines if match is not None}
    if len(lines) != 2 or set(digests) != {".bin", ".idx"}:
        raise DataError(
            f"{path} is not in sha256sum's format: it must have one line for the .bin and one for the .idx, digits, two spaces, name."
            " Delete it, and --write-digest creates one for the files as they are"
        )
    return digests


def compare(prefix: str, found: Mapping[str, str]) -> bool:
    """Compare the files with their digest file; return False if there is none.

    Args:
        found: actual digests of the files, by suffix.
    Raises:
        DataError: a digest differs, or the digest file cannot be read.
    """
    wanted = read(prefix)
    for suffix, digest in (wanted or {}).items():
        if found[suffix] != digest:
            raise DataError(
                f"{prefix}{suffix} is not what was written: SHA-256 {found[suffix]}, and {prefix}{SUFFIX} says {digest}. Restore it from"
                f" its source; if it was meant to change, delete {prefix}{SUFFIX}, and --write-digest creates one for the files as they are"
            )
    return wanted is not None


def sha256_of(path: str) -> str:
    """Return the SHA-256 (hex) of a whole file. Raises DataError: it cannot be read."""
    hasher = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return hasher.hexdigest()
