"""``PREFIX.sha256`` beside ``PREFIX.bin`` and ``PREFIX.idx``: what every byte of a data set has to be.

It is the text that ``sha256sum`` writes and ``sha256sum -c`` reads: a line for each file, 64 hexadecimal digits, two spaces, the
file's name. The writer of a data set makes it while it writes (``writer``); ``megatron-sp data verify`` compares, and can make one for
data that have none. A pair that was renamed together with it is still known: files are told apart by their endings.
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
    """The file's contents.

    Args:
        prefix: of the data set.
        digests: ending (".bin", ".idx") -> SHA-256 in hexadecimal digits.
    """
    return "".join(f"{digest}  {os.path.basename(prefix)}{suffix}\n" for suffix, digest in digests.items())


def write(prefix: str, digests: Mapping[str, str]) -> None:
    """Raises DiskError."""
    try:
        atomic_write_text(prefix + SUFFIX, text_of(prefix, digests))
    except OSError as error:
        raise DiskError(f"{prefix}{SUFFIX} cannot be written: {error.strerror}") from None


def read(prefix: str) -> dict[str, str] | None:
    """What it says, by ending; None: there is no such file.

    Raises:
        DataError: it cannot be read, or does not name both files of the pair once.
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
    found = {match[3]: match[1] for match in lines if match is not None}
    if len(lines) != 2 or set(found) != {".bin", ".idx"}:
        raise DataError(
            f"{path} is not as sha256sum writes it: it must have one line for the .bin and one for the .idx, digits, two spaces, name."
            " Delete it, and --write-digest makes one of the files as they are"
        )
    return found


def compare(prefix: str, found: Mapping[str, str]) -> bool:
    """Whether there is a digest file; if so, the files are what it says.

    Args:
        found: the digests of the files as they are now, by ending.
    Raises:
        DataError: they are not, or the file cannot be read.
    """
    wanted = read(prefix)
    for suffix, digest in (wanted or {}).items():
        if found[suffix] != digest:
            raise DataError(
                f"{prefix}{suffix} is not what was written: SHA-256 {found[suffix]}, and {prefix}{SUFFIX} says {digest}. Restore it from"
                f" its source; if it was meant to change, delete {prefix}{SUFFIX}, and --write-digest makes one of the files as they are"
            )
    return wanted is not None


def sha256_of(path: str) -> str:
    """Of a whole file. Raises DataError: it cannot be read."""
    hasher = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return hasher.hexdigest()
