"""Sizes and hashes of a checkpoint's files, and bytes per element of each dtype, without importing torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_sp.utils.launch import processes_of_host
from megatron_sp.utils.strict_json import open_regular

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""By safetensors' names of dtypes."""


class FileRecord(NamedTuple):
    """A file's entry in the manifest."""

    num_bytes: int
    sha256: str


def cores_of_rank() -> int:
    """Return this rank's share of the cores it may use, split among the host's ranks; 0 if there are more ranks than cores."""
    return len(os.sched_getaffinity(0)) // processes_of_host()


def io_threads() -> int:
    """Return the number of files to read or write at once: one per core of this rank, at least one and at most four."""
    return max(1, min(4, cores_of_rank()))


def hash_file(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal; ``progress`` is called with the number of bytes of each block read."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            progress(count)
    return digest.hexdigest()
