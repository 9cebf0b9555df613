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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, serialization

from megatron_sp.convert.archive.zipped import MAX_PICKLE_BYTES, Entry, Window, read_directory, storage_entry
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

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

# What the files of these programs name beside what torch itself allows. A name is never looked up or imported.
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


def _record_class(name: str) -> type[Object]:
    def new(cls: type[Object], *args: Any) -> Object:  # pickles call the class or its __new__
        record = object.__new__(cls)
        Object.__init__(record, name, args)
        return record

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
    "builtins.frozenset": frozenset, "builtins.bytes": _no_bytes, "collections.defaultdict": _default_dict,
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
    with _ONE_READER, _clear_errors(where), _limited_memory(_HEADROOM + 2 * MEMORY_OF_PICKLE * num_bytes):
        yield


@contextlib.contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    """Let the process take this much more writable memory.

    RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what is merely reserved: a library that is
    loaded, or the 64 MiB of malloc's arena for every thread that starts.
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


@contextlib.contextmanager
def _only(known: list[Any]) -> Iterator[None]:
    # Megatron, if it is imported, has allowed torch's loader real classes for the whole process.
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

    def read(self) -> Tensor:
        """Read the tensor into CPU memory, as ``TorchFile.read``."""
        return self.file.read(self)


class _Plain:
    """Converter of loaded values to plain ones, with records of their tensors."""

    def __init__(self, num_bytes: int, record: Callable[[Tensor], TensorRecord] | None = None) -> None:
        self._most, self._record = MAX_VALUES + 4 * num_bytes, record
        # by identity: value, size, height; None: being converted
        self._known: dict[int, tuple[Any, int, int] | None] = {}

    def __call__(self, value: Any, depth: int = 0) -> tuple[Any, int, int]:
        """Return the value, the number of its parts and its height."""
        if not isinstance(value, (dict, list, tuple, set, frozenset, Object, Tensor, bytearray)):
            return value, 1 + (len(value) >> 5 if isinstance(value, (str, bytes)) else 0), 0
        if id(value) in self._known:
            known = self._known[id(value)]
            if known is None:
                raise _Refused("contains itself")
        else:
            if depth > MAX_DEPTH:
                raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
            self._known[id(value)] = None
            self._known[id(value)] = known = self._converted(value, depth)
        if depth + known[2] > MAX_DEPTH + 1:
            raise _Refused(f"is nested deeper than {MAX_DEPTH} levels")
        return known

    def _converted(self, value: Any, depth: int) -> tuple[Any, int, int]:
        if isinstance(value, Tensor):
            if self._record is None:
                raise _Refused("has a tensor in it")
            return self._record(value), 4, 1
        if isinstance(value, bytearray):
            return bytes(value), 1 + (len(value) >> 5), 0
        parts: list[Any] = [value.args, value.state] if isinstance(value, Object) else list(value)
        if isinstance(value, dict):
            parts = [part for pair in value.items() for part in pair]
        size, height = 3, 0
        for place, part in enumerate(parts):
            parts[place], cost, high = self(part, depth + 1)
            size, height = size + cost, max(height, high)
            if size > self._most:
                raise _Refused(f"comes to more than {self._most:,} values: it has very many, or is a small file for"
                               " very much data, whose shared parts are nested in shared parts")  # fmt: skip
        if isinstance(value, Object):
            value.args, value.state = parts
            return value, size, height + 1
        if isinstance(value, dict):
            return dict(zip(parts[::2], parts[1::2], strict=True)), size, height + 1
        kind: Any = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(parts), size, height + 1


def read_records(data: bytes, where: str) -> Any:
    """Return the value of a pickle of any protocol, with records instead of objects."""
    with _guarded(where, len(data)):
        value = _Records(file := io.BytesIO(data)).load()
        if file.tell() != len(data):
            raise CheckpointError(f"{where} has {len(data) - file.tell():,} bytes after the end of its pickle: it is"
                                  " damaged")  # fmt: skip
        return _Plain(len(data))(value)[0]


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
                raise CheckpointError(f"{window.where} is not a file of torch.save: {_what_it_is(window)}")
            loaded = self._loaded(window, data)
            places = _DEVICE.findall(data) if self._entries else ()
            #: devices with a number, such as cuda:1, on which its tensors were
            names = (name.decode() for size, name in places if int.from_bytes(size, "little") == len(name))
            self.devices = frozenset(names)
            with _guarded(window.where, len(data)):
                #: what was saved: plain data, Object and TensorRecord
                self.tree: Any = _Plain(len(data), self._record)(loaded)[0]

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
        known = [(_MAKERS.get(name) or _record_class(name), name) for name in sorted(names)]
        # tensors of a zip file take no memory on the meta device; those of an older one are read now
        device, room = ("meta", len(data)) if self._entries else ("cpu", len(data) + window.size // MEMORY_OF_PICKLE)
        window.seek(0)
        file = io.BufferedReader(window)
        with _guarded(window.where, room), _only(known):  # in this order: the first one takes the lock
            loaded = serialization.load(file, map_location=device, weights_only=True)
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
            entry = storage_entry(self._entries, window, record.storage, record.num_bytes)
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


def _what_it_is(window: Window) -> str:
    head = window.head(512)
    if not head:
        return "it is empty"
    if head[8:9] == b"{":
        return "it is a safetensors file, which is read as such and not from here"
    if head[257:262] == b"ustar":
        return "it is a tar file as torch 0.1 wrote them; load and save it with any torch since"
    return "it is something else, or damaged"
