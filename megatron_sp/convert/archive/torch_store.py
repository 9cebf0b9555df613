"""Named tensors in files of ``torch.save``, as transformers wrote them before safetensors. No code in the files is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from megatron_sp.convert.archive.torch_files import DTYPES, TensorRecord, TorchFile
from megatron_sp.convert.copies import TensorInfo
from megatron_sp.utils.errors import CheckpointError


class TorchFiles:
    """The tensors of several files (a ``TensorStore``).

    Args:
        folder: the folder of the files.
        names: plain file names.
    Raises:
        CheckpointError: a file is damaged, contains anything but named tensors, or a tensor is in two files.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._found: dict[str, tuple[TorchFile, TensorRecord]] = {}
        for name in names:
            self._take(TorchFile(folder / name))
        self._tensors = {name: _info(file.path, name, record) for name, (file, record) in self._found.items()}

    def _take(self, file: TorchFile) -> None:
        if not isinstance(file.tree, dict):
            raise CheckpointError(f"{file.path} holds a {type(file.tree).__name__}, not names and their tensors: save its state_dict()")
        for name, record in file.tree.items():
            if not isinstance(name, str) or not isinstance(record, TensorRecord):
                raise CheckpointError(f"{file.path}: {str(name)[:100]!r} is not a tensor with a name: save the model's state_dict() alone")
            if name in self._found:
                raise CheckpointError(
                    f"{file.path.parent}: {name[:200]} is in {self._found[name][0].path.name} and again in {file.path.name}"
                )
            self._found[name] = (file, record)

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains a tensor."""
        return self._found[name][0].path.name

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        file, record = self._found[name]
        return file.read(record).contiguous()


def _info(path: Path, name: str, record: TensorRecord) -> TensorInfo:
    if record.dtype not in DTYPES.values():
        raise CheckpointError(
            f"{path}: {name[:200]} is of {record.dtype}, which cannot be converted: save it as one of {', '.join(DTYPES)}"
        )
    return TensorInfo(record.shape, record.dtype)
