"""Writer of plain data as a pickle that other programs load: torch (also with ``weights_only=True``), Megatron-LM, DeepSpeed.

Protocol 2, with the opcodes that torch's safe loader knows. No name is looked up here either: a class name is written
as text, so a pickle of another program's object (``Object``) can be made without installing that program. Two
references to one list become two lists; tensors that share a storage still share it. Source: the comments of CPython's
``pickletools``; torch/_utils.py :: _rebuild_tensor_v2.
"""

from __future__ import annotations

import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_sp.convert.archive.pickle_globals import STORAGES
from megatron_sp.convert.archive.pickle_tree import Name, Object

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if dtype != "untyped"}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is created just before it is written, and released afterwards.

    ``make`` returns it on any device and with any strides, with this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def numbers(self) -> Tensor:
        """Make the tensor and return its elements in row-major order on the CPU."""
        tensor = self.make()
        if tuple(tensor.shape) != tuple(self.shape) or tensor.dtype != self.dtype:
            raise ValueError(f"announced {list(self.shape)} {self.dtype}, made {list(tensor.shape)} {tensor.dtype}")
        return tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class LazyFlat:
    """A long vector whose parts are created one after the other, once for the checksum and again for writing.

    ``parts`` starts over at every call; together the parts have ``numel`` elements.
    """

    numel: int
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]


