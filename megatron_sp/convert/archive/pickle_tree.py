"""Reader of foreign pickles that returns plain data: dicts, lists, numbers, strings, and records for tensors and objects.

The bytes go to a separate process that interprets them and can do nothing else (``pickle_worker.py``,
``pickle_machine.py``); it returns text of bounded size, which is converted to the values below. No name in the file is
ever imported or called, there is no option to allow it, and a file with an unknown name is refused with a message that
contains the name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megatron_sp.convert.archive import pickle_globals
from megatron_sp.utils.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 23  # 40,000 tensors take 5.7 MB
MEMORY_OF_PICKLE = 32  # bytes that the process may use for each byte of a pickle; honest ones take some twenty
MAX_COST = 48 << 20  # approximate memory of the values here, as ``pickle_machine.check`` counts it
_SMALL_BYTES = 1 << 19  # a process for pickles up to this size is kept for the next one
_ROOT = Path(__file__).parents[3]
_SCRIPT = "import sys; sys.path.append({root!r}); from megatron_sp.convert.archive.pickle_worker import main; main()"


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that the pickle refers to by name, such as torch.float32."""

    name: str


@dataclass(slots=True, eq=False)
class Object:
    """Stand-in for an object of another program: its class and the data it was built from.

    ``state`` usually holds its attributes by name; ``items`` are the items appended or set (keys and values alternate).
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by name; empty if the object has none."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """Wrapper of a numpy array, ``numbers``.

    The array itself would break generic code: comparing it or testing its truth gives an array or raises an exception.
    """

    numbers: Any


class Storage(NamedTuple):
    """A storage, whose elements are elsewhere in the file."""

    key: str
    dtype: str  # as in torch.<dtype>, or "untyped": numel counts bytes then
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Location of a tensor's elements in a storage; ``offset`` and ``stride`` in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # as in torch.<dtype>
    requires_grad: bool = False


class Pickles(NamedTuple):
    """Values of consecutive pickles."""

    values: list[Any]
    end: int  # position of the first byte after the last pickle
    storages: dict[str, Storage]  # all that the pickles refer to, by key
    devices: frozenset[str]  # devices with a number, such as cuda:1, on which they were when they were saved


class PickleReader:
    """Reader of pickles in a separate process, which is reused for further pickles; ``close`` it, or use it in a ``with`` statement.

    Args:
        timeout_seconds: wall-clock limit for one call of ``read``; extended for large pickles.
    """

    def __init__(self, timeout_seconds: float = 60.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._capacity = 0

    def __enter__(self) -> PickleReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next ``read`` starts a new one."""
        process, self._process = getattr(self, "_process", None), None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # closing flushes, and the process is gone
                        pipe.close()
            process.wait()

    def read(self, data: bytes, where: str, max_bytes: int = MAX_PICKLE_BYTES, max_cost: int = MAX_COST) -> Any:
        """Return the value of a pickle that fills all of ``data``.

        Args:
            where: name of the data, for error messages.
            max_bytes: larger data is refused.
            max_cost: values that take more memory (approximate, in bytes) are refused.
        Raises:
            CheckpointError: it is damaged, too large, or contains something that checkpoints do not have.
        """
        return self.read_whole(data, where, max_bytes, max_cost).values[0]

    def read_whole(self, data: bytes, where: str, max_bytes: int = MAX_PICKLE_BYTES, max_cost: int = MAX_COST) -> Pickles:
        """Read like ``read``, and also return the storages and devices of the pickle."""
        pickles = self.read_several(data, 1, where, max_bytes, max_cost)
        if pickles.end != len(data):
            raise CheckpointError(f"{where} has {len(data) - pickles.end:,} bytes after the end of its pickle: it is damaged")
        return pickles

    def read_several(self, data: bytes, count: int, where: str, max_bytes: int = MAX_PICKLE_BYTES, max_cost: int = MAX_COST) -> Pickles:
        """Read ``count`` pickles from the start of ``data``; bytes after them are ignored."""
        if len(data) > max_bytes:
            raise CheckpointError(f"{where} has a pickle of {len(data):,} bytes: more than the {max_bytes:,} that are read")
        answer = self._ask(data, count, where, max_cost)
        if "refused" in answer:
            raise CheckpointError(f"{where}: its pickle {answer['refused']}. {_WAY_OUT}")
        try:
            storages = {key: Storage(key, dtype, numel) for _, key, dtype, numel in answer["storages"]}
            return Pickles([_value(node) for node in answer["values"]], answer["end"], storages, frozenset(answer["devices"]))
        except _Meaningless as error:
            raise CheckpointError(f"{where}: its pickle {error}. {_WAY_OUT}") from None

    def _ask(self, data: bytes, count: int, where: str, max_cost: int) -> dict[str, Any]:
        max_cost = min((1 << 22) + 32 * len(data), max_cost)
        process = self._started(len(data))
        timer = threading.Timer(self.timeout_seconds + len(data) / 20_000, process.kill)  # the machine interprets some 500 kB/s
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(struct.pack("<QQQ", len(data), count, max_cost))
            process.stdin.write(data)
            process.stdin.flush()
            length = struct.unpack("<Q", process.stdout.read(8))[0]
            if length > 8 * max_cost:
                raise ValueError("the answer is too long")
            text = process.stdout.read(length)
            return json.loads(text)  # type: ignore[no-any-return]
        except (OSError, struct.error, ValueError):  # the pipe broke, or what came is cut short
            self.close()
            raise CheckpointError(
                f"{where}: its pickle could not be read within {timer.interval:,.0f} seconds and {_headroom(self._capacity) >> 20:,} MiB: "
                f"it is damaged, or made to use them up. {_WAY_OUT}"
            ) from None
        finally:
            timer.cancel()

    def _started(self, num_bytes: int) -> subprocess.Popen[bytes]:
        """Return the process; start a new one if none is running or its memory limit is too low for ``num_bytes``."""
        if self._process is not None and (num_bytes > self._capacity or self._process.poll() is not None):
            self.close()
        if self._process is None:
            self._capacity = max(num_bytes, _SMALL_BYTES)
            limits = [str(_headroom(self._capacity)), str(int(600 + self._capacity / 10_000))]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT.format(root=str(_ROOT)), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},  # Python itself may need it
            )
        return self._process


