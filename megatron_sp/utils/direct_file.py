"""A large new file, written around the page cache where that is known to gain.

Through the page cache, every page is found, filled and written back by the kernel, and on a virtual machine a fresh one may have to be
fetched from the host first: 1.0 to 3.0 s of processor time per GB were measured (benchmarks/save_stall.py), taken from whoever computes
beside it. With O_DIRECT the disk reads from our memory: 0.04 s per GB. Only file systems on which that was measured are treated so; on a
network's the page cache is what keeps many requests under way.
"""

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

_FILE_SYSTEMS = ("ext4", "xfs")
_ALIGN = 4096  # of memory, offsets and lengths; a disk that wants more says EINVAL
_BUFFER_BYTES = 8 << 20


class DirectFile:
    """Takes contents in order; what has been written is on the disk behind ``sync``. Made by ``create``.

    Attributes:
        is_direct: whether the page cache is left out at the moment.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_direct = file_system(fd) in _FILE_SYSTEMS and self._leave_out_cache(True)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES) if self.is_direct else None  # aligned to a page
        self._filled = 0

    def write(self, data: memoryview) -> None:
        """Append bytes, or keep them until a block is full.

        Raises:
            OSError: no space, for example; earlier bytes may be written or not.
        """
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
        """Put everything on the disk."""
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
    """A new file, closed at the end, not put on the disk by that alone.

    Raises:
        FileExistsError: there is such a file; it is left as it is.
        OSError: as any open.
    """
    with open(path, "xb", buffering=0) as file:
        yield DirectFile(file.fileno())