class TreeWriter:
    """Writer of one pickle; collects the storages that it refers to, in the order of their keys "0", "1", ..."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._keys: dict[Any, str] = {}  # keys of storages that have been written
        self.storages: list[Callable[[], Tensor] | LazyFlat] = []  # each returns the storage's elements

    def dumps(self, tree: Any) -> bytes:
        """Return the pickle of None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, namespaces, numpy arrays, ``Tensor``,
        ``LazyTensor``, dtypes, ``Name`` and ``Object``.

        Raises:
            TypeError: the tree contains something else.
        """
        self._parts = [b"\x80\x02"]
        self._value(tree)
        return b"".join([*self._parts, b"."])

    def _out(self, *parts: bytes) -> None:
        self._parts += parts

    def _value(self, value: Any) -> None:
        action = next((_ACTIONS[kind] for kind in type(value).__mro__ if kind in _ACTIONS), None)
        if action is None:
            raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written into a torch file")
        action(self, value)

    def _global(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        self._out(f"c{module}\n{last}\n".encode())

    def _call(self, name: str, *args: Any) -> None:
        self._global(name)
        self._value(args)
        self._out(b"R")

    def _none(self, _value: None) -> None:
        self._out(b"N")

    def _bool(self, value: bool) -> None:
        self._out(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._out(b"J", struct.pack("<i", value))
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise ValueError(f"an integer of {len(data):,} bytes cannot be written into a torch file")
        self._out(b"\x8a", bytes([len(data)]), data)

    def _float(self, value: float) -> None:
        self._out(b"G", struct.pack(">d", value))

    def _str(self, value: str) -> None:
        data = value.encode("utf-8")
        self._out(b"X", struct.pack("<I", len(data)), data)

    def _bytes(self, value: bytes | bytearray) -> None:
        self._call("_codecs.encode", bytes(value).decode("latin-1"), "latin1")

    def _group(self, items: Iterable[Any]) -> None:
        self._out(b"(")
        for item in items:
            self._value(item)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if value:
            self._group(value)
        self._out(b"t" if value else b")")

    def _list(self, value: list[Any]) -> None:
        self._out(b"]")
        self._group(value)
        self._out(b"e")

    def _pairs(self, value: dict[Any, Any]) -> None:
        self._group(part for pair in value.items() for part in pair)
        self._out(b"u")

    def _dict(self, value: dict[Any, Any]) -> None:
        self._out(b"}")
        self._pairs(value)

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> None:
        self._call("collections.OrderedDict")
        self._pairs(value)

    def _set(self, value: set[Any] | frozenset[Any]) -> None:
        self._call("builtins.frozenset" if isinstance(value, frozenset) else "builtins.set", list(value))

    def _size(self, value: torch.Size) -> None:
        self._call("torch.Size", tuple(value))

    def _namespace(self, value: Namespace) -> None:
        self._object(Object("argparse.Namespace", state=vars(value)))

    def _object(self, value: Object) -> None:
        if value.items:
            raise TypeError(f"the items of a {value.name} cannot be written into a torch file")
        if value.args:
            self._call(value.name, *value.args)
        else:
            self._global(value.name)
            self._out(b")\x81")
        if value.state is not None:
            self._value(value.state)
            self._out(b"b")

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        kind = value.dtype
        if kind.kind not in "biuf":
            raise TypeError(f"a numpy array of {kind} cannot be written into a torch file")
        dtype = Object("numpy.dtype", (kind.str[1:], False, True), (3, "<" if kind.itemsize > 1 else "|", None, None, None, -1, -1, 0))
        numbers = value.astype(kind.newbyteorder("<")).tobytes()
        self._call("numpy.core.multiarray._reconstruct", Name("numpy.ndarray"), (0,), b"b")
        self._value((1, value.shape, dtype, False, numbers))
        self._out(b"b")

    def _tensor(self, value: Tensor) -> None:
        """Write a tensor as torch does: its whole storage once, however many tensors share it."""
        value = value.detach().cpu()
        storage, size = value.untyped_storage(), value.element_size()
        numel = storage.nbytes() // size
        flat = value.as_strided((numel,), (1,), 0)
        key = self._key((storage.data_ptr(), value.dtype) if numel else object(), lambda: flat)
        self._rebuild(key, value.dtype, numel, int(value.storage_offset()), tuple(value.shape), value.stride())

    def _lazy_tensor(self, value: LazyTensor) -> None:
        stride, numel = [], 1
        for size in reversed(value.shape):
            stride.append(numel)
            numel *= max(size, 1)
        numel = 0 if 0 in value.shape else numel
        self._rebuild(self._key(object(), value.numbers), value.dtype, numel, 0, tuple(value.shape), tuple(reversed(stride)))

    def _lazy_flat(self, value: LazyFlat) -> None:
        self._rebuild(self._key(object(), value), value.dtype, value.numel, 0, (value.numel,), (1,))

    def _key(self, identity: Any, numbers: Callable[[], Tensor] | LazyFlat) -> str:
        if identity not in self._keys:
            self._keys[identity] = str(len(self.storages))
            self.storages.append(numbers)
        return self._keys[identity]

    def _rebuild(self, key: str, dtype: torch.dtype, numel: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        name = str(dtype).removeprefix("torch.")
        typed = name in _STORAGE_OF
        self._global(f"torch._utils._rebuild_tensor_v{2 if typed else 3}")
        self._out(b"((")
        for part in (
            "storage",
            Name(f"torch.{_STORAGE_OF.get(name, 'storage.UntypedStorage')}"),
            key,
            "cpu",
            numel if typed else numel * dtype.itemsize,
        ):
            self._value(part)
        self._out(b"tQ")
        for part in (offset, shape, stride, False, OrderedDict(), *(() if typed else (dtype,))):
            self._value(part)
        self._out(b"tR")


_ACTIONS: dict[type, Callable[[TreeWriter, Any], None]] = {
    type(None): TreeWriter._none,
    bool: TreeWriter._bool,
    int: TreeWriter._int,
    float: TreeWriter._float,
    str: TreeWriter._str,
    bytes: TreeWriter._bytes,
    bytearray: TreeWriter._bytes,
    torch.Size: TreeWriter._size,
    tuple: TreeWriter._tuple,
    list: TreeWriter._list,
    OrderedDict: TreeWriter._ordered_dict,
    dict: TreeWriter._dict,
    set: TreeWriter._set,
    frozenset: TreeWriter._set,
    Namespace: TreeWriter._namespace,
    np.ndarray: TreeWriter._array,
    Tensor: TreeWriter._tensor,
    LazyTensor: TreeWriter._lazy_tensor,
    LazyFlat: TreeWriter._lazy_flat,
    torch.dtype: lambda writer, value: writer._global(str(value)),
    torch.device: lambda writer, value: writer._call("torch.device", str(value)),
    Name: lambda writer, value: writer._global(value.name),
    Object: TreeWriter._object,
}
