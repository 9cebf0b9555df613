"""Files of ``torch.save``, read by torch's restricted loader, with inert records for the classes of other programs.

``TorchFile(path).tree`` is the saved object, with a ``TensorRecord`` in place of every tensor; ``read(record)`` reads
the bytes of that tensor, and only those. torch loads the tree onto the meta device (``weights_only=True``), so no
tensor takes memory before it is read. Names of Megatron, DeepSpeed and the like, which are not installed here, become
subclasses of ``Object`` that store what they are built from; every other name is refused by torch.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle  # for _Records alone, which finds nothing but inert records  # ours, from the repository
import re
import resource
import struct
import threading
import zipfile
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, serialization

from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

MAX_PICKLE_BYTES = 1 << 23  # 40,000 tensors take 5.7 MB
MEMORY_OF_PICKLE = 32  # bytes of memory for each byte of a pickle, about
MAX_VALUES = 1 << 22  # of a small pickle, with shared ones counted at every place
MAX_DEPTH = 100  # levels of nesting; checkpoints have some ten
_HEADROOM = 1 << 30
_MAX_REPEATED = 1 << 20  # elements by which a tensor may exceed its storage, through strides of 0
_BLOCK_BYTES = 8 << 20

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip

# What the files of these programs name beside what torch itself allows. A name is never looked up or imported.
_FAMILIES = (
    "megatron.", "deepspeed.", "apex.", "transformer_engine.", "fp16.loss_scaler.", "pathlib.", "datetime.", "numpy.",
    "torch.distributed.checkpoint.", "torch.distributed._shard.",
)  # fmt: skip
_SINGLE = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "uuid.UUID",
    "io.BytesIO",
    "_io.BytesIO",
    "signal.Signals",
    "torch.torch_version.TorchVersion",
    "torch.distributed.remote_device",
    "torch.serialization._get_layout",
} | {f"builtins.{name}" for name in ("int", "float", "bool", "str", "list", "dict", "tuple", "slice", "range", "object")}
_GLOBAL = re.compile(rb"(?=c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n)")  # (?=...): a match must not hide one that begins inside it
_DEVICE = re.compile(rb"X(?s:(.{4}))([a-z]{1,20}:[0-9]{1,4})")
_RENAMED = {"__builtin__": "builtins"}  # by Python 3
_LOCAL = struct.Struct("<IHHHHHIIIHH")  # header of a zip file before each entry's name

_WAY_OUT = (
    "Nothing in it was run. What is read are checkpoints of tensors, numbers, strings, lists, dicts and the settings of Megatron and "
    "DeepSpeed (the names are in megatron_sp/convert/archive/torch_files.py): where the file was made, save it again with these only"
)


class Object:
    """Stand-in for an object of another program: its class and the data it was built from.

    ``state`` usually holds its attributes by name.
    """

    __slots__ = ("args", "name", "state")  # without a __dict__ a file cannot replace a method

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by name; empty if the object has none."""
        return self.state if isinstance(self.state, dict) else {}


def _record_class(name: str) -> type[Object]:
    """Return a class whose construction with any arguments, by calling it or its ``__new__``, is an ``Object`` of this name."""

    def new(cls: type[Object], *args: Any) -> Object:
        made = object.__new__(cls)
        Object.__init__(made, name, args)
        return made

    return type(name, (Object,), {"__slots__": (), "__new__": new, "__init__": lambda self, *args: None})


def _no_bytes() -> bytes:
    return b""  # protocol 2 writes bytes() for empty ones, and _codecs.encode(...) for others


def _default_dict(_factory: Any = None, items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(items)  # the factory is for missing keys, which are never looked up here


def _member(cls: Any, name: str) -> Object:
    if not (isinstance(cls, type) and issubclass(cls, Object)):
        raise ValueError("gets an attribute of something that is not an enumeration")
    return cls.__new__(cls, name)  # type: ignore[call-arg, no-any-return]


def _number(dtype: Any, data: Any) -> Any:
    code = dtype.args[0] if isinstance(dtype, Object) and dtype.args else ""
    if not re.fullmatch("[biuf][1248]", str(code)):
        raise ValueError("has a number of numpy that is not a plain one")
    kind = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
            "f2": "e", "f4": "f", "f8": "d"}[code]  # fmt: skip
    return struct.unpack(f"<{kind}", data)[0]


