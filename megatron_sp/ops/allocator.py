"""Caching allocator for large CPU tensors."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_MIN_BYTES = 1 << 20  # smaller tensors are left to torch's allocator
_ALIGN = 4096


def empty(shape: tuple[int, ...] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor; large CPU tensors come from the cache."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_BYTES or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    block = _arena.take(num_bytes)
    if block is None:
        return torch.empty(shape, dtype=dtype, device=device)
    # set_ instead of view: autograd forbids in-place writes to a view created inside a custom function
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(torch.from_numpy(block).untyped_storage(), 0, tuple(shape))  # type: ignore[call-overload]


def host_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor of the host, pinned for copies from and to a GPU."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:  # ``ulimit -l``, containers
            reason = str(error).partition("\n")[0]
            text = f"host memory cannot be pinned ({reason}): copies to and from the GPU will not overlap"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return empty(shape, dtype=dtype, device=torch.device("cpu"))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to a device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def is_small(x: Tensor) -> bool:
    """Return whether a result like ``x`` may come from torch's allocator."""
    return x.nbytes <= _MIN_BYTES or x.device.type != "cpu"


def is_small_result(x: Tensor, width: int) -> bool:
    """Return whether a result [..., width] for x may come from torch's allocator."""
    return x.nbytes * width < _MIN_BYTES * (x.shape[-1] or 1) or x.device.type != "cpu"


def blocks(count: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cut equal pieces of work into slices whose results take about 1 MiB on the CPU; else one slice."""
    # torch's own kernels allocate their results: small ones stay in the cache until they are copied to their place, and
    # leave no holes of many megabytes in the heap. Each slice has work for every thread
    threads = torch.get_num_threads()
    step = max(1, _MIN_BYTES // max(1, bytes_each * threads)) * threads if device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class Arena:
    """Blocks in one reserved address range, of which only what is written takes memory."""

    # glibc returns large blocks to the kernel and requests them again, a page fault for every 4 KiB, or leaves holes:
    # with blocks allocated best fit a 124M model takes 2.84 GiB instead of 3.10 (docs/LOG.md)

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._range: mmap.mmap | None = None
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset
        self._returned: deque[tuple[int, int]] = deque()  # appended to by finalizers, at any moment
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray | None:
        # page-aligned uint8 [num_bytes]; None if there is no room or no range can be reserved
        size = (num_bytes + _ALIGN - 1) // _ALIGN * _ALIGN
        with self._lock:
            if self._range is None and not self._reserve():
                return None
            while self._returned:
                self._put_back(*self._returned.popleft())
            fits = [(have, offset) for offset, have in self._free if have >= size]
            if not fits:
                return None
            have, offset = min(fits)
            index = self._free.index((offset, have))
            self._free[index : index + 1] = [(offset + size, have - size)] if have > size else []
            block = np.frombuffer(self._range, dtype=np.uint8, count=num_bytes, offset=offset)  # type: ignore[arg-type]
        # freed when the last tensor on it is gone, views and saved tensors included. The finalizer takes no lock: the
        # collector may call it while ``take`` holds it
        weakref.finalize(block, self._returned.append, (offset, size)).atexit = False
        return block

    def _reserve(self) -> bool:
        if self._capacity == 0:
            return False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._range = mmap.mmap(-1, self._capacity, flags=flags)
        except (OSError, ValueError):
            self._capacity = 0  # an address-space limit: do without
            return False
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._range.madvise(mmap.MADV_HUGEPAGE)
        self._free = [(0, self._capacity)]
        return True

    def _put_back(self, offset: int, size: int) -> None:
        # merged with free neighbours: otherwise holes of exactly the size that was freed could not be used for others
        end = offset + size
        place = next((i for i, (other, _) in enumerate(self._free) if other > offset), len(self._free))
        if place < len(self._free) and self._free[place][0] == end:
            end += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            offset = self._free.pop(place - 1)[0]
            place -= 1
        self._free.insert(place, (offset, end - offset))


try:
    _arena = Arena(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
except (ValueError, OSError, AttributeError):
    _arena = Arena(0)
