"""Tensors in the files of a Hugging Face folder: safetensors files, read and written one tensor at a time, and torch
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_sp.checkpoint.pieces import Piece
from megatron_sp.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    NamedPiece,
    StoredPiece,
    read_header,
    read_rows,
    write_plain_file,
)
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile, require_dtype
from megatron_sp.convert.copies import TensorInfo, TensorStore
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular


class SafetensorsFiles:
    """The tensors of several files (a ``TensorStore``)."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self._pieces: dict[str, StoredPiece] = {}
        for name in names:
            for piece in read_header(folder / name, whole=True):
                if piece.name in self._pieces:
                    raise CheckpointError(f"{folder}: {piece.name[:200]} is in {self._pieces[piece.name].file} and"
                                          f" again in {piece.file}")  # fmt: skip
                self._pieces[piece.name] = piece
        self._tensors = {
            name: TensorInfo(piece.rect.sizes, DTYPES[piece.dtype]) for name, piece in self._pieces.items()
        }

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains a tensor."""
        return self._pieces[name].file

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        piece = self._pieces[name]
        with open(open_regular(self.folder / piece.file), "rb", buffering=0) as file:
            return read_rows(file, piece, 0, piece.rect.sizes[0] if piece.rect.sizes else 1)


def divide(store: TensorStore, max_bytes: int) -> list[list[NamedPiece]]:
    """Assign the tensors to files in order: a new file begins where the next tensor would exceed ``max_bytes``."""
    files: list[list[NamedPiece]] = []
    room = 0
    for name, info in store.tensors().items():
        stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
        if not files or info.num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(NamedPiece(name, info.shape, Piece((0,) * len(info.shape), stand_in)))
        room -= info.num_bytes
    return files


def write_tensors(path: Path, items: Sequence[NamedPiece], store: TensorStore) -> None:
    """Write one file, each tensor read when its turn comes."""
    for item in items:
        if item.piece.tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{item.name} is {item.piece.tensor.dtype}, which safetensors files cannot hold: give"
                                  " --dtype")  # fmt: skip
    write_plain_file(path, items, lambda item: store.read(item.name))


class TorchFiles:
    """The tensors of several files (a ``TensorStore``)."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._found: dict[str, TensorRecord] = {}
        for name in names:
            self._take(TorchFile(folder / name))
        self._tensors = {
            name: TensorInfo(record.shape, require_dtype(record.dtype, f"{record.file.path}: {name[:200]}"))
            for name, record in self._found.items()
        }

    def _take(self, file: TorchFile) -> None:
        if not isinstance(file.tree, dict):
            raise CheckpointError(f"{file.path} holds a {type(file.tree).__name__}, not names and their tensors: save"
                                  " its state_dict()")  # fmt: skip
        for name, record in file.tree.items():
            if not isinstance(name, str) or not isinstance(record, TensorRecord):
                raise CheckpointError(f"{file.path}: {str(name)[:100]!r} is not a tensor with a name: save the model's"
                                      " state_dict() alone")  # fmt: skip
            if name in self._found:
                raise CheckpointError(f"{file.path.parent}: {name[:200]} is in {self._found[name].file.path.name} and"
                                      f" again in {file.path.name}")  # fmt: skip
            self._found[name] = record

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains a tensor."""
        return self._found[name].file.path.name

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        return self._found[name].read().contiguous()
