"""The fake device: operations on its tensors are checked, ordered and counted, and not computed.

A tensor on it is a ``FakeTensor`` that says ``cuda:0``: it has a shape, strides and a storage that views share, and no
contents. ``Device`` is a dispatch mode: every operation of autograd and of our code passes through it, in backward also
on the engine's own thread. It finds out what an operation reads and writes from the operator's schema.

What the host reads of the device's memory (``item``, ``tolist``, copies) makes it wait; these waits are counted by
place. What it reads is ``values(tensor)``, by default ones (True): control flow that depends on values is steered from
there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fake_gpu.captures import Pool, Recording, refused
from fake_gpu.clocks import DEFAULT, HOST, Clocks
from fake_gpu.memory import Memory, Range

CUDA = torch.device("cuda", 0)
_PACKAGE = f"{Path(__file__).parents[2] / 'megatron_sp'}{os.sep}"
_SNIPPETS = str(Path(__file__).with_name("snippets.py"))
_LAUNCHER = str(Path("ops") / "kernels" / "launch.py")  # a kernel's place is where it is called
# operations on the device whose result's shape depends on values: the host waits for it
_SYNCHRONIZE = {
    f"aten::{name}"
    for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal", "is_nonzero", "repeat_interleave.Tensor")
}
# no kernel: the result is the same memory, or memory without contents
_NO_KERNEL = {
    "aten::detach", "aten::alias", "aten::_unsafe_view", "aten::lift_fresh", "aten::set_", "aten::resize_", "aten::empty",
    "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::_reshape_alias",
}  # fmt: skip


# of an argument they take the dtype and the device, not the contents
_NEW = {"aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::zeros_like", "aten::ones_like", "aten::full_like"}
# the addend is copied to where the result is to be before a product is added to it, unless it is there already
_COPY_FIRST = {"aten::addmm", "aten::baddbmm", "aten::addmv"}
# position of its query and key
_FLASH_BACKWARD = {"aten::_scaled_dot_product_flash_attention_backward": (1, 2), "aten::_flash_attention_backward": (1, 2)}

# in place, without an implementation for tensors without contents: nothing to be found out but what they read and write
_NO_META = {"aten::_fused_sgd_", "aten::_fused_adamw_"}


@dataclass
class Tally:
    """What one part of a run did on the device."""

    launches: Counter[str] = field(default_factory=Counter)  # by operator
    num_bytes: Counter[str] = field(default_factory=Counter)  # read and written, by operator
    by_file: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes, by (file of the package, operator)
    launches_by_file: Counter[tuple[str, str]] = field(default_factory=Counter)
    host_waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (what, place in the package)


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield (file of the package, frame) for each frame of the package on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            file = frame.f_code.co_filename.removeprefix(_PACKAGE)
            if file != _LAUNCHER:
                yield file, frame
        elif frame.f_code.co_filename == _SNIPPETS:
            yield "snippets.py", frame
        frame = frame.f_back


def place(depth: int = 3) -> str:
    """Return the innermost lines of the package on the stack, as ``file:line < file:line``."""
    return " < ".join(f"{file}:{frame.f_lineno}" for file, frame in islice(_frames(), depth)) or "outside of the package"


def functions(depth: int = 2) -> str:
    """Return the innermost functions of the package on the stack, as ``file:function < file:function``.

    Comprehensions are left out: they are functions in some versions of Python only.
    """
    named = ((file, frame.f_code.co_name) for file, frame in _frames() if not frame.f_code.co_name.startswith("<"))
    return " < ".join(f"{file}:{name}" for file, name in islice(named, depth))


def is_on_device(x: Any) -> bool:
    """True for a tensor of the fake device."""
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


class Device(TorchDispatchMode):
    """The fake device of one process, as a dispatch mode; enter it around everything that uses the device.

    Args:
        library: ``build.load()``.
        values: returns what the host reads of a tensor on the device, as a tensor of the host of its shape and dtype.
    """

    def __init__(self, library: ctypes.CDLL, values: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._library = library
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.clocks = Clocks()
        self.names: dict[int, str] = {HOST: "the host", DEFAULT: "the compute stream"}
        self.memory = Memory(self.clocks, lambda stream: self.names.get(stream, f"stream {stream}"))
        self.tally = Tally()
        self.values = values or _ones
        self._next_stream, self._next_event = 100, 0
        self._entries = (ctypes.c_int64 * 3000)()
        self._pinned: set[int] = set()
        self._lock = threading.RLock()  # loaders and writers of checkpoints have threads
        self.sites: dict[str, int] = {}  # places that ``drops`` was asked about, and how often they were passed
        self.dropped = ""  # the one of them that is left out
        self.passed: set[str] = set()  # lines of the package with a call that orders something
        self._threads = threading.local()
        self.square_from = 0  # rows and columns from which on a tensor is noted as a square; 0: none is
        self.squares: Counter[str] = Counter()  # by operator, shape and place
        self._capture: Recording | None = None
        self.is_watching = True  # off at the end of a run, when everything is freed in any order

    # streams and events
    # ---------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The current stream."""
        return int(self._library.stream_get())

    @stream.setter
    def stream(self, stream: int) -> None:
        self._library.stream_set(stream)

    def new_stream(self, name: str) -> int:
        """Return a new stream; its name is for messages."""
        self._next_stream += 1
        self.names[self._next_stream] = name
        return self._next_stream

    def new_event(self) -> int:
        """Return a new event, which is not recorded yet."""
        self._next_event += 1
        return self._next_event

    def record(self, event: int, stream: int | None = None) -> None:
        """Record an event on a stream, by default the current one."""
        self.follow_engine()
        self._record(event, self.stream if stream is None else stream)

    def wait(self, event: int, stream: int | None = None) -> None:
        """Make a stream, by default the current one, wait for an event."""
        self.follow_engine()
        self._wait(self.stream if stream is None else stream, event)

    def _record(self, event: int, stream: int) -> None:
        if (recording := self.recording) is not None and recording.has(stream):
            recording.record(event, stream)
        else:
            self.clocks.record(event, stream)

    def _wait(self, stream: int, event: int) -> None:
        if (recording := self.recording) is None or not recording.wait(stream, event, place()):
            self.clocks.wait(stream, event)

    def follow_engine(self) -> None:
        """Take note of what autograd's engine has recorded and waited for since the last call."""
        while count := self._library.engine_log_take(self._entries, len(self._entries) // 3):
            for i in range(count):
                kind, event, stream = chr(self._entries[3 * i]), -self._entries[3 * i + 1], self._entries[3 * i + 2]
                if kind == "r":
                    self._record(event, stream)
                elif kind == "w":
                    self._wait(stream, event)
                elif kind == "s":
                    self.host_waits("autograd's engine", stream)
                else:
                    self._wait(HOST, event)

    def enter_thread(self) -> None:
        """Take note that the current thread is beside the program's own: what it waits for, the program has not waited for."""
        self._threads.is_beside = True

    @property
    def is_beside(self) -> bool:
        """True in a thread beside the program's own; autograd's engine is the program's own, which waits for it."""
        return getattr(self._threads, "is_beside", False)

    def host_waits(self, why: str, stream: int | None = None) -> None:
        """The host waits for a stream, by default the current one; counted with its place in the package."""
        if self.is_beside:
            return
        self.require_no_capture(f"a wait of the host ({why})")
        self.tally.host_waits[why, place(1)] += 1
        self.clocks.host_waits_for(self.stream if stream is None else stream)

    def passes(self) -> None:
        """Take note of the lines of the package that order something: where the call is, and its callers."""
        self.passed.update(place(3).split(" < "))

    def drops(self, kind: str, depth: int = 2) -> bool:
        """Take note of a place where the package waits for something, or keeps memory for it; return whether this run leaves it out."""
        self.passes()
        site = f"{kind} in {functions(depth)}"
        self.sites[site] = self.sites.get(site, 0) + 1
        return site == self.dropped

    # graphs
    # -------------------------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording | None:
        """The capture that the current thread is part of."""
        return None if self.is_beside else self._capture

    def require_no_capture(self, what: str) -> None:
        """Refuse what the host must not do in a capture.

        Raises:
            CaptureError: there is one.
        """
        if self.recording is not None:
            raise refused(what, place())

    def capture_begins(self, pool: Pool) -> None:
        """Begin to capture the current stream."""
        self.follow_engine()
        assert self._capture is None, "one capture at a time"
        self._capture = Recording(
            self.stream, pool, place(1), lambda stream: self.names.get(stream, f"stream {stream}"), self.clocks.has_recorded
        )

    def capture_ends(self) -> Recording:
        """End the capture, and return what it has."""
        try:
            self.follow_engine()
        finally:
            recording, self._capture = self._capture, None
        assert recording is not None, "no capture has begun"
        recording.finish()
        return recording

    def replay(self, recording: Recording) -> None:
        """Launch a graph on the current stream."""
        self.require_no_capture("a replay")
        self.follow_engine()
        on = lambda stream: self.stream if stream == recording.stream else stream
        self.tally.launches["a graph"] += 1
        with self._lock:
            self.memory.overwrite(recording, self.stream)
            for kind, what, stream in recording.entries:
                if kind == "record":
                    self.clocks.record(what, on(stream))
                elif kind == "wait":
                    self.clocks.wait(on(stream), what)
                elif kind == "use":
                    self.memory.replay(replace(what, stream=on(what.stream)))
                else:
                    what()

    # memory
    # ---------------------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """Declare a host tensor's storage as pinned, and return the tensor."""
        self.require_no_capture("an allocation of pinned memory")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._forget_pinned, storage._cdata).atexit = False
            self.memory.allocate(storage._cdata, storage.nbytes(), HOST, place(), pinned=True)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """True for a host tensor in pinned memory."""
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._pinned

    def _forget_pinned(self, key: int) -> None:
        self._pinned.discard(key)
        self._freed(key)

    def _freed(self, key: int) -> None:
        if self.is_watching:
            self.follow_engine()
            self.memory.free(key, place(), self.recording)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Take note that a storage of the device is about to be resized: to 0 it is freed, from 0 it is allocated."""
        key = storage._cdata
        if num_bytes == 0:
            self._freed(key)
        elif not self.memory.knows(key):
            self.memory.allocate(key, num_bytes, self.stream, place(), recording=self.recording)
            weakref.finalize(storage, self._freed, key).atexit = False

    def _storage_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not self.memory.knows(key):
            self.memory.allocate(key, storage.nbytes(), self.stream, place(), recording=self.recording)
            weakref.finalize(storage, self._freed, key).atexit = False
        return key

    def range_of(self, tensor: Tensor) -> Range:
        """Return the bytes from a tensor's first to its last element."""
        key, size = self._storage_of(tensor), tensor.element_size()
        if tensor.numel() == 0:
            return Range(key, 0, 0)
        start = int(tensor.storage_offset()) * size
        return Range(key, start, start + (sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * size)

    def use(self, stream: int, reads: list[Tensor], writes: list[Tensor], op: str) -> None:
        """Run ``op`` on a stream; tensors are the device's or pinned."""
        if self.is_watching:
            self.follow_engine()
            with self._lock:
                ranges = [[self.range_of(t) for t in tensors] for tensors in (reads, writes)]
                self.memory.access(stream, *ranges, op, place(), None if stream == HOST else self.recording)

    def count(self, op: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Count a kernel and the bytes that it moves; what is written in place is read, too, unless it is overwritten."""
        moved = sum(t.numel() * t.element_size() for t in (*reads, *writes))
        tally, file = self.tally, place(1).partition(":")[0]
        tally.launches[op] += 1
        tally.num_bytes[op] += moved
        tally.launches_by_file[file, op] += 1
        tally.by_file[file, op] += moved

    # operations
    # -----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        flat = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "cuda"
        if name == "prim::device":
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if not to_device and not any(isinstance(x, FakeTensor) for x in flat):
            return self._on_host(func, name, flat, args, kwargs)
        if name == "aten::_local_scalar_dense":
            self.follow_engine()
            self.use(self.stream, [args[0]], [], "item")
            self.host_waits("item")
            return self.values(args[0]).item()
        if name in ("aten::is_pinned", "aten::record_stream"):
            return False if name == "aten::is_pinned" else self._record_stream(args[0], args[1])
        if name == "aten::copy_" and not isinstance(args[0], FakeTensor):
            return self._to_host(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        if name == "aten::_to_copy" and target is not None and not to_device:
            host = self.values(args[0]).to(kwargs.get("dtype") or args[0].dtype)
            return self._to_host(host, args[0], non_blocking=False)
        return self._on_device(func, name, flat, args, kwargs)

    def _on_host(self, func: Any, name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "aten::is_pinned":
            return self.is_pinned(args[0])
        if name == "aten::_pin_memory":
            return args[0].clone() if self.drops("pin_memory") else self.pin(args[0].clone())
        if name == "aten::copy_" and args[1].is_meta:  # initial weights that were not drawn (modules.install_large)
            return args[0]
        wants_pinned = bool(kwargs.pop("pin_memory", False))
        out = func(*args, **kwargs)
        if wants_pinned and not self.drops("pin_memory"):
            self.pin(out)
        pinned = [t for t in tensors if self.is_pinned(t)]
        if pinned and not func.is_view and name not in _NO_KERNEL:
            written = [t for t in _written(func, args, kwargs) if self.is_pinned(t)]
            ids = {id(t) for t in written}
            self.use(HOST, [t for t in pinned if id(t) not in ids], written, f"{name} of the host")
        return out

    def _to_host(self, to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        pinned = self.is_pinned(to)
        self.use(self.stream, [source], [to] if pinned else [], "copy to the host")
        self.count("copy to the host", [source], [to])
        to.copy_(self.values(source).expand(to.shape))
        if not (non_blocking and pinned):
            self.host_waits("copy to the host" if not non_blocking else "copy to memory that is not pinned")
        return to

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        if not self.drops("record_stream"):
            self.memory.record_stream(self._storage_of(tensor), stream.stream_id if hasattr(stream, "stream_id") else stream.id)

    def _on_device(self, func: Any, name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host = [t for t in tensors if not isinstance(t, FakeTensor)]
        copies = name in ("aten::copy_", "aten::_to_copy")
        if copies and host:
            non_blocking = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
            if host[0].numel() and not (non_blocking and self.is_pinned(host[0])):
                self.host_waits("copy from memory that is not pinned" if non_blocking else "copy from the host")
        elif any(t.dim() for t in host) and name not in _NO_KERNEL:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but {[tuple(t.shape) for t in host if t.dim()]} is on the host"
            )
        if name in _SYNCHRONIZE or str(func).removesuffix(".default") in _SYNCHRONIZE or _indexes_by_mask(name, args):
            self.host_waits(name)
        sent = [t for t in host if self.is_pinned(t)]
        if host:
            args, kwargs = tree_map(
                lambda x: self._like(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x, (args, kwargs)
            )
        with self.fake:
            self.fake.cache_enabled = name != "aten::set_"  # the key of a cached result would keep the storage for ever
            out = None if name in _NO_META else func(*args, **kwargs)
        if func.is_view:
            return out
        outs = [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        for t in outs if self.square_from else ():
            if sum(size >= self.square_from for size in t.shape) > 1:
                self.squares[f"{name} {tuple(t.shape)} at {place()}"] += 1
        if name in _NO_KERNEL:
            for t in outs:
                self._storage_of(t)
            return out
        writes = [t for t in _written(func, args, kwargs) if isinstance(t, FakeTensor)]
        ids = {id(t) for t in writes}
        reads = [] if name in _NEW else [t for t in tree_leaves((args, kwargs)) if is_on_device(t) and id(t) not in ids]
        updated = writes if name.endswith("_") and name not in ("aten::copy_", "aten::zero_", "aten::fill_") else []
        writes = writes + [t for t in outs if id(t) not in ids]
        self.use(self.stream, [*reads, *updated, *sent], writes, name)
        if name in _COPY_FIRST and kwargs.get("beta", 1) != 0 and _is_matrix(args[0]) and not _is_same(args[0], writes[0]):
            self.count("copy of the addend", [args[0]], writes)
            reads = [t for t in reads if t is not args[0]]
            updated = writes  # the product is added to it
        if self.is_watching and name in _FLASH_BACKWARD:
            self.memory.borrow(_flash_workspace(name, args), self.stream, place())
        self.count(str(func), [*reads, *updated], writes)
        return out

    def _like(self, tensor: Tensor) -> Tensor:
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments that the operator writes, by its schema."""
    spec = func._schema.arguments
    given = [*zip(spec, args, strict=False), *((a, kwargs[a.name]) for a in spec if a.name in kwargs)]
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _flash_workspace(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that the backward of the flash kernel allocates beside its results.

    The query's gradient is summed in fp32; keys and values that serve several queries have a gradient for each first
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp :: mha_bwd: dq_accum, dk_expanded, dv_expanded).
    """
    query, key = (args[i] for i in _FLASH_BACKWARD[name])
    expanded = 2 * query.numel() * query.element_size() if key.numel() < query.numel() else 0
    return int(4 * query.numel() + expanded)


def _indexes_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    if not name.startswith("aten::index") or len(args) < 2 or not isinstance(args[1], list | tuple):
        return False
    return any(isinstance(t, Tensor) and (t.dtype in (torch.bool, torch.uint8) or not isinstance(t, FakeTensor)) for t in args[1])


def _is_matrix(x: Tensor) -> bool:
    """True for an addend of the size of the product; a bias is added to it by the kernel itself."""
    return x.dim() > 1 and all(n > 1 for n in x.shape)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)
