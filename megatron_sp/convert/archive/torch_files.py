"""Files of ``torch.save``, read by torch's restricted loader, with inert records for the classes of other programs.

``TorchFile(path).tree`` is the saved object, with a ``TensorRecord`` in place of every tensor; ``read(record)`` reads
the bytes of that tensor, and only those.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, serialization

from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

MAX_PICKLE_BYTES = 1 << 23  # 40,000 tensors take 5.7 MB
_BLOCK_BYTES = 8 << 20
_LOCAL = struct.Struct("<IHHHHHIIIHH")  # header of a zip file before each entry's name


class Window(io.RawIOBase):
    """A byte range of an open file, as a file: the whole file, or one embedded in it."""

    def __init__(self, fd: int, start: int, size: int, where: str) -> None:
        self.fd, self.start, self.size, self.where, self.at = fd, start, size, where, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the file open for the readers after this one; its owner closes it."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, target: Any) -> int:
        count = min(len(target), max(0, self.size - self.at))
        count = os.preadv(self.fd, [memoryview(target)[:count]], self.start + self.at) if count else 0
        self.at += count
        return count

    def head(self, count: int) -> bytes:
        """Return the first bytes, at most ``count``."""
        return bytes(os.pread(self.fd, min(count, self.size), self.start))

    def fill(self, target: memoryview, at: int) -> int:
        """Fill ``target`` with the bytes at ``at`` and return their CRC-32."""
        if at < 0 or at + len(target) > self.size:
            raise CheckpointError(f"{self.where} has {self.size:,} bytes, but should have {len(target):,} at byte"
                                  f" {at:,}: it is cut short or damaged")  # fmt: skip
        crc = done = 0
        while done < len(target):
            block = target[done : done + _BLOCK_BYTES]
            count = os.preadv(self.fd, [block], self.start + at + done)
            if not count:
                raise CheckpointError(f"{self.where} ended while it was read: is another process changing it?")
            crc = zlib.crc32(block[:count], crc)
            done += count
        return crc


class Entry(NamedTuple):
    """An entry of an archive."""

    header: int  # position of the header before its contents
    size: int
    crc: int
    name: str

    def start(self, window: Window) -> int:
        """Return the position of its contents."""
        header = bytearray(_LOCAL.size)
        window.fill(memoryview(header), self.header)
        fields = _LOCAL.unpack(header)
        return int(self.header + _LOCAL.size + fields[9] + fields[10])

    def check_sum(self, crc: int, where: str) -> None:
        """Compare the CRC-32 of what was read with that of the directory."""
        if self.crc not in (0, crc):  # 0: written after set_crc32_options(False)
            raise CheckpointError(f"{where}: {self.name} is damaged: its checksum is {crc:08x}, the file says"
                                  f" {self.crc:08x}. Copy it again")  # fmt: skip

    def small(self, window: Window) -> bytes:
        """Read an entry that is not a storage."""
        if self.size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{window.where} has a pickle of {self.size:,} bytes: more than the"
                                  f" {MAX_PICKLE_BYTES:,} that are read")  # fmt: skip
        data = bytearray(self.size)
        self.check_sum(window.fill(memoryview(data), self.start(window)), window.where)
        return bytes(data)


def read_directory(window: Window) -> tuple[list[Entry], bytes]:
    """Return the entries in the order of their places, and the contents of data.pkl; all are as torch writes them."""
    where = window.where
    try:
        with zipfile.ZipFile(io.BufferedReader(window)) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except Exception as error:  # zipfile raises a dozen types for what is damaged
        raise CheckpointError(f"{where} is not a complete torch file: {str(error)[:200]}. It is cut short or damaged:"
                              " copy it again") from None  # fmt: skip
    entries = sorted(Entry(info.header_offset, info.file_size, info.CRC, info.filename) for info in infos)
    by_name = {entry.name: entry for entry in entries}
    roots = {name.split("/", 1)[0] for name in by_name}
    root = min(roots, default="")
    if len(roots) != 1 or f"{root}/data.pkl" not in by_name:
        raise CheckpointError(f"{where} is a zip file, but not one of torch.save: it has no folder with a data.pkl")
    if len(by_name) != len(entries):
        raise CheckpointError(f"{where} has two entries of one name: refused")
    for info in infos:
        if info.compress_type or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CheckpointError(f"{where}: {info.filename} is compressed or encrypted, which torch never does:"
                                  " refused. Unpack and save it with torch")  # fmt: skip
    for entry, after in zip(entries, [*(entry.header for entry in entries[1:]), end], strict=True):
        if entry.header + _LOCAL.size + len(entry.name.encode()) + entry.size > after:
            raise CheckpointError(f"{where} is not a complete torch file: {entry.name[:200]!r} of {entry.size:,} bytes"
                                  f" at byte {entry.header:,} overlaps what comes after it. It is cut short or damaged:"
                                  " copy it again")  # fmt: skip
    if f"{root}/constants.pkl" in by_name:
        raise CheckpointError(f"{where} is a TorchScript program: save its state dict with torch.save and read that")
    order = by_name[f"{root}/byteorder"].small(window) if f"{root}/byteorder" in by_name else b"little"
    if order != b"little":
        raise CheckpointError(f"{where} has the byte order {order.decode('ascii', 'replace')!r}; only little is read:"
                              " save it on such a machine")  # fmt: skip
    return entries, by_name[f"{root}/data.pkl"].small(window)


MEMORY_OF_PICKLE = 32  # bytes of memory for each byte of a pickle, about
MAX_VALUES = 1 << 22  # of a small pickle, with shared ones counted at every place
MAX_DEPTH = 100  # levels of nesting; checkpoints have some ten
_HEADROOM = 1 << 30
_MAX_REPEATED = 1 << 20  # elements by which a tensor may exceed its storage, through strides of 0

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip

# What the files of these programs name beside what torch itself allows. A name is never looked up or imported: it
# becomes a subclass of Object that stores what it is built from. Every other name is refused by torch.
_FAMILIES = (
    "megatron.", "deepspeed.", "apex.", "transformer_engine.", "fp16.loss_scaler.", "pathlib.", "datetime.", "numpy.",
    "torch.distributed.checkpoint.", "torch.distributed._shard.",
)  # fmt: skip
_SINGLE = {
    "argparse.Namespace", "types.SimpleNamespace", "uuid.UUID", "io.BytesIO", "_io.BytesIO", "signal.Signals",
    "torch.torch_version.TorchVersion", "torch.distributed.remote_device", "torch.serialization._get_layout",
    "builtins.int", "builtins.float", "builtins.bool", "builtins.str", "builtins.list", "builtins.dict",
    "builtins.tuple", "builtins.slice", "builtins.range", "builtins.object",
}  # fmt: skip
# The lookahead (?=...) matches no text, so a match does not hide one that begins inside it.
_GLOBAL = re.compile(rb"(?=c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n)")
_DEVICE = re.compile(rb"X(?s:(.{4}))([a-z]{1,20}:[0-9]{1,4})")
_RENAMED = {"__builtin__": "builtins"}  # by Python 3

_WAY_OUT = ("Nothing in it was run. What is read are checkpoints of tensors, numbers, strings, lists, dicts and the"
            " settings of Megatron and DeepSpeed (the names are in megatron_sp/convert/archive/torch_files.py): where"
            " the file was made, save it again with these only")  # fmt: skip


class Object:
    """Stand-in for an object of another program: the name of its class and what it was built from."""

    __slots__ = ("args", "name", "state")  # without a __dict__ a file cannot replace a method

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        return self.state if isinstance(self.state, dict) else {}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of another program; none of anything else."""
    return value.attributes if isinstance(value, Object) else {}


