"""Access to many torch files, and tensors assembled from stretches of the tensors in them.

A tensor of a ZeRO checkpoint is split over the files of all data parallel ranks. ``Stored`` lists the stretches of the
files that it consists of; ``Stretches`` reads them block by block into the tensor, so that memory holds only the tensor
and one block.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import DTYPES, TensorRecord, TorchFile
from megatron_sp.convert.copies import TensorInfo
from megatron_sp.utils.errors import CheckpointError

_BLOCK = 4 << 20  # elements that are read at once where a tensor has several parts


class Files:
    """Torch files by path; a limited number is kept parsed (half the limit of open files, at least 16), others are parsed again."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, TorchFile] = OrderedDict()
        self._most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def tree(self, path: Path) -> Any:
        """Return the saved object. Raises CheckpointError."""
        return self._get(path).tree

    def devices(self, path: Path) -> frozenset[str]:
        """Return the numbered devices (such as cuda:1) on which its tensors were when saved. Raises CheckpointError."""
        return self._get(path).devices

    @contextmanager
    def glance(self, path: Path) -> Iterator[TorchFile]:
        """Open a file for a short look, without keeping it: there may be thousands. Raises CheckpointError."""
        if path in self._open:
            yield self._open[path]
            return
        yield TorchFile(path)

    def read(self, path: Path, record: TensorRecord) -> Tensor:
        """Read a tensor of the file. Raises CheckpointError."""
        return self._get(path).read(record)

    def _get(self, path: Path) -> TorchFile:
        if path not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)
            self._open[path] = TorchFile(path)
        self._open.move_to_end(path)
        return self._open[path]


@dataclass(frozen=True)
class Stretch:
    """``count`` elements of a tensor in a file, in row-major order, from ``first`` on."""

    path: Path
    record: TensorRecord
    first: int
    count: int


@dataclass(frozen=True)
class Stored:
    """A tensor that is the concatenation of stretches."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stretches: tuple[Stretch, ...]

    @classmethod
    def whole(cls, path: Path, record: TensorRecord, shape: tuple[int, ...] | None = None) -> Stored:
        """Describe a tensor of a file, optionally with another shape. Raises CheckpointError: the number of elements differs."""
        numel, stored = (torch.Size(s).numel() for s in (record.shape if shape is None else shape, record.shape))
        if numel != stored:
            raise CheckpointError(
                f"{path} has {stored:,} elements where {list(shape or ())} are {numel:,}: it is of another model, or damaged"
            )
        return cls(tuple(record.shape if shape is None else shape), dtype_of(path, record), (Stretch(path, record, 0, numel),))

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype."""
        return TensorInfo(self.shape, self.dtype)


class Stretches:
    """Tensors by name, assembled from their stretches (a ``TensorStore``)."""

    def __init__(self, files: Files, stored: Mapping[str, Stored]) -> None:
        self._files, self.stored = files, stored

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self.stored.items()}

    def read(self, name: str) -> Tensor:
        stored = self.stored[name]
        if len(stored.stretches) == 1 and stored.stretches[0].count == torch.Size(stored.stretches[0].record.shape).numel():
            stretch = stored.stretches[0]
            return self._files.read(stretch.path, stretch.record).contiguous().view(stored.shape)
        made = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        for at, block in self.blocks(name):
            made[at : at + block.numel()] = block
        return made.view(stored.shape)

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements in order, as (position, [n]) with bounded n."""
        at = 0
        for stretch in self.stored[name].stretches:
            for first in range(0, stretch.count, _BLOCK):
                count = min(_BLOCK, stretch.count - first)
                yield at, self.piece(Stretch(stretch.path, stretch.record, stretch.first + first, count))
                at += count

    def piece(self, stretch: Stretch) -> Tensor:
        """Read a stretch of a tensor in a file, [count]. Raises CheckpointError."""
        path, record, first, count = stretch.path, stretch.record, stretch.first, stretch.count
        if not is_contiguous(record):
            return self._files.read(path, record).reshape(-1)[first : first + count]
        return self._files.read(path, replace(record, offset=record.offset + first, shape=(count,), stride=(1,)))


def is_contiguous(record: TensorRecord) -> bool:
    """Return whether the elements are stored in row-major order without gaps."""
    wanted = 1
    for size, stride in zip(reversed(record.shape), reversed(record.stride), strict=True):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def dtype_of(path: Path, record: TensorRecord) -> torch.dtype:
    """Return the dtype of a tensor. Raises CheckpointError: it is not supported."""
    if record.dtype not in DTYPES.values():
        raise CheckpointError(f"{path} has a tensor of {record.dtype}, which cannot be read: save it as one of {', '.join(DTYPES)}")
    return record.dtype
