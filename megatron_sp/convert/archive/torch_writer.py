"""Streaming writer of ``torch.save`` files: lazy tensors of the tree are in memory one at a time.

Plain data, tensors and ordered dicts load with ``weights_only=True``; for a Namespace its class must be allowlisted, as
Megatron does.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_sp.convert.archive.pickle_writer import LazyFlat, TreeWriter
from megatron_sp.convert.archive.torch_file import memory_of
from megatron_sp.convert.archive.zip_entries import ZipWriter
from megatron_sp.utils.files import fsync_dir


def write_torch_file(path: str | Path, tree: Any) -> int:
    """Write a file of torch.save atomically: afterwards it is complete and synced to disk, or it does not exist.

    Args:
        tree: as in ``pickle_writer.TreeWriter.dumps``; a ``LazyTensor`` is made when its turn comes.
    Returns:
        Size of the file in bytes.
    Raises:
        FileExistsError: the file exists already.
        OSError: e.g. no space; nothing is left behind.
        TypeError, ValueError: the tree contains something that cannot be written, or a LazyTensor makes another tensor
            than announced.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            size = stream_torch_file(lambda data: write_all(file, data), tree)
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)
    return size


def stream_torch_file(write: Callable[[memoryview | bytes], object], tree: Any) -> int:
    """Stream a file of torch.save to a sink that accepts all bytes it is given; return the number of bytes."""
    writer = TreeWriter()
    pickled = writer.dumps(tree)
    archive = ZipWriter(write)
    archive.add("archive/data.pkl", pickled)
    archive.add("archive/byteorder", b"little")
    for key, numbers in enumerate(writer.storages):
        if isinstance(numbers, LazyFlat):
            archive.add_parts(f"archive/data/{key}", numbers.numel * numbers.dtype.itemsize, partial(_memories, numbers))
        else:
            archive.add(f"archive/data/{key}", memory_of(numbers()))
    archive.add("archive/version", b"3\n")
    archive.finish()
    return archive.position


def _memories(flat: LazyFlat) -> Iterator[memoryview]:
    for part in flat.parts():
        if part.dtype != flat.dtype:
            raise ValueError(f"announced {flat.dtype}, made {part.dtype}")
        yield memory_of(part.detach().cpu().contiguous())


def write_all(file: Any, data: memoryview | bytes) -> None:
    """Write all of ``data`` to an unbuffered file, whose ``write`` may accept only a part."""
    done = 0
    while done < len(data):
        done += file.write(data[done:])