def _record_class(name: str) -> type[Object]:
    def new(cls: type[Object], *args: Any) -> Object:  # pickles call the class or its __new__
        record = object.__new__(cls)
        Object.__init__(record, name, args)
        return record

    return type(name, (Object,), {"__slots__": (), "__new__": new, "__init__": lambda self, *args: None})


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
    "builtins.frozenset": frozenset,
    "builtins.bytes": lambda: b"",  # protocol 2 writes bytes() for empty ones, and _codecs.encode(...) for others
    # the factory is for missing keys, which are never looked up here
    "collections.defaultdict": lambda factory=None, items=(): OrderedDict(items),
    "builtins.getattr": _member, "numpy.core.multiarray.scalar": _number, "numpy._core.multiarray.scalar": _number,
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    "torch.Size": tuple, "collections.OrderedDict": dict, "builtins.set": set, "builtins.frozenset": frozenset,
}  # fmt: skip


class _Records(pickle.Unpickler):  # ours, from the repository
    """Reader of a pickle that is not in a torch file: it finds plain types and records, whatever a name is."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full in _PLAIN:
            return _PLAIN[full]
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
    """Read a foreign pickle: bounded memory, and one clear error for whatever torch and Python say to a damaged one."""
    with _ONE_READER:
        # RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what is merely reserved: a library that is
        # loaded, or the 64 MiB of malloc's arena for every thread that starts
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(OSError, ValueError):  # no /proc, or no such limit on this system
            with open("/proc/self/statm", encoding="ascii") as file:
                used = int(file.read().split()[5]) * resource.getpagesize()
            limit = used + _HEADROOM + 2 * MEMORY_OF_PICKLE * num_bytes
            limit = limit if soft == resource.RLIM_INFINITY else min(soft, limit)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            try:
                yield
            finally:  # first of all: a message takes memory, too
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        except CheckpointError:
            raise
        except _Refused as error:
            raise CheckpointError(f"{where}: its pickle {error}. {_WAY_OUT}") from None
        except (MemoryError, RecursionError):
            raise CheckpointError(f"{where}: its pickle needs more memory than a checkpoint's of its size does."
                                  f" {_WAY_OUT}") from None  # fmt: skip
        except Exception as error:  # torch and pickle raise a dozen types for what is damaged
            if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
                problem = f"names {named[1][:200]!r}, which is not part of the checkpoints that are read here"
            else:
                text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
                text = text.splitlines()[0][:200]
                problem = f"cannot be read ({text}): it is cut short or damaged"
            raise CheckpointError(f"{where}: its pickle {problem}. {_WAY_OUT}") from None


@dataclass(frozen=True, slots=True, eq=False)
class TensorRecord:
    """A tensor of a file, not read yet: the place of its elements in a storage, with offset and strides in elements."""

    file: TorchFile
    storage: int  # position of its first byte in the file; of a file from before torch 1.6 its address
    num_bytes: int  # of the storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, first: int, shape: tuple[int, ...]) -> TensorRecord:
        """Return a tensor of this shape in row-major order, from the element ``first`` of this contiguous one on."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return replace(self, offset=self.offset + first, shape=shape, stride=stride)

    def row(self, number: int) -> TensorRecord:
        offset = self.offset + number * self.stride[0]
        return replace(self, offset=offset, shape=self.shape[1:], stride=self.stride[1:])

    def read(self) -> Tensor:
        """Read the tensor into CPU memory, as ``TorchFile.read``."""
        return self.file.read(self)


