"""What can be said of a checkpoint's files without torch: sizes, hashes, and how many bytes an element of each kind has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_sp.utils.strict_json import open_regular

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""By safetensors' names of dtypes."""


class FileRecord(NamedTuple):
    """What the manifest says about a file."""

    num_bytes: int
    sha256: str


def cores_of_rank() -> int:
    """The cores this process may use, shared with the other ranks of its host; 0 where there are more ranks than cores."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return len(os.sched_getaffinity(0)) // ranks_here


def io_threads() -> int:
    """Files to read or write at once: one on each core of this rank, at most four."""
    return max(1, min(4, cores_of_rank()))


def hash_file(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """SHA-256 of a file's contents, as hexadecimal digits; ``progress`` is told the bytes as they are read."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            progress(count)
    return digest.hexdigest()
