"""Streaming writer of ``torch.save`` files and of pickles that torch, Megatron-LM and DeepSpeed load.

Lazy tensors are in memory one at a time, so a file may be larger than memory. Source: the comments of CPython's
``pickletools``; torch/_utils.py :: _rebuild_tensor_v2.
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import Object, memory_of
from megatron_sp.utils.files import fsync_dir

ALIGNMENT = 64  # of the contents of every entry, as torch has it, so that they can be memory-mapped
_STORAGES = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage", torch.complex128: "ComplexDoubleStorage",
}  # fmt: skip
Shape = tuple[int, ...]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made just before it is written, on any device and with any strides."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def parts(self) -> Iterator[Tensor]:
        """Make the tensor and yield its elements in row-major order on the CPU."""
        tensor = self.make()
        if tuple(tensor.shape) != tuple(self.shape) or tensor.dtype != self.dtype:
            raise ValueError(f"announced {list(self.shape)} {self.dtype}, made {list(tensor.shape)} {tensor.dtype}")
        yield tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class LazyFlat:
    """A long vector whose parts are made one after the other."""

    numel: int
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]


class TreeWriter:
    """Writer of one pickle; collects the storages that it refers to, in the order of their keys "0", "1", ..."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._keys: dict[Any, str] = {}
        self.storages: list[LazyFlat] = []

    def dumps(self, tree: Any) -> bytes:
        """Return the pickle of plain data, namespaces, tensors, lazy ones, dtypes and ``Object``.

        Two references to one list become two lists; tensors that share a storage still share it.
        """
        self._parts = [b"\x80\x02"]
        self._value(tree)
        return b"".join([*self._parts, b"."])

    def _value(self, value: Any) -> None:
        # Protocol 2, with the opcodes that torch's restricted loader knows. A class is written as text: the program
        # that has it need not be installed.
        out = self._parts.append
        if value is None or isinstance(value, bool):
            out({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
            out(b"J" + struct.pack("<i", value))
        elif isinstance(value, int):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise ValueError(f"an integer of {len(data):,} bytes cannot be written into a torch file")
            out(b"\x8a" + bytes([len(data)]) + data)
        elif isinstance(value, float):
            out(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            data = value.encode("utf-8")
            out(b"X" + struct.pack("<I", len(data)) + data)
        elif isinstance(value, bytes):
            self._call("_codecs.encode", value.decode("latin-1"), "latin1")
        elif isinstance(value, torch.Size):
            self._call("torch.Size", tuple(value))
        elif isinstance(value, tuple):
            self._items(value)
            out(b"t")
        elif isinstance(value, list):
            out(b"]")
            self._items(value)
            out(b"e")
        elif isinstance(value, dict):
            if isinstance(value, OrderedDict):
                self._call("collections.OrderedDict")
            else:
                out(b"}")
            self._items(part for pair in value.items() for part in pair)
            out(b"u")
        elif isinstance(value, Namespace):
            self._value(Object("argparse.Namespace", state=vars(value)))
        elif isinstance(value, Object):
            if value.args:
                self._call(value.name, *value.args)
            else:
                self._global(value.name)
                out(b")\x81")
            if value.state is not None:
                self._value(value.state)
                out(b"b")
        elif isinstance(value, torch.dtype):
            self._global(str(value))
        elif isinstance(value, (Tensor, LazyTensor, LazyFlat)):
            self._tensor(value)
        else:
            raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written into a torch"
                            " file")  # fmt: skip

    def _items(self, items: Iterable[Any]) -> None:
        self._parts.append(b"(")
        for item in items:
            self._value(item)

    def _global(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        self._parts.append(f"c{module}\n{last}\n".encode())

    def _call(self, name: str, *args: Any) -> None:
        self._global(name)
        self._value(args)
        self._parts.append(b"R")

    def _tensor(self, value: Tensor | LazyTensor | LazyFlat) -> None:
        # the call that makes a tensor; ``identity`` is equal for tensors that share a storage
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            numel = value.untyped_storage().nbytes() // value.element_size()
            flat = value.as_strided((numel,), (1,), 0)
            identity = (value.untyped_storage().data_ptr(), value.dtype) if numel else object()
            storage = LazyFlat(numel, value.dtype, lambda: [flat])
            offset, shape, stride = int(value.storage_offset()), tuple(value.shape), value.stride()
        else:
            shape = tuple(value.shape) if isinstance(value, LazyTensor) else (value.numel,)
            identity, storage = object(), LazyFlat(torch.Size(shape).numel(), value.dtype, value.parts)
            offset, stride = 0, torch.empty(shape, device="meta").stride()
        if identity not in self._keys:
            self._keys[identity] = str(len(self.storages))
            self.storages.append(storage)
        # newer dtypes have no class of storages: their bytes have, the tensor its dtype
        numel, dtype, typed = storage.numel, storage.dtype, _STORAGES.get(storage.dtype)
        self._global(f"torch._utils._rebuild_tensor_v{2 if typed else 3}")
        self._parts.append(b"((")
        self._value("storage")
        self._global(f"torch.{typed or 'storage.UntypedStorage'}")
        for part in (self._keys[identity], "cpu", numel if typed else numel * dtype.itemsize):
            self._value(part)
        self._parts.append(b"tQ")
        for part in (offset, shape, stride, False, OrderedDict(), *(() if typed else (dtype,))):
            self._value(part)
        self._parts.append(b"tR")


def write_torch_file(path: str | Path, tree: Any) -> int:
    """Write a file of torch.save that is complete and on the disk, or is not there; return its size."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            size = append_torch_file(file, tree)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)
    return size


def append_torch_file(file: IO[bytes], tree: Any) -> int:
    """Write a file of torch.save at the end of an open file; return its length."""
    writer = TreeWriter()
    pickled = writer.dumps(tree)
    tail = _Tail(file)
    with zipfile.ZipFile(tail, "w") as archive:  # type: ignore[call-overload]

        def add(name: str, size: int, parts: Iterable[bytes | memoryview]) -> None:
            info = zipfile.ZipInfo(f"archive/{name}")  # its date is constant: equal contents give equal files
            info.file_size = size
            wide = 20 if size * 1.05 > zipfile.ZIP64_LIMIT else 0  # which zipfile adds to the header then
            length = -(tail.tell() + 30 + len(info.filename) + 4 + wide) % ALIGNMENT
            info.extra = b"FB" + struct.pack("<H", length) + b"Z" * length
            with archive.open(info, "w") as entry:
                for part in parts:
                    entry.write(part)
            if info.file_size != size:
                raise ValueError(f"{name}: announced {size:,} bytes, made {info.file_size:,}")

        def memories(storage: LazyFlat) -> Iterator[memoryview]:
            for part in storage.parts():
                if part.dtype != storage.dtype:
                    raise ValueError(f"announced {storage.dtype}, made {part.dtype}")
                yield memory_of(part.detach().cpu().contiguous())

        add("data.pkl", len(pickled), [pickled])
        add("byteorder", 6, [b"little"])
        for key, storage in enumerate(writer.storages):
            add(f"data/{key}", storage.numel * storage.dtype.itemsize, memories(storage))
        add("version", 2, [b"3\n"])
    return tail.tell()


class _Tail:
    """The end of an open file as a file of its own: a zip file's positions count from its own start."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._start = file, file.tell()
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(position + (self._start if whence == os.SEEK_SET else 0), whence) - self._start