def _plain(loaded: Any, num_bytes: int, record: Callable[[Tensor], TensorRecord] | None = None) -> Any:
    # Plain values instead of loaded ones, with records of their tensors. Parts that are shared are converted once, and
    # counted at every place: a small file may be very much data.
    most = MAX_VALUES + 4 * num_bytes
    known: dict[int, tuple[Any, int, int] | None] = {}  # by identity; None: being converted

    def convert(value: Any, depth: int) -> tuple[Any, int, int]:  # the value, the number of its parts, its height
        if not isinstance(value, (dict, list, tuple, set, frozenset, Object, Tensor, bytearray)):
            return value, 1 + (len(value) >> 5 if isinstance(value, (str, bytes)) else 0), 0
        if id(value) in known:
            converted = known[id(value)]
            if converted is None:
                raise _Refused("contains itself")
        else:
            if depth > MAX_DEPTH:
                raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
            known[id(value)] = None
            known[id(value)] = converted = convert_parts(value, depth)
        if depth + converted[2] > MAX_DEPTH + 1:
            raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
        return converted

    def convert_parts(value: Any, depth: int) -> tuple[Any, int, int]:
        if isinstance(value, Tensor):
            if record is None:
                raise _Refused("has a tensor in it")
            return record(value), 4, 1
        if isinstance(value, bytearray):
            return bytes(value), 1 + (len(value) >> 5), 0
        parts: list[Any] = [value.args, value.state] if isinstance(value, Object) else list(value)
        if isinstance(value, dict):
            parts = [part for pair in value.items() for part in pair]
        size, height = 3, 0
        for place, part in enumerate(parts):
            parts[place], cost, high = convert(part, depth + 1)
            size, height = size + cost, max(height, high)
            if size > most:
                raise _Refused(f"comes to more than {most:,} values: it has very many, or is a small file for very much"
                               " data, whose shared parts are nested in shared parts")  # fmt: skip
        if isinstance(value, Object):
            value.args, value.state = parts
            return value, size, height + 1
        if isinstance(value, dict):
            return dict(zip(parts[::2], parts[1::2], strict=True)), size, height + 1
        kind: Any = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(parts), size, height + 1

    return convert(loaded, 0)[0]


