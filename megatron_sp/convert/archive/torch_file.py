"""Reader of ``torch.save`` files that runs no code from them and reads one tensor at a time.

``TorchFile(path).tree`` is the saved object, with a ``TensorRecord`` in place of every tensor; ``read(record)`` reads
the bytes of that tensor, and only those, into new memory. Both formats are read: zip files (torch 1.6 and later) and
the older stream of pickles. Every size is checked against the file's size before memory is allocated for it. Writing:
``torch_writer.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.convert.archive import zip_entries
from megatron_sp.convert.archive.pickle_tree import MAX_PICKLE_BYTES, PickleReader, Storage, TensorRecord
from megatron_sp.convert.archive.zip_entries import Entry, Window
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_MAX_REPEATED = 1 << 20  # elements by which a tensor may exceed its storage, through strides of 0
_MAGIC_LEGACY = 0x1950A86A20F9469CFC6C


class StoragePlace(NamedTuple):
    """Location of a storage in the file; in a zip file ``entry`` holds its checksum."""

    start: int
    num_bytes: int
    entry: Entry | None = None


class TorchFile:
    """A file of ``torch.save``; ``close`` it, or use it in a ``with`` statement.

    The file is open only while it is read: a universal folder of a large model consists of more files than a process
    may have open.

    Args:
        path: a regular file; symbolic links are not followed.
        reader: interprets the pickles; a new one is created by default. Share one when there are many small files.
        part: (first byte, length) of a torch file that is embedded in this one.
    Raises:
        CheckpointError: it is missing, cut short, damaged, of another format, or holds more than data.
    """

    def __init__(self, path: str | Path, reader: PickleReader | None = None, part: tuple[int, int] | None = None) -> None:
        self.path = Path(path)
        self._own_reader = None if reader else PickleReader()
        self._reader = reader or self._own_reader
        self._is_closed = False
        fd = open_regular(self.path)
        try:
            self._identity = _identity(fd)
            self._window = _window(fd, self.path, part)
            self._entries: Mapping[str, Entry] = {}
            self._storages: Mapping[str, StoragePlace] = {}
            self.devices: frozenset[str] = frozenset()  #: devices with a number, such as cuda:1, on which its tensors were
            self.tree: Any = self._read_tree()  #: what was saved: plain data, Object, Name and TensorRecord
        except BaseException:
            self.close()
            raise
        finally:
            os.close(fd)

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and end the reader process, if it is our own."""
        if self._own_reader is not None:
            self._own_reader.close()
        self._is_closed = True

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Reopen the file for the time of a ``with`` block.

        Raises:
            CheckpointError: the file has changed in the meantime.
        """
        if self._is_closed:
            raise RuntimeError(f"{self.path} was closed: read its tensors before")
        fd = open_regular(self.path)
        try:
            if _identity(fd) != self._identity:
                raise CheckpointError(f"{self.path} is not the file that it was a moment ago: is another process changing it?")
            self._window.fd = fd
            yield
        finally:
            self._window.fd = -1
            os.close(fd)

    def _read_tree(self) -> Any:
        assert self._reader is not None
        first = self._window.read(0, min(4, self._window.size))
        if first[:2] == b"PK":
            self._entries = _without_root(self._window, zip_entries.read_directory(self._window))
            data = zip_entries.read_entry(self._window, self._entries["data.pkl"], MAX_PICKLE_BYTES)
            pickles = self._reader.read_whole(data, self._window.where)
            self.devices = pickles.devices
            return pickles.values[0]
        if first[:1] == b"\x80":
            tree, self._storages = _read_legacy(self._window, self._reader)
            return tree
        raise CheckpointError(f"{self._window.where} is not a file of torch.save: {_what_it_is(self._window, first)}")

    def read(self, record: TensorRecord) -> Tensor:
        """Read a tensor into CPU memory, with the elements and strides that were saved.

        Raises:
            CheckpointError: it reaches outside its storage, or the storage is missing, has another size, or is damaged.
        """
        where = f"{self._window.where}: a tensor {list(record.shape)[:8]} of {record.dtype}"
        dtype = DTYPES.get(record.dtype)
        if dtype is None:
            raise CheckpointError(f"{where} cannot be read: no dtype that is known here ({', '.join(DTYPES)}). Save it as one of these")
        if math.prod(max(size, 1) for size in record.shape) >= 1 << 62:
            raise CheckpointError(f"{where} is larger than any memory: it is damaged")
        numel, first, span = _extent(record)
        with self._opened():
            return self._read(record, dtype, (numel, first, span), where)

    def _read(self, record: TensorRecord, dtype: torch.dtype, extent: tuple[int, int, int], where: str) -> Tensor:
        numel, first, span = extent
        place = self._place(record.storage, dtype)
        total = place.num_bytes // dtype.itemsize
        if first + span > total:
            raise CheckpointError(f"{where} reaches to element {first + span:,} of a storage of {total:,}: it is damaged")
        if numel > total + _MAX_REPEATED:
            raise CheckpointError(f"{where} repeats the {total:,} elements of its storage: save it with .contiguous()")
        flat = torch.empty(span, dtype=dtype)
        crc = self._window.read_into(memory_of(flat), place.start + first * dtype.itemsize)
        if place.entry is not None and span * dtype.itemsize == place.entry.size:
            zip_entries.check_crc(self._window, place.entry, crc)
        return flat.as_strided(record.shape, record.stride)

    def _place(self, storage: Storage, dtype: torch.dtype) -> StoragePlace:
        """Return the location of a storage's bytes; its size must be as stated in the pickle."""
        unit = 1 if storage.dtype == "untyped" else DTYPES[storage.dtype].itemsize
        entry = self._entries.get(f"data/{storage.key}")
        place = self._storages.get(storage.key)
        if entry is not None:
            place = StoragePlace(zip_entries.data_start(self._window, entry), entry.size, entry)
        if place is None:
            raise CheckpointError(f"{self._window.where} has no storage {storage.key!r}, which one of its tensors lies in: it is damaged")
        if place.num_bytes != storage.numel * unit or (unit != 1 and unit != dtype.itemsize):
            raise CheckpointError(
                f"{self._window.where}: the storage {storage.key!r} has {place.num_bytes:,} bytes; {storage.numel:,} elements of "
                f"{storage.dtype} are {storage.numel * unit:,}: it is damaged"
            )
        return place


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _identity(fd: int) -> tuple[int, int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _window(fd: int, path: Path, part: tuple[int, int] | None) -> Window:
    size = os.fstat(fd).st_size
    if part is None:
        return Window(fd, 0, size, str(path))
    start, length = part
    if start < 0 or length < 0 or start + length > size:
        raise CheckpointError(f"{path} has {size:,} bytes, but should have {length:,} at byte {start:,}: it is cut short")
    return Window(fd, start, length, f"{path} (the part at byte {start:,})")


def _without_root(window: Window, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Strip the common root folder from the entry names; refuse files that are not little-endian files of torch.save."""
    roots = {name.split("/", 1)[0] for name in entries}
    if len(roots) != 1 or f"{next(iter(roots))}/data.pkl" not in entries:
        raise CheckpointError(f"{window.where} is a zip file, but not one of torch.save: it has no folder with a data.pkl")
    result = {name.split("/", 1)[1]: entry for name, entry in entries.items() if "/" in name}
    if "constants.pkl" in result:
        raise CheckpointError(f"{window.where} is a TorchScript program: save its state dict with torch.save and read that")
    if "byteorder" in result and (order := zip_entries.read_entry(window, result["byteorder"], 100)) != b"little":
        raise CheckpointError(
            f"{window.where} has the byte order {order.decode('ascii', 'replace')!r}; only little is read: save it on such a machine"
        )
    return result


def _extent(record: TensorRecord) -> tuple[int, int, int]:
    """Return the number of elements, the position of the first in the storage, and the length of the range that contains them all."""
    numel, span = 1, 1
    for size, stride in zip(record.shape, record.stride, strict=True):
        numel *= size
        span += (size - 1) * stride
    return (numel, record.offset, span) if numel else (0, 0, 0)


def _what_it_is(window: Window, first: bytes) -> str:
    if not first:
        return "it is empty"
    if window.size > 8 and window.read(8, 1) == b"{":
        return "it is a safetensors file, which is read as such and not from here"
    if window.size >= 512 and window.read(257, 5) == b"ustar":
        return "it is a tar file as torch 0.1 wrote them; load and save it with any torch since"
    return "it is something else, or damaged"


def _read_legacy(window: Window, reader: PickleReader) -> tuple[Any, dict[str, StoragePlace]]:
    """Read the format before torch 1.6: five pickles (magic, version, system, object, keys), then each storage's length and bytes."""
    data_size = 1 << 16
    while True:  # the length of the pickles is not stored: read more until they end
        data = window.read(0, min(data_size, window.size, MAX_PICKLE_BYTES))
        try:
            magic, version, machine, tree, keys = (pickles := reader.read_several(data, 5, window.where)).values
            break
        except CheckpointError:
            if len(data) < data_size:
                raise
            data_size *= 8
    if magic != _MAGIC_LEGACY or version != 1001 or not isinstance(keys, list):
        raise CheckpointError(f"{window.where} is not a file of torch.save: it is a pickle of another program, or damaged")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{window.where} was written on a machine with another byte order: save it again on a little-endian one")
    places, at = dict[str, StoragePlace](), pickles.end
    for key in keys:
        storage = pickles.storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise CheckpointError(f"{window.where} lists a storage that no tensor lies in: it is damaged")
        unit = 1 if storage.dtype == "untyped" else DTYPES[storage.dtype].itemsize
        numel = int.from_bytes(window.read(at, 8), "little", signed=True)
        if numel != storage.numel:
            raise CheckpointError(f"{window.where}: the storage {key!r} has {numel:,} elements, not {storage.numel:,}: it is damaged")
        places[key] = StoragePlace(at + 8, numel * unit)
        at += 8 + numel * unit
    if at != window.size:
        raise CheckpointError(f"{window.where} has {window.size:,} bytes, its storages end at byte {at:,}: it is cut short or damaged")
    return tree, places
