"""Folders of ``torch.distributed.checkpoint``, the format of Megatron's torch_dist, read and written.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megatron_sp.checkpoint.pieces import Rect, tiling_problem
from megatron_sp.convert.archive.torch_files import MEMORY_OF_PICKLE, Object, TensorRecord, TorchFile, attributes_of

from megatron_sp.convert.archive.torch_files import read_records, require_dtype  # isort: skip
from megatron_sp.convert.archive.torch_writer import LazyTensor, TreeWriter, append_torch_file
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import fsync_dir, write_synced
from megatron_sp.utils.strict_json import is_count, read_small_file

# .metadata is a pickle that lists the tensors and where the rectangles ("chunks") of each are stored: each chunk is a
# torch file embedded in a .distcp file, given by its byte range. The rank of a chunk determines no more than the file
# it is written to. Classes of torch are referred to by name; these names are stable, for torch must load older folders.
METADATA = "torch.distributed.checkpoint.metadata."
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
MAX_METADATA_BYTES = 3 << 20  # some 16,000 chunks


class ByteRange(NamedTuple):
    """A byte range of a file of the folder."""

    file: str
    offset: int
    length: int


Places = dict[tuple[str, Any], ByteRange]  # by name and offsets; None for objects that are not tensors


class StoredChunk(NamedTuple):
    """A rectangle of a tensor."""

    rect: Rect
    place: ByteRange


class StoredTensor(NamedTuple):
    """A tensor of the folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]  # cover it exactly once