_WAY_OUT = (
    "Nothing in it was run. What is read are checkpoints of tensors, numbers, strings, lists, dicts and the settings of Megatron and "
    "DeepSpeed (the names are in megatron_sp/convert/archive/pickle_globals.py): where the file was made, save it again with these only"
)


def _headroom(capacity: int) -> int:
    """Return the bytes that the process may use beyond those at its start, for pickles of up to ``capacity`` bytes."""
    return (44 << 20) + MEMORY_OF_PICKLE * capacity


class _Meaningless(Exception):
    """A value that the interpreter accepts but that cannot be converted."""


def _value(node: Any) -> Any:
    """Convert a node of ``pickle_machine.py`` to its value."""
    if not isinstance(node, list):
        return node
    return _KINDS[node[0]](node)


def _dict(node: list[Any]) -> dict[Any, Any]:
    try:
        return {_value(node[i]): _value(node[i + 1]) for i in range(1, len(node), 2)}
    except TypeError:
        raise _Meaningless("has a dict with a key that cannot be one, such as a list") from None


def _set(node: list[Any]) -> frozenset[Any] | set[Any]:
    try:
        return (set if node[0] == "s" else frozenset)(map(_value, node[1:]))
    except TypeError:
        raise _Meaningless("has a set of values that cannot be in one, such as lists") from None


def _tensor(node: list[Any]) -> TensorRecord:
    _, storage, offset, size, stride, requires_grad, dtype = node
    found = Storage(*storage[1:])
    return TensorRecord(found, offset, tuple(size[1:]), tuple(stride[1:]), dtype or found.dtype, requires_grad)


def _object(node: list[Any]) -> Any:
    made = Object(node[1], tuple(map(_value, node[2][1:])), _value(node[3]), [_value(part) for part in node[4:]])
    return _NUMPY[made.name](made) if made.name in _NUMPY else made


_KINDS: dict[str, Any] = {
    "[": lambda node: [_value(part) for part in node[1:]],
    "(": lambda node: tuple(_value(part) for part in node[1:]),
    "{": _dict,
    "s": _set,
    "f": _set,
    "b": lambda node: base64.b64decode(node[1]),
    "g": lambda node: Name(node[1]),
    "o": _object,
    "S": lambda node: Storage(*node[1:]),
    "T": _tensor,
}


def _numpy_dtype(value: Any) -> str:
    """Return the type string, such as "<f8", of a pickled numpy dtype of plain numbers."""
    code = value.args[0] if isinstance(value, Object) and value.name == "numpy.dtype" and value.args else None
    state = value.state if isinstance(value, Object) else None
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    if not (isinstance(code, str) and len(code) == 2 and code[0] in "biuf" and code[1] in "1248" and order in ("<", "|", "=")):
        raise _Meaningless("has a numpy array of something else than little-endian numbers")
    return ("|" if code[1] == "1" else "<") + code


def _numbers(dtype: str, data: Any, shape: Sequence[Any], columns_first: Any) -> Any:
    import numpy as np

    data = data.encode("utf-8") if isinstance(data, str) else data  # Python 2's strings are bytes
    count = 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 40:
            raise _Meaningless("has a numpy array of an impossible shape")
        count *= size
    if not isinstance(data, bytes) or len(data) != count * np.dtype(dtype).itemsize:
        raise _Meaningless("has a numpy array that does not have as many numbers as its shape says")
    return np.frombuffer(data, dtype).reshape(tuple(shape), order="F" if columns_first else "C")


def _numpy_array(made: Object) -> Any:
    """Build an array from its state: (version, shape, dtype, column-major, bytes)."""
    state = made.state
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple)):
        raise _Meaningless("has a numpy array without contents")
    return Array(_numbers(_numpy_dtype(state[2]), state[4], state[1], state[3]))


def _numpy_from_buffer(made: Object) -> Any:
    """Build an array from its arguments: (bytes, dtype, shape, "C" or "F")."""
    if len(made.args) != 4 or not isinstance(made.args[2], tuple):
        raise _Meaningless("has a numpy array without contents")
    return Array(_numbers(_numpy_dtype(made.args[1]), made.args[0], made.args[2], made.args[3] == "F"))


def _numpy_scalar(made: Object) -> Any:
    """Return the Python number of scalar(dtype, bytes)."""
    if len(made.args) != 2:
        raise _Meaningless("has a numpy number without contents")
    return _numbers(_numpy_dtype(made.args[0]), made.args[1], (), False).item()


_NUMPY = {
    **dict.fromkeys(pickle_globals.ARRAYS, _numpy_array),
    **dict.fromkeys(pickle_globals.FROM_BUFFER, _numpy_from_buffer),
    **dict.fromkeys(pickle_globals.SCALARS, _numpy_scalar),
}
