"""Zip archives of ``torch.save``, whose entries are stored as they are: a place is checked before a byte is read."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from typing import Any, NamedTuple

from megatron_sp.utils.errors import CheckpointError

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


def storage_entry(entries: list[Entry], window: Window, place: int, num_bytes: int) -> Entry:
    """Return the entry that is a storage, after checking its size and that it begins where torch says."""
    entry = entries[max(0, bisect_right(entries, place, key=lambda entry: entry.header) - 1)]
    if entry.start(window) != place or entry.size != num_bytes:
        raise CheckpointError(f"{window.where}: {entry.name[:200]!r} has {entry.size:,} bytes, and a storage of"
                              f" {num_bytes:,} should be at byte {place:,}: it is damaged")  # fmt: skip
    return entry
