"""Writer of folders that ``torch.distributed.checkpoint`` loads, chunk by chunk from one process.

The rank of a chunk only determines the file it is written to, so the folder of a job with many ranks can be made on a
laptop. ``.metadata`` is written last. It refers to torch's classes by name; these names are stable, because torch must
load older folders. The classes themselves are not needed here, so torch.distributed is not imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.checkpoint.pieces import Rect, tiling_problem
from megatron_sp.convert.archive.dist_file import METADATA, STORAGE_INFO
from megatron_sp.convert.archive.pickle_tree import Object
from megatron_sp.convert.archive.pickle_writer import LazyTensor, TreeWriter
from megatron_sp.convert.archive.torch_writer import stream_torch_file, write_all
from megatron_sp.utils.files import fsync_dir, write_synced


class NewChunk(NamedTuple):
    """A rectangle of a tensor to be written; ``make`` returns it when its turn comes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Tensor]
    rank: int = 0  # rank whose file it is written to


class DistFolderWriter:
    """Writer of a folder: add tensors and objects in any order, then ``finish``. Use it in a ``with`` statement, which closes it.

    Without ``finish`` there is no ``.metadata``, so the folder is not recognized as a checkpoint.

    Args:
        path: a folder without ``.metadata``; created if it does not exist.
    Raises:
        FileExistsError: it already contains a checkpoint, or a file that would be overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (self.path / ".metadata").exists():
            raise FileExistsError(f"{self.path} has a checkpoint in it already")
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Any] = {}
        self._described: dict[str, Object] = {}
        self._stored: dict[Object, Object] = {}

    def __enter__(self) -> DistFolderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, whatever state they are in."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files = {}

    def add_tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[NewChunk]) -> None:
        """Write the chunks of a tensor, one after the other.

        Raises:
            ValueError: the chunks do not cover the tensor exactly once, the name is taken, or a chunk is not as
                announced.
            OSError: e.g. no space.
        """
        self._check_new(name)
        rects = [Rect(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        problem = tiling_problem(tuple(shape), rects)
        if problem is None and (not rects or (0 not in shape and not all(rect.numel for rect in rects))):
            problem = "it has no chunk, or an empty one"
        if problem is not None:
            raise ValueError(f"{name} {list(shape)}: {problem}")
        for number, (rect, chunk) in enumerate(zip(rects, chunks, strict=True)):
            index = _record("MetadataIndex", fqn=name, index=number, offset=torch.Size(rect.offsets))
            self._stored[index] = self._append(chunk.rank, LazyTensor(rect.sizes, dtype, chunk.make))
        self._described[name] = _record(
            "TensorStorageMetadata",
            properties=_properties(dtype),
            size=torch.Size(shape),
            chunks=[_record("ChunkStorageMetadata", offsets=torch.Size(rect.offsets), sizes=torch.Size(rect.sizes)) for rect in rects],
        )

    def add_object(self, name: str, tree: Any, rank: int = 0) -> None:
        """Write an object that is not a tensor; ``tree`` as accepted by ``pickle_writer.TreeWriter``."""
        self._check_new(name)
        self._stored[_record("MetadataIndex", fqn=name, index=None, offset=None)] = self._append(rank, tree)
        self._described[name] = Object(f"{METADATA}BytesStorageMetadata", state={})

    def finish(self, paths: Mapping[str, Sequence[str | int]] | None = None, extra: Mapping[str, Any] | None = None) -> None:
        """Sync the files to disk, then write ``.metadata``.

        Args:
            paths: path of each name in the nested state; the name itself by default.
            extra: further attributes of the metadata, such as Megatron's ``mcore_data``.
        """
        for file in self._files.values():
            os.fsync(file.fileno())
        self.close()
        planner_data = {name: tuple((paths or {}).get(name, (name,))) for name in self._described}
        metadata = _record(
            "Metadata",
            state_dict_metadata=self._described,
            planner_data=planner_data,
            storage_data=self._stored,
            storage_meta=_record("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
            version="1.0.0",
            **(extra or {}),
        )
        temporary = self.path / ".metadata.tmp"
        temporary.unlink(missing_ok=True)
        write_synced(temporary, TreeWriter().dumps(metadata))
        os.rename(temporary, self.path / ".metadata")
        fsync_dir(self.path)

    def _check_new(self, name: str) -> None:
        if name in self._described:
            raise ValueError(f"{name} is written twice")

    def _append(self, rank: int, tree: Any) -> Object:
        """Append a torch file to the rank's file and return the record of its byte range."""
        if rank not in self._files:
            self._files[rank] = open(self.path / f"__{rank}_0.distcp", "xb", buffering=0)  # noqa: SIM115 - closed in close()
        file = self._files[rank]
        offset = file.tell()
        length = stream_torch_file(lambda data: write_all(file, data), tree)
        return Object(STORAGE_INFO, state={"relative_path": f"__{rank}_0.distcp", "offset": offset, "length": length})


def _record(name: str, **attributes: Any) -> Object:
    return Object(f"{METADATA}{name}", state=attributes)


def _properties(dtype: torch.dtype) -> Object:
    """Return torch's TensorProperties: dtype, layout, requires_grad, memory format, pinned."""
    layout = Object("torch.serialization._get_layout", ("torch.strided",))
    memory_format = Object(f"{METADATA}_MEM_FORMAT_ENCODING", (0,))
    return Object(f"{METADATA}TensorProperties", state=(dtype, layout, False, memory_format, False))