_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.frozenset": frozenset, "builtins.bytes": _no_bytes, "collections.defaultdict": _default_dict, "builtins.getattr": _member,
    "numpy.core.multiarray.scalar": _number, "numpy._core.multiarray.scalar": _number,
}  # fmt: skip


class _Records(pickle.Unpickler):  # ours, from the repository
    """Reader of a pickle that is not in a torch file: it finds plain types and records, whatever a name is."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        plain = {"torch.Size": tuple, "collections.OrderedDict": dict, "builtins.set": set, "builtins.frozenset": frozenset}.get(full)
        if plain is not None:
            return plain
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full in _SINGLE or full.startswith(_FAMILIES):
            return _record_class(full)
        raise _Refused(f"names {full[:200]!r}, which is not part of the checkpoints that are read here")


class _Refused(Exception):
    """Refusal of a pickle; its text is a clause for a message that begins with the file's name."""


# The limit and torch's list of names are those of the process: two threads must not restore each other's.
_ONE_READER = threading.RLock()


@contextlib.contextmanager
def _guarded(where: str, num_bytes: int) -> Iterator[None]:
    """Read a foreign pickle: bounded memory, and one clear error for whatever torch and Python say to a damaged one.

    Raises:
        CheckpointError: anything was raised inside.
    """
    with _ONE_READER, _clear_errors(where), _limited_memory(_HEADROOM + 2 * MEMORY_OF_PICKLE * num_bytes):
        yield


@contextlib.contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    """Let the process take this much more writable memory.

    RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what is merely reserved: a library that is loaded,
    or the 64 MiB of malloc's arena for every thread that starts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):  # no /proc, or no such limit on this system
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[5]) * resource.getpagesize()
        limit = used + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def _clear_errors(where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except _Refused as error:
        raise CheckpointError(f"{where}: its pickle {error}. {_WAY_OUT}") from None
    except (MemoryError, RecursionError):
        raise CheckpointError(f"{where}: its pickle needs more memory than a checkpoint's of its size does. {_WAY_OUT}") from None
    except Exception as error:  # torch and pickle raise a dozen types for what is damaged
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            problem = f"names {named[1][:200]!r}, which is not part of the checkpoints that are read here"
        else:
            said = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
            said = said.splitlines()[0][:200]
            problem = f"cannot be read ({said}): it is cut short or damaged"
        raise CheckpointError(f"{where}: its pickle {problem}. {_WAY_OUT}") from None


@contextlib.contextmanager
def _only(known: list[Any]) -> Iterator[None]:
    """Allow torch's loader these names alone: Megatron, if it is imported, has allowed real classes for the whole process."""
    before = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        serialization.add_safe_globals(known)
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRecord:
    """A tensor of a file, not read yet: the location of its elements in a storage; ``offset`` and ``stride`` in elements."""

    file: TorchFile
    storage: int  # position of its first byte in the file; of a file from before torch 1.6 its address
    num_bytes: int  # of the storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """Read the tensor into CPU memory, as ``TorchFile.read``."""
        return self.file.read(self)


class _Plain:
    """Converter of loaded values to plain ones, with records of their tensors.

    Args:
        num_bytes: length of the pickle, which bounds the number of values.
        record: makes the record of a tensor; None: there can be none.
    """

    def __init__(self, num_bytes: int, record: Callable[[Tensor], TensorRecord] | None = None) -> None:
        self._most, self._record = MAX_VALUES + 4 * num_bytes, record
        self._known: dict[int, tuple[Any, int, int] | None] = {}  # by identity: value, size, height; None: being converted

    def __call__(self, value: Any, depth: int = 0) -> tuple[Any, int, int]:
        """Return the value, the number of its parts and its height. Raises _Refused: it is nested too deeply, or too large."""
        if not isinstance(value, (dict, list, tuple, set, frozenset, Object, Tensor, bytearray)):
            return value, 1 + (len(value) >> 5 if isinstance(value, (str, bytes)) else 0), 0
        if id(value) in self._known:
            found = self._known[id(value)]
            if found is None:
                raise _Refused("contains itself")
        else:
            if depth > MAX_DEPTH:
                raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
            self._known[id(value)] = None
            self._known[id(value)] = found = self._converted(value, depth)
        if depth + found[2] > MAX_DEPTH + 1:
            raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
        return found

    def _converted(self, value: Any, depth: int) -> tuple[Any, int, int]:
        if isinstance(value, Tensor):
            if self._record is None:
                raise _Refused("has a tensor in it")
            return self._record(value), 4, 1
        if isinstance(value, bytearray):
            return bytes(value), 1 + (len(value) >> 5), 0
        parts: list[Any] = []
        if isinstance(value, dict):
            parts = [part for pair in value.items() for part in pair]
        elif isinstance(value, Object):
            parts = [value.args, value.state]
        else:
            parts = list(value)
        size, height = 3, 0
        for place, part in enumerate(parts):
            parts[place], cost, high = self(part, depth + 1)
            size, height = size + cost, max(height, high)
            if size > self._most:
                raise _Refused(
                    f"comes to more than {self._most:,} values: it has very many, or is a small file for very much data, whose shared"
                    " parts are nested in shared parts"
                )
        if isinstance(value, Object):
            value.args, value.state = parts
            return value, size, height + 1
        if isinstance(value, dict):
            return dict(zip(parts[::2], parts[1::2], strict=True)), size, height + 1
        kind: Any = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(parts), size, height + 1