class DistFolder:
    """A folder: ``tensors`` and ``objects`` describe its contents by name."""

    def __init__(self, path: str | Path, max_metadata_bytes: int = MAX_METADATA_BYTES) -> None:
        self.path, metadata = Path(path), Path(path) / ".metadata"
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, ByteRange] = {}
        if not metadata.exists() and any(self.path.glob("__*.metadata")):
            raise CheckpointError(f"{self.path} was saved by each rank for itself (use_collectives=False): save it with"
                                  " collectives")  # fmt: skip
        if metadata.exists() and (size := metadata.stat().st_size) > max_metadata_bytes:
            raise CheckpointError(f"{metadata} has {size:,} bytes, more than the {max_metadata_bytes:,} that are"
                                  f" read, for that takes up to {MEMORY_OF_PICKLE * size / 2**30:,.1f} GiB of memory:"
                                  f" if there is as much, give --max-metadata-mb {-(-size // 2**20)}")  # fmt: skip
        tree = read_records(read_small_file(metadata, max_metadata_bytes), str(metadata))
        if not (isinstance(tree, Object) and tree.name == f"{METADATA}Metadata" and tree.attributes):
            raise self._damaged("it is not a description of a checkpoint")
        described, stored = (tree.attributes.get(name) for name in ("state_dict_metadata", "storage_data"))
        if not (isinstance(described, dict) and isinstance(stored, dict)):
            raise self._damaged("it does not tell what is stored where")
        places = self._places(stored)
        for name, entry in described.items():
            if not isinstance(name, str) or not isinstance(entry, Object):
                raise self._damaged(f"{str(name)[:200]!r} is described by something unknown")
            if entry.name == f"{METADATA}BytesStorageMetadata":
                self.objects[name] = self._place(places, name, None)
            elif entry.name == f"{METADATA}TensorStorageMetadata":
                self.tensors[name] = self._tensor(name, entry.attributes, places)
            else:
                raise self._damaged(f"{name[:200]!r} is a {entry.name}, which is not known here")

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a tensor, or only ``tensor[row]``; needs the memory of the result and of one chunk."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        tensor = self.tensors[name]
        dtype = require_dtype(tensor.dtype, f"{self.path}: {name[:200]}")
        stored, needed = sum(chunk.place.length for chunk in tensor.chunks), math.prod(tensor.shape) * dtype.itemsize
        if stored < needed and len(tensor.chunks) > 1:
            raise CheckpointError(f"{self.path}: {name} {list(tensor.shape)} needs {needed:,} bytes, its chunks have"
                                  f" {stored:,}: it is damaged")  # fmt: skip
        shape, result = tensor.shape if row is None else tensor.shape[1:], None
        for (offsets, sizes), place in tensor.chunks:
            if row is not None and not offsets[0] <= row < offsets[0] + sizes[0]:
                continue
            record = self._open(place).tree
            has = (record.shape, record.dtype) if isinstance(record, TensorRecord) else type(record).__name__
            if has != (sizes, tensor.dtype):
                raise CheckpointError(f"{self.path / place.file}: the chunk of {name} at {list(offsets)} should be"
                                      f" {list(sizes)} {tensor.dtype}, and is {has}: the folder is damaged, or of two"
                                      " saves")  # fmt: skip
            if row is not None:
                record, offsets, sizes = record.row(row - offsets[0]), offsets[1:], sizes[1:]
            part: Tensor = record.read()
            if sizes == shape:
                return part
            if result is None:  # only after one chunk has been found: a damaged folder may claim any size
                result = torch.empty(shape, dtype=dtype)
            result[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = part
        return torch.empty(shape, dtype=dtype) if result is None else result

    def read_object(self, name: str) -> Any:
        """Return a saved object that is not a tensor, as ``TorchFile.tree``."""
        if name not in self.objects:
            raise CheckpointError(f"{self.path} has no object {name!r}")
        return self._open(self.objects[name]).tree

    def _open(self, place: ByteRange) -> TorchFile:
        return TorchFile(self.path / place.file, (place.offset, place.length))

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path / '.metadata'} cannot be used: {problem}")

    def _places(self, stored: Mapping[Any, Any]) -> Places:
        places: Places = {}
        for index, info in stored.items():
            if not (isinstance(index, Object) and isinstance(info, Object) and info.name == STORAGE_INFO):
                raise self._damaged(f"it stores by {getattr(info, 'name', type(info).__name__)}, which is not known"
                                    " here")  # fmt: skip
            key, where = index.attributes, info.attributes
            file, transforms = where.get("relative_path"), where.get("transform_descriptors")
            if transforms:
                raise self._damaged(f"its files went through {', '.join(map(str, transforms))[:200]}: save it without"
                                    " extensions")  # fmt: skip
            plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
            if not plain or not is_count(where.get("offset")) or not is_count(where.get("length")):
                raise self._damaged(f"{str(file)[:200]!r} is not a file of this folder with a place in it")
            places[str(key.get("fqn")), key.get("offset")] = ByteRange(str(file), where["offset"], where["length"])
        return places

    def _place(self, places: Places, name: str, offsets: Any) -> ByteRange:
        if (name, offsets) not in places:
            raise self._damaged(f"it does not say where {name[:200]!r}{f' at {list(offsets)}' if offsets else ''} is"
                                " stored")  # fmt: skip
        return places[name, offsets]

    def _tensor(self, name: str, described: Mapping[str, Any], places: Places) -> StoredTensor:
        shape, chunks, properties = (described.get(key) for key in ("size", "chunks", "properties"))
        dtype = None
        if isinstance(properties, Object):
            state = properties.state
            dtype = state[0] if isinstance(state, tuple) and state else properties.attributes.get("dtype")
        if not (_are_counts(shape) and isinstance(chunks, list) and isinstance(dtype, torch.dtype)):
            raise self._damaged(f"{name[:200]!r} is a tensor without shape, dtype or chunks")
        stored = []
        for chunk in chunks:
            attributes = attributes_of(chunk)
            offsets, sizes = attributes.get("offsets"), attributes.get("sizes")
            if not (_are_counts(offsets) and _are_counts(sizes)):
                raise self._damaged(f"{name[:200]!r} has a chunk without offsets and sizes")
            if math.prod(sizes):  # an empty chunk has nothing to read, and may start where another one starts
                stored.append(StoredChunk(Rect(offsets, sizes), self._place(places, name, offsets)))
        if problem := tiling_problem(shape, [chunk.rect for chunk in stored]):
            raise self._damaged(f"{name[:200]!r} {list(shape)} is not covered by its chunks: {problem}")
        return StoredTensor(shape, dtype, tuple(stored))


