"""Loading of a rank's pieces from the rectangles in the files, whatever layout wrote them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest
from megatron_sp.checkpoint.pieces import DTYPES, GlobalTensor, Rect, tiling_problem
from megatron_sp.checkpoint.safetensors_file import StoredPiece, read_header, read_into, read_rows
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

_BLOCK_BYTES = 64 << 20  # read at a time if the contents cannot be read straight into place

Index = dict[str, list[StoredPiece]]  # by tensor name


class _Copy(NamedTuple):
    # one overlap of a stored rectangle and a wanted piece

    stored: StoredPiece
    source: tuple[slice, ...]  # region of the stored rectangle
    target: Tensor  # the part of the wanted piece that it fills


def read_headers(step_dir: Path, names: Iterable[str]) -> list[list[Any]]:
    """Return the rectangles in these files as JSON values. Raises CheckpointError."""
    pieces = (piece for name in names for piece in read_header(step_dir / name))
    return [[p.name, p.dtype, list(p.rect.offsets), list(p.rect.sizes), p.file, p.begin] for p in pieces]


def make_index(step_dir: Path, manifest: Manifest, rows: Iterable[list[Any]]) -> Index:
    """Group the rectangles by tensor. Raises CheckpointError if the manifest lists them otherwise."""
    index: Index = defaultdict(list)
    for name, dtype, offsets, sizes, file, begin in rows:
        known = manifest.tensors.get(name)
        if known is None or known[0] != dtype:
            lists = f"as {known[0]}" if known else "not at all"
            raise CheckpointError(f"{step_dir / file} holds {name} as {dtype}, the manifest lists it {lists}")
        index[name].append(StoredPiece(name, dtype, Rect(tuple(offsets), tuple(sizes)), file, begin))
    return index


def check_tiling(step_dir: Path, manifest: Manifest, index: Index, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the stored rectangles cover each of these tensors exactly once."""
    for name in names:
        shape = manifest.tensors[name][1]
        if problem := tiling_problem(shape, [piece.rect for piece in index.get(name, [])]):
            raise CheckpointError(f"{step_dir}: {name} {list(shape)} is not stored completely and once: {problem}")


def data_files(manifest: Manifest) -> list[str]:
    """Return the names of the files with tensors, largest first."""
    return sorted((n for n in manifest.files if n != STATE_NAME), key=lambda n: (-manifest.files[n].num_bytes, n))


def fill(step_dir: Path, index: Index, wanted: dict[str, GlobalTensor]) -> None:
    """Copy the stored contents into this rank's pieces, converting dtypes. Raises CheckpointError."""
    by_file: dict[str, list[_Copy]] = defaultdict(list)
    for name, tensor in wanted.items():
        for copy in _overlaps(index.get(name, []), tensor):
            by_file[copy.stored.file].append(copy)
    for file_name, copies in by_file.items():  # each file is opened once and read from front to back
        with open(open_regular(step_dir / file_name), "rb", buffering=0) as file, torch.no_grad():
            try:
                for copy in sorted(copies, key=lambda c: c.stored.begin):
                    _copy(file, copy)
            except OSError as error:
                raise CheckpointError(f"{step_dir / file_name} cannot be read: {error.strerror}") from None


def _overlaps(stored: list[StoredPiece], tensor: GlobalTensor) -> Iterable[_Copy]:
    # all stored rectangles at once, as arrays: thousands of ranks may have written one tensor
    dims = len(tensor.shape)
    starts = np.array([p.rect.offsets for p in stored], dtype=np.int64).reshape(len(stored), dims)
    ends = starts + np.array([p.rect.sizes for p in stored], dtype=np.int64).reshape(len(stored), dims)
    for piece in tensor.pieces:
        begin = np.array(piece.offsets, dtype=np.int64)
        low = np.maximum(starts, begin)
        high = np.minimum(ends, begin + np.array(piece.tensor.shape, dtype=np.int64))
        for k in np.flatnonzero((low < high).all(axis=1)):
            source = tuple(slice(int(a), int(b)) for a, b in zip(low[k] - starts[k], high[k] - starts[k], strict=True))
            target = tuple(slice(int(a), int(b)) for a, b in zip(low[k] - begin, high[k] - begin, strict=True))
            yield _Copy(stored[k], source, piece.tensor.detach()[target])


def _copy(file: Any, copy: _Copy) -> None:
    sizes, target, dtype = copy.stored.rect.sizes, copy.target, DTYPES[copy.stored.dtype]
    is_whole = all(s.stop - s.start == n for s, n in zip(copy.source, sizes, strict=True))
    if is_whole and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        read_into(file, target, copy.stored.begin)  # straight into place
        return
    if not sizes:
        target.copy_(read_rows(file, copy.stored, 0, 1))
        return
    # whole rows in one contiguous read, of which the wanted columns are taken; some rows at a time
    rows, columns = copy.source[0], (slice(None), *copy.source[1:])
    row_bytes = max(1, copy.stored.rect.numel // sizes[0] * dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        block = read_rows(file, copy.stored, first, count)
        target[first - rows.start : first - rows.start + count].copy_(block[columns])