def read_records(data: bytes, where: str) -> Any:
    """Return the value of a pickle of any protocol, with records instead of objects.

    Args:
        where: name of the data, for error messages.
    Raises:
        CheckpointError: it is damaged, too large, or contains something that checkpoints do not have.
    """
    with _guarded(where, len(data)):
        value = _Records(file := io.BytesIO(data)).load()
        if file.tell() != len(data):
            raise CheckpointError(f"{where} has {len(data) - file.tell():,} bytes after the end of its pickle: it is damaged")
        return _Plain(len(data))(value)[0]


class _Window(io.RawIOBase):
    """A byte range of an open file, as a file: the whole file, or one embedded in it.

    Args:
        where: the file and the place in it, for error messages.
    """

    def __init__(self, fd: int, start: int, size: int, where: str) -> None:
        self.fd, self.start, self.size, self.where, self.at = fd, start, size, where, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the file open for the readers after this one; its owner closes it."""

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, target: Any) -> int:
        count = min(len(target), max(0, self.size - self.at))
        count = os.preadv(self.fd, [memoryview(target)[:count]], self.start + self.at) if count else 0
        self.at += count
        return count

    def fill(self, target: memoryview, at: int) -> int:
        """Fill ``target`` with the bytes at ``at`` and return their CRC-32."""
        if at < 0 or at + len(target) > self.size:
            raise CheckpointError(
                f"{self.where} has {self.size:,} bytes, but should have {len(target):,} at byte {at:,}: it is cut short or damaged"
            )
        crc = done = 0
        while done < len(target):
            block = target[done : done + _BLOCK_BYTES]
            count = os.preadv(self.fd, [block], self.start + at + done)
            if not count:
                raise CheckpointError(f"{self.where} ended while it was read: is another process changing it?")
            crc = zlib.crc32(block[:count], crc)
            done += count
        return crc


class _Entry(NamedTuple):
    """An entry of a zip file."""

    header: int  # position of the header before its contents
    size: int
    crc: int
    name: str


class TorchFile:
    """A file of ``torch.save``, which is open only while it is read: there may be more of them than a process may have open.

    Args:
        path: a regular file; symbolic links are not followed.
        part: (first byte, length) of a torch file that is embedded in this one.
    Raises:
        CheckpointError: it is missing, cut short, damaged, of another format, or holds more than data.
    """

    def __init__(self, path: str | Path, part: tuple[int, int] | None = None) -> None:
        self.path, self._part = Path(path), part
        self._entries: list[_Entry] = []  # of a zip file, in the order of their places
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address, of a file from before torch 1.6
        self._identity: tuple[int, ...] | None = None
        with self._opened() as window:
            self.where = window.where
            first = bytes(os.pread(window.fd, min(4, window.size), window.start))
            if first[:2] == b"PK":
                data, device = self._read_directory(window), "meta"
            elif first[:1] == b"\x80":  # from before torch 1.6: pickles, then the storages, which torch loads all together
                data, device = bytes(os.pread(window.fd, min(window.size, MAX_PICKLE_BYTES), window.start)), "cpu"
            else:
                raise CheckpointError(f"{window.where} is not a file of torch.save: {_what_it_is(window, first)}")
            loaded = self._loaded(window, data, device)
            places = _DEVICE.findall(data) if self._entries else ()
            #: devices with a number, such as cuda:1, on which its tensors were
            self.devices = frozenset(name.decode() for count, name in places if int.from_bytes(count, "little") == len(name))
            with _guarded(window.where, len(data)):
                self.tree: Any = _Plain(len(data), self._record)(loaded)[0]  #: what was saved: plain data, Object and TensorRecord

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Window]:
        """Open the file for the time of a ``with`` block. Raises CheckpointError: it has changed in the meantime."""
        fd = open_regular(self.path)
        try:
            status = os.fstat(fd)
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._identity not in (None, identity):
                raise CheckpointError(f"{self.path} is not the file that it was a moment ago: is another process changing it?")
            self._identity = identity
            start, length = self._part or (0, status.st_size)
            if start < 0 or length < 0 or start + length > status.st_size:
                raise CheckpointError(
                    f"{self.path} has {status.st_size:,} bytes, but should have {length:,} at byte {start:,}: it is cut short"
                )
            yield _Window(fd, start, length, f"{self.path} (the part at byte {start:,})" if self._part else str(self.path))
        finally:
            os.close(fd)

    def _read_directory(self, window: _Window) -> bytes:
        """Fill ``_entries`` and return the pickle. Raises CheckpointError: an entry is not as torch writes it."""
        try:
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                infos = archive.infolist()
                names = {info.filename: info for info in infos}
                roots = {name.split("/", 1)[0] for name in names}
                if len(roots) != 1 or (pickled := names.get(f"{next(iter(roots))}/data.pkl")) is None:
                    raise CheckpointError(f"{window.where} is a zip file, but not one of torch.save: it has no folder with a data.pkl")
                if len(names) != len(infos):
                    raise CheckpointError(f"{window.where} has two entries of one name: refused")
                self._entries = sorted(_Entry(info.header_offset, info.file_size, info.CRC, info.filename) for info in infos)
                for info in infos:
                    if info.compress_type or info.compress_size != info.file_size or info.flag_bits & 1:
                        raise CheckpointError(
                            f"{window.where}: {info.filename} is compressed or encrypted, which torch never does: refused. Unpack and save"
                            " it with torch"
                        )
                for one, after in zip(self._entries, [entry.header for entry in self._entries[1:]] + [archive.start_dir], strict=True):
                    if one.header + _LOCAL.size + len(one.name.encode()) + one.size > after:
                        raise CheckpointError(
                            f"{window.where} is not a complete torch file: {one.name[:200]!r} of {one.size:,} bytes at byte {one.header:,}"
                            " overlaps what comes after it. It is cut short or damaged: copy it again"
                        )
                root = pickled.filename.removesuffix("data.pkl")
                if f"{root}constants.pkl" in names:
                    raise CheckpointError(f"{window.where} is a TorchScript program: save its state dict with torch.save and read that")
                order = self._contents(window, names[f"{root}byteorder"]) if f"{root}byteorder" in names else b"little"
                if order != b"little":
                    raise CheckpointError(
                        f"{window.where} has the byte order {order.decode('ascii', 'replace')!r}; only little is read: save it on such a"
                        " machine"
                    )
                return self._contents(window, pickled)
        except CheckpointError:
            raise
        except Exception as error:  # zipfile raises a dozen types for what is damaged
            raise CheckpointError(
                f"{window.where} is not a complete torch file: {str(error)[:200]}. It is cut short or damaged: copy it again"
            ) from None

    def _contents(self, window: _Window, info: zipfile.ZipInfo) -> bytes:
        """Read a small entry."""
        if info.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{window.where} has a pickle of {info.file_size:,} bytes: more than the {MAX_PICKLE_BYTES:,} that are read"
            )
        entry = _Entry(info.header_offset, info.file_size, info.CRC, info.filename)
        data = bytearray(entry.size)
        self._check_sum(entry, window.fill(memoryview(data), self._start(window, entry)))
        return bytes(data)

    def _start(self, window: _Window, entry: _Entry) -> int:
        header = bytearray(_LOCAL.size)
        window.fill(memoryview(header), entry.header)
        fields = _LOCAL.unpack(header)
        return int(entry.header + _LOCAL.size + fields[9] + fields[10])

    def _check_sum(self, entry: _Entry, crc: int) -> None:
        if entry.crc not in (0, crc):  # 0: written after set_crc32_options(False)
            raise CheckpointError(
                f"{self.where}: {entry.name} is damaged: its checksum is {crc:08x}, the file says {entry.crc:08x}. Copy it again"
            )

    def _loaded(self, window: _Window, data: bytes, device: str) -> Any:
        """Load the file by torch's restricted loader, with stand-ins for the known names in its pickle."""
        if data[:1] == b"\x80" and data[1] > 2:
            raise CheckpointError(
                f"{window.where} has a pickle of protocol {data[1]}, and torch's restricted loader reads 2 alone, which torch.save writes:"
                " save it again without pickle_protocol"
            )
        names = {f"{_RENAMED.get(m.decode(), m.decode())}.{n.decode()}" for m, n in _GLOBAL.findall(data)}
        known = [
            (_MAKERS.get(name) or _record_class(name), name)
            for name in sorted(names)
            if name in _SINGLE or name in _MAKERS or name.startswith(_FAMILIES)
        ]
        room = len(data) if device == "meta" else len(data) + window.size // MEMORY_OF_PICKLE
        window.seek(0)
        file = io.BufferedReader(window)
        with _guarded(window.where, room), _only(known):  # in this order: the first one takes the lock
            loaded = serialization.load(file, map_location=device, weights_only=True)
        if device != "meta" and file.tell() != window.size:
            raise CheckpointError(
                f"{window.where} has {window.size:,} bytes, its storages end at byte {file.tell():,}: it is cut short or damaged"
            )
        return loaded

    def _record(self, tensor: Tensor) -> TensorRecord:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise _Refused("has a tensor that is sparse, quantized, or a view with its conjugate")
        storage = tensor.untyped_storage()
        if self._entries:  # where a tensor reaches beyond its storage, torch has enlarged it, and ``read`` sees that the file has less
            place = getattr(storage, "_checkpoint_offset", -1)
        else:
            place = storage.data_ptr()
            self._storages[place] = storage
        return TensorRecord(self, place, storage.nbytes(), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def read(self, record: TensorRecord) -> Tensor:
        """Read a tensor into CPU memory, with the elements and strides that were saved.

        Raises:
            CheckpointError: it reaches outside its storage, or the storage has another size or is damaged.
        """
        where = f"{self.where}: a tensor {list(record.shape)[:8]}"
        require_dtype(record.dtype, where)
        numel, first, total = record.numel, record.offset, record.num_bytes // record.dtype.itemsize
        # length of the range that contains all elements
        span = 1 + sum((size - 1) * step for size, step in zip(record.shape, record.stride, strict=True))
        if not numel:
            return torch.empty_strided(record.shape, record.stride, dtype=record.dtype)
        if numel > total + _MAX_REPEATED:
            raise CheckpointError(f"{where} repeats the {total:,} elements of its storage: save it with .contiguous()")
        if first + span > total:
            raise CheckpointError(f"{where} reaches to element {first + span:,} of a storage of {total:,}: it is damaged")
        with self._opened() as window:
            if not self._entries:
                return torch.empty(0, dtype=record.dtype).set_(self._storages[record.storage], record.offset, record.shape, record.stride)  # type: ignore[call-overload, no-any-return]
            entry = self._entry(window, record)
            flat = torch.empty(span, dtype=record.dtype)
            crc = window.fill(memory_of(flat), record.storage + first * record.dtype.itemsize)
            if span * record.dtype.itemsize == entry.size:
                self._check_sum(entry, crc)
        return flat.as_strided(record.shape, record.stride)

    def _entry(self, window: _Window, record: TensorRecord) -> _Entry:
        """Return the entry that is the storage of a tensor, after checking its size and that it begins where torch says."""
        found = bisect_right(self._entries, record.storage, key=lambda entry: entry.header) - 1
        entry = self._entries[max(0, found)]
        if self._start(window, entry) != record.storage or entry.size != record.num_bytes:
            raise CheckpointError(
                f"{self.where}: {entry.name[:200]!r} has {entry.size:,} bytes, and a storage of {record.num_bytes:,} should be at byte"
                f" {record.storage:,}: it is damaged"
            )
        return entry


def require_dtype(dtype: torch.dtype, where: str) -> torch.dtype:
    """Return the dtype of a tensor. Raises CheckpointError: it is not one that is converted."""
    if dtype not in DTYPES.values():
        raise CheckpointError(f"{where} is of {dtype}, which cannot be converted: save it as one of {', '.join(DTYPES)}")
    return dtype


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _what_it_is(window: _Window, first: bytes) -> str:
    if not first:
        return "it is empty"
    head = os.pread(window.fd, min(512, window.size), window.start)
    if head[8:9] == b"{":
        return "it is a safetensors file, which is read as such and not from here"
    if head[257:262] == b"ustar":
        return "it is a tar file as torch 0.1 wrote them; load and save it with any torch since"
    return "it is something else, or damaged"