def read_records(data: bytes, where: str) -> Any:
    """Return the value of a pickle of any protocol, with records instead of objects."""
    with _guarded(where, len(data)):
        value = _Records(file := io.BytesIO(data)).load()
        if file.tell() != len(data):
            raise CheckpointError(f"{where} has {len(data) - file.tell():,} bytes after the end of its pickle: it is"
                                  " damaged")  # fmt: skip
        return _plain(value, len(data))


class TorchFile:
    """A file of ``torch.save``, open only while it is read: there may be more of them than a process may have open.

    Args:
        path: a regular file; symbolic links are not followed.
        part: (first byte, length) of a torch file that is embedded in this one.
    """

    def __init__(self, path: str | Path, part: tuple[int, int] | None = None) -> None:
        self.path, self._part = Path(path), part
        self._entries: list[Entry] = []  # of a zip file, in the order of their places
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address, of a file from before torch 1.6
        self._identity: tuple[int, ...] | None = None
        with self._opened() as window:
            self.where = window.where
            first = window.head(4)
            if first[:2] == b"PK":
                self._entries, data = read_directory(window)
            elif first[:1] == b"\x80":  # before torch 1.6: pickles, then the storages, which torch loads all together
                data = window.head(MAX_PICKLE_BYTES)
            else:
                start, what = window.head(512), "it is something else, or damaged"
                if not start:
                    what = "it is empty"
                elif start[8:9] == b"{":
                    what = "it is a safetensors file, which is read as such and not from here"
                elif start[257:262] == b"ustar":
                    what = "it is a tar file as torch 0.1 wrote them; load and save it with any torch since"
                raise CheckpointError(f"{window.where} is not a file of torch.save: {what}")
            loaded = self._loaded(window, data)
            places = _DEVICE.findall(data) if self._entries else ()
            #: devices with a number, such as cuda:1, on which its tensors were
            names = (name.decode() for size, name in places if int.from_bytes(size, "little") == len(name))
            self.devices = frozenset(names)
            with _guarded(window.where, len(data)):
                #: what was saved: plain data, Object and TensorRecord
                self.tree: Any = _plain(loaded, len(data), self._record)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Window]:
        fd = open_regular(self.path)
        try:
            status = os.fstat(fd)
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._identity not in (None, identity):
                raise CheckpointError(f"{self.path} is not the file that it was a moment ago: is another process"
                                      " changing it?")  # fmt: skip
            self._identity = identity
            start, length = self._part or (0, status.st_size)
            if start < 0 or length < 0 or start + length > status.st_size:
                raise CheckpointError(f"{self.path} has {status.st_size:,} bytes, but should have {length:,} at byte"
                                      f" {start:,}: it is cut short")  # fmt: skip
            part = f" (the part at byte {start:,})" if self._part else ""
            yield Window(fd, start, length, f"{self.path}{part}")
        finally:
            os.close(fd)

    def _loaded(self, window: Window, data: bytes) -> Any:
        if data[:1] == b"\x80" and data[1:2] > b"\x02":
            raise CheckpointError(f"{window.where} has a pickle of protocol {data[1]}, and torch's restricted loader"
                                  " reads 2 alone, which torch.save writes: save it again without"
                                  " pickle_protocol")  # fmt: skip
        names = {f"{_RENAMED.get(m.decode(), m.decode())}.{n.decode()}" for m, n in _GLOBAL.findall(data)}
        names = {name for name in names if name in _SINGLE or name in _MAKERS or name.startswith(_FAMILIES)}
        known: list[Any] = [(_MAKERS.get(name) or _record_class(name), name) for name in sorted(names)]
        # tensors of a zip file take no memory on the meta device; those of an older one are read now
        device, room = ("meta", len(data)) if self._entries else ("cpu", len(data) + window.size // MEMORY_OF_PICKLE)
        window.seek(0)
        file = io.BufferedReader(window)
        with _guarded(window.where, room):  # which takes the lock
            before = serialization.get_safe_globals()
            serialization.clear_safe_globals()  # Megatron, if it is imported, has allowed torch's loader real classes
            try:
                serialization.add_safe_globals(known)
                loaded = serialization.load(file, map_location=device, weights_only=True)
            finally:
                serialization.clear_safe_globals()
                serialization.add_safe_globals(before)  # type: ignore[arg-type]
        if not self._entries and file.tell() != window.size:
            raise CheckpointError(f"{window.where} has {window.size:,} bytes, its storages end at byte {file.tell():,}:"
                                  " it is cut short or damaged")  # fmt: skip
        return loaded

    def _record(self, tensor: Tensor) -> TensorRecord:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise _Refused("has a tensor that is sparse, quantized, or a view with its conjugate")
        storage = tensor.untyped_storage()
        if self._entries:  # a tensor that reaches beyond its storage has enlarged it; ``read`` sees what the file has
            place = getattr(storage, "_checkpoint_offset", -1)
        else:
            place = storage.data_ptr()
            self._storages[place] = storage
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        return TensorRecord(self, place, storage.nbytes(), offset, shape, tensor.stride(), tensor.dtype)

    def read(self, record: TensorRecord) -> Tensor:
        """Read a tensor into CPU memory, with the elements and strides that were saved."""
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
            raise CheckpointError(f"{where} reaches to element {first + span:,} of a storage of {total:,}: it is"
                                  " damaged")  # fmt: skip
        with self._opened() as window:
            if not self._entries:
                elements: Any = torch.empty(0, dtype=record.dtype)
                elements.set_(self._storages[record.storage], first, record.shape, record.stride)
                return elements  # type: ignore[no-any-return]
            place, num_bytes = record.storage, record.num_bytes
            entry = self._entries[max(0, bisect_right(self._entries, place, key=lambda entry: entry.header) - 1)]
            if entry.start(window) != place or entry.size != num_bytes:
                raise CheckpointError(f"{window.where}: {entry.name[:200]!r} has {entry.size:,} bytes, and a storage of"
                                      f" {num_bytes:,} should be at byte {place:,}: it is damaged")  # fmt: skip
            flat = torch.empty(span, dtype=record.dtype)
            crc = window.fill(memory_of(flat), record.storage + first * record.dtype.itemsize)
            if span * record.dtype.itemsize == entry.size:
                entry.check_sum(crc, self.where)
        return flat.as_strided(record.shape, record.stride)


def require_dtype(dtype: torch.dtype, where: str) -> torch.dtype:
    """Return a dtype that checkpoints can have. Raises CheckpointError for any other one."""
    if dtype not in DTYPES.values():
        raise CheckpointError(f"{where} is of {dtype}, which cannot be converted: save it as one of"
                              f" {', '.join(DTYPES)}")  # fmt: skip
    return dtype


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
