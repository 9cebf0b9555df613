"""Digest file ``PREFIX.sha256`` beside ``PREFIX.bin`` and ``PREFIX.idx``, in the format of ``sha256sum``."""

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
# a pair that was renamed together with its digests is still recognised: files are identified by their suffix
_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.+(\.bin|\.idx))")
_ANEW = "and --write-digest creates one for the files as they are"


def text_of(prefix: str, digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {os.path.basename(prefix)}{suffix}\n" for suffix, digest in digests.items())


def write(prefix: str, digests: Mapping[str, str]) -> None:
    """Write the digest file. Raises DiskError."""
    try:
        atomic_write_text(prefix + SUFFIX, text_of(prefix, digests))
    except OSError as error:
        raise DiskError(f"{prefix}{SUFFIX} cannot be written: {error.strerror}") from None


def read(prefix: str) -> dict[str, str] | None:
    """Read the digests by suffix; None if there is no digest file. Raises DataError: it is not one."""
    path = prefix + SUFFIX
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a FIFO of this name must not block
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = [_LINE.fullmatch(line) for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    digests = {match[3]: match[1] for match in lines if match is not None}
    if len(lines) != 2 or set(digests) != {".bin", ".idx"}:
        form = "one line for the .bin and one for the .idx, digits, two spaces, name"
        raise DataError(f"{path} is not in sha256sum's format: it must have {form}. Delete it, {_ANEW}")
    return digests


def compare(prefix: str, actual: Mapping[str, str]) -> bool:
    """Compare actual digests with the digest file; False if there is none. Raises DataError: they differ."""
    wanted = read(prefix)
    for suffix, digest in (wanted or {}).items():
        if actual[suffix] != digest:
            says = (
                f"SHA-256 {actual[suffix]}, and {prefix}{SUFFIX} says {digest}. Restore it from its source; if it was"
            )
            way = f"meant to change, delete {prefix}{SUFFIX}, {_ANEW}"
            raise DataError(f"{prefix}{suffix} is not what was written: {says} {way}")
    return wanted is not None


def sha256_of(path: str) -> str:
    """Return the SHA-256 (hex) of a file."""
    hasher = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return hasher.hexdigest()
