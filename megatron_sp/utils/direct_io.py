"""Writing of large new files, bypassing the page cache where that is known to help."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_sp.utils.files import file_system

# With the page cache, the kernel allocates, fills and writes back every page, and on a virtual machine a new page may
# have to be fetched from the host first: 1.0 to 3.0 s of CPU time per GB were measured (benchmarks/save_stall.py), at
# the expense of concurrent computation. With O_DIRECT the disk reads from our memory: 0.04 s per GB. It is used only on
# file systems on which that was measured; on a network file system it is the page cache that keeps many requests in
# flight.
_FILE_SYSTEMS = ("ext4", "xfs")
_ALIGN = 4096  # alignment of memory, offsets and lengths; a disk that needs more reports EINVAL
_BUFFER_BYTES = 8 << 20


class DirectFile:
    """Sequentially written file, made by ``create``; its contents are on the disk after ``sync``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # whether the page cache is currently bypassed
        self.is_direct = file_system(fd) in _FILE_SYSTEMS and self._leave_out_cache(True)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES) if self.is_direct else None  # aligned to a page
        self._filled = 0

    def write(self, data: memoryview) -> None:
        # with O_DIRECT bytes are buffered until a block is full
        if self._buffer is None:
            self._write_all(data)
            return
        into = np.frombuffer(self._buffer, np.uint8)
        while len(data):
            count = min(len(data), _BUFFER_BYTES - self._filled)
            # not by slices of the memoryview, which hold the interpreter's lock meanwhile
            np.copyto(into[self._filled : self._filled + count], np.frombuffer(data[:count], np.uint8))
            self._filled += count
            data = data[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def sync(self) -> None:
        if self._buffer is not None:
            self._flush()
        os.fsync(self._fd)

    def _flush(self) -> None:
        assert self._buffer is not None
        filled, self._filled = self._filled, 0
        with memoryview(self._buffer) as buffer:
            at = filled - filled % _ALIGN
            self._write_all(buffer[:at])
            if at < filled:  # the end of the file
                self._leave_out_cache(False)
                self._write_all(buffer[at:filled])

    def _write_all(self, data: memoryview) -> None:
        while len(data):
            try:
                count = os.write(self._fd, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._leave_out_cache(False)
                continue
            data = data[count:]
            if self.is_direct and count % _ALIGN:
                self._leave_out_cache(False)

    def _leave_out_cache(self, out: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if out else flags & ~os.O_DIRECT)
            self.is_direct = out
        except OSError:
            self.is_direct = False
        return self.is_direct


@contextmanager
def create(path: Path) -> Iterator[DirectFile]:
    """Create a file, and close it without ``sync``. Raises FileExistsError."""
    with open(path, "xb", buffering=0) as file:
        yield DirectFile(file.fileno())