def _are_counts(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(map(is_count, value))


class NewChunk(NamedTuple):
    """A rectangle of a tensor to be written; ``make`` returns it when its turn comes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Tensor]
    rank: int = 0  # rank whose file it is written to


class DistFolderWriter(contextlib.ExitStack):
    """Writer of a folder, which is no checkpoint before ``finish``; a ``with`` statement closes its files."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        if (self.path / ".metadata").exists():
            raise FileExistsError(f"{self.path} has a checkpoint in it already")
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Any] = {}
        self._described: dict[str, Object] = {}
        self._stored: dict[Object, Object] = {}

    def add_tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[NewChunk]) -> None:
        """Write a tensor. Raises ValueError if the chunks do not cover it exactly once, or are not as announced."""
        rects = [Rect(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        problem = tiling_problem(tuple(shape), rects)
        if problem is None and (not rects or (0 not in shape and not all(rect.numel for rect in rects))):
            problem = "it has no chunk, or an empty one"
        if problem is not None:
            raise ValueError(f"{name} {list(shape)}: {problem}")
        for number, (rect, chunk) in enumerate(zip(rects, chunks, strict=True)):
            index = _record("MetadataIndex", fqn=name, index=number, offset=torch.Size(rect.offsets))
            self._stored[index] = self._append(name, chunk.rank, LazyTensor(rect.sizes, dtype, chunk.make))
        layout = Object("torch.serialization._get_layout", ("torch.strided",))
        memory_format = Object(f"{METADATA}_MEM_FORMAT_ENCODING", (0,))
        # neither requires_grad nor pinned
        properties = Object(f"{METADATA}TensorProperties", state=(dtype, layout, False, memory_format, False))
        sizes = [{"offsets": torch.Size(rect.offsets), "sizes": torch.Size(rect.sizes)} for rect in rects]
        described = [_record("ChunkStorageMetadata", **size) for size in sizes]
        of_tensor = {"properties": properties, "size": torch.Size(shape), "chunks": described}
        self._described[name] = _record("TensorStorageMetadata", **of_tensor)

    def add_object(self, name: str, tree: Any, rank: int = 0) -> None:
        """Write an object that is not a tensor; ``tree`` as accepted by ``TreeWriter``."""
        self._stored[_record("MetadataIndex", fqn=name, index=None, offset=None)] = self._append(name, rank, tree)
        self._described[name] = Object(f"{METADATA}BytesStorageMetadata", state={})

    def finish(self) -> None:
        """Sync the files to disk, then write ``.metadata``."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        storage_meta = _record("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
        metadata = {
            "state_dict_metadata": self._described, "planner_data": {name: (name,) for name in self._described},
            "storage_data": self._stored, "storage_meta": storage_meta, "version": "1.0.0",
        }  # fmt: skip
        temporary = self.path / ".metadata.tmp"
        temporary.unlink(missing_ok=True)
        write_synced(temporary, TreeWriter().dumps(_record("Metadata", **metadata)))
        os.rename(temporary, self.path / ".metadata")
        fsync_dir(self.path)

    def _append(self, name: str, rank: int, tree: Any) -> Object:
        if name in self._described:
            raise ValueError(f"{name} is written twice")
        if rank not in self._files:
            path = self.path / f"__{rank}_0.distcp"
            self._files[rank] = self.enter_context(open(path, "xb"))  # noqa: SIM115 - the stack closes it
        file = self._files[rank]
        offset = file.tell()
        length = append_torch_file(file, tree)
        return Object(STORAGE_INFO, state={"relative_path": f"__{rank}_0.distcp", "offset": offset, "length": length})


def _record(name: str, **attributes: Any) -> Object:
    return Object(f"{METADATA}{name}", state=attributes)
