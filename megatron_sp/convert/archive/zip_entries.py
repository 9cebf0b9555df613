"""Strict reader and streaming writer of the entries of a zip file.

A torch file is a zip file whose entries are stored uncompressed. The reader uses only the directory at the end, checks
it against the file's size and for consistency before using it, and then reads byte ranges; nothing is unpacked, no
entry's name is used as a path. The writer never seeks, so a zip can be part of a larger file, and aligns the contents
of every entry to a multiple of 64 bytes, as torch does, so that they can be memory-mapped. Python's ``zipfile`` can
neither align nor be this strict. Source: PKWARE's APPNOTE.TXT, 4.3; caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_sp.utils.errors import CheckpointError

MAX_DIRECTORY_BYTES = 1 << 23  # some 80,000 storages
ALIGNMENT = 64
_BLOCK_BYTES = 8 << 20
_LARGE, _MANY = 0xFFFFFFFF, 0xFFFF  # such a value in a narrow field means that the wide one has it
_narrow_limits = [_LARGE, _MANY]  # larger values are written to the wide fields; tests lower the limits
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_DATE = (1 << 5) | 1  # 1980-01-01, so that equal contents give equal files


class Window:
    """A byte range of an open file: the whole file, or a file embedded in it.

    Args:
        where: the file and the place in it, for error messages.
    """

    def __init__(self, fd: int, start: int, size: int, where: str) -> None:
        self.fd, self.start, self.size, self.where = fd, start, size, where

    def read(self, at: int, count: int) -> bytes:
        """Return bytes of the entry. Raises an error if they are not all within it."""
        data = bytearray(self._checked(at, count))
        self.read_into(memoryview(data), at)
        return bytes(data)

    def read_into(self, target: memoryview, at: int, crc: int = 0) -> int:
        """Fill ``target`` with the bytes at ``at`` and return their CRC-32, continued from ``crc``."""
        self._checked(at, len(target))
        done = 0
        while done < len(target):
            block = target[done : done + _BLOCK_BYTES]
            count = os.preadv(self.fd, [block], self.start + at + done)
            if not count:
                raise CheckpointError(f"{self.where} ended while it was read: is another process changing it?")
            crc = zlib.crc32(block[:count], crc)
            done += count
        return crc

    def _checked(self, at: int, count: int) -> int:
        if at < 0 or count < 0 or at + count > self.size:
            raise CheckpointError(
                f"{self.where} has {self.size:,} bytes, but should have {count:,} at byte {at:,}: it is cut short or damaged"
            )
        return count


class Entry(NamedTuple):
    """A file inside the zip file."""

    name: str
    header: int  # position of its local header
    size: int
    crc: int


def read_directory(window: Window) -> dict[str, Entry]:
    """Return all entries by name.

    Raises:
        CheckpointError: the file is cut short or damaged, or an entry is compressed or encrypted, overlaps another, has
            the name of another, or a name that leads out of the file.
    """
    position, size, count = _find_directory(window)
    data, at, entries = window.read(position, size), 0, list[Entry]()
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise _damaged(window, "its directory ends early")
        entry, length = _central_entry(window, data, at)
        entries.append(entry)
        at += length
    if at != size:
        raise _damaged(window, "its directory has bytes after its last entry")
    _check_places(window, entries, position)
    return {entry.name: entry for entry in entries}


def _damaged(window: Window, problem: str) -> CheckpointError:
    return CheckpointError(f"{window.where} is not a complete torch file: {problem}. It is cut short or damaged: copy it again")


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return position, size in bytes and number of entries of the directory, from the record at the end of the file."""
    at = window.size - _END.size
    if at < 0:
        raise _damaged(window, f"it has {window.size:,} bytes")
    signature, disk, disk2, _, count, size, position, comment = _END.unpack(window.read(at, _END.size))
    if signature != 0x06054B50 or comment:
        raise _damaged(window, "it does not end with the record that a zip file ends with")
    if at >= _LOCATOR64.size:
        mark, disk64, end64, _ = _LOCATOR64.unpack(window.read(at - _LOCATOR64.size, _LOCATOR64.size))
        if mark == 0x07064B50:
            at, disk2 = end64, disk2 or disk64
            mark, _, _, _, disk3, disk4, _, count, size, position = _END64.unpack(window.read(end64, _END64.size))
            disk = disk3 or disk4
            if mark != 0x06064B50:
                raise _damaged(window, "its 64-bit end record is not where it should be")
    if disk not in (0, _MANY) or disk2 not in (0, _MANY):
        raise _damaged(window, "it is a part of a zip file in several files")
    if size > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > size or position + size > at:
        raise _damaged(window, f"its directory of {count:,} entries should be {size:,} bytes at byte {position:,}")
    return position, size, count


def _central_entry(window: Window, data: bytes, at: int) -> tuple[Entry, int]:
    """Return the entry whose record begins at ``at`` in the directory, and the record's length."""
    fields = _CENTRAL.unpack_from(data, at)
    signature, _, _, flags, method, _, _, crc, packed, size, len_name, len_extra, len_comment, _, _, _, header = fields
    end = at + _CENTRAL.size + len_name + len_extra + len_comment
    if signature != 0x02014B50 or end > len(data):
        raise _damaged(window, "its directory has something else where an entry should be")
    name_end = at + _CENTRAL.size + len_name
    name = _entry_name(window, data[at + _CENTRAL.size : name_end])
    size, packed, header = _long_fields(window, data[name_end : name_end + len_extra], [size, packed, header])
    if method or packed != size:
        raise CheckpointError(f"{window.where}: {name} is compressed, which torch never does: refused. Unpack and save it with torch")
    if flags & 1:
        raise CheckpointError(f"{window.where}: {name} is encrypted: refused")
    return Entry(name, header, size, crc), end - at


def _entry_name(window: Window, data: bytes) -> str:
    try:
        name = data.decode("utf-8")
    except UnicodeDecodeError:
        raise _damaged(window, "an entry's name is not UTF-8") from None
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise CheckpointError(f"{window.where}: an entry is named {name[:200]!r}, which leads out of the file: refused")
    return name


def _long_fields(window: Window, extra: bytes, fields: list[int]) -> list[int]:
    """Return size, packed size and position, taking those that do not fit in 32 bits from the extra field."""
    missing = [index for index, value in enumerate(fields) if value == _LARGE]
    at = 0
    while missing and at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1 and length >= 8 * len(missing) and at + 4 + length <= len(extra):
            for slot, index in enumerate(missing):
                fields[index] = struct.unpack_from("<Q", extra, at + 4 + 8 * slot)[0]
            return fields
        at += 4 + length
    if missing:
        raise _damaged(window, "an entry does not say how large it is")
    return fields


def _check_places(window: Window, entries: list[Entry], end: int) -> None:
    names = {entry.name for entry in entries}
    if len(names) != len(entries):
        raise CheckpointError(f"{window.where} has two entries of one name: refused")
    ordered = sorted(entries, key=lambda e: e.header)
    for entry, limit in zip(ordered, [*(e.header for e in ordered[1:]), end], strict=True):
        if entry.header + _LOCAL.size + len(entry.name.encode("utf-8")) + entry.size > limit:
            raise _damaged(window, f"{entry.name[:200]!r} of {entry.size:,} bytes at byte {entry.header:,} overlaps what comes after it")


def data_start(window: Window, entry: Entry) -> int:
    """Return the position of an entry's contents; the local header before them must belong to this entry."""
    fields = _LOCAL.unpack(window.read(entry.header, _LOCAL.size))
    name = window.read(entry.header + _LOCAL.size, fields[9])
    start = entry.header + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != 0x04034B50 or name != entry.name.encode("utf-8") or fields[3] or start + entry.size > window.size:
        raise _damaged(window, f"{entry.name[:200]!r} is not where the directory says")
    return start


def check_crc(window: Window, entry: Entry, crc: int) -> None:
    """Check the CRC-32 of an entry; a recorded 0 is accepted, as torch records it after ``set_crc32_options(False)``."""
    if entry.crc not in (0, crc):
        raise CheckpointError(
            f"{window.where}: {entry.name} is damaged: its checksum is {crc:08x}, the file says {entry.crc:08x}. Copy it again"
        )


def read_entry(window: Window, entry: Entry, max_bytes: int) -> bytes:
    """Read all of a small entry and verify its checksum."""
    if entry.size > max_bytes:
        raise CheckpointError(f"{window.where}: {entry.name} has {entry.size:,} bytes: more than the {max_bytes:,} that it can have")
    data = window.read(data_start(window, entry), entry.size)
    check_crc(window, entry, zlib.crc32(data))
    return data


class ZipWriter:
    """Sequential writer of a zip file.

    Args:
        write: called with the bytes in order; must accept all of them.
    """

    def __init__(self, write: Callable[[memoryview | bytes], object]) -> None:
        self._write = write
        self.position = 0
        self._central: list[bytes] = []

    def add(self, name: str, data: memoryview | bytes) -> None:
        """Add one uncompressed entry, with its contents at a multiple of ALIGNMENT."""
        self._entry(name, len(data), zlib.crc32(data), [data])

    def add_parts(self, name: str, size: int, parts: Callable[[], Iterable[memoryview]]) -> None:
        """Add an entry that is too large for memory: ``parts`` is iterated twice, for the checksum in the header and for writing.

        Raises:
            ValueError: the parts do not add up to ``size`` bytes.
        """
        crc = found = 0
        for part in parts():
            crc, found = zlib.crc32(part, crc), found + len(part)
        if found != size:
            raise ValueError(f"{name}: announced {size:,} bytes, made {found:,}")
        self._entry(name, size, crc, parts())

    def _entry(self, name: str, size: int, crc: int, parts: Iterable[memoryview | bytes]) -> None:
        encoded, header = name.encode("utf-8"), self.position
        long = _narrow(size) != size
        extra = struct.pack("<HHQQ", 1, 16, size, size) if long else b""
        extra += _padding(header + _LOCAL.size + len(encoded) + len(extra))
        short = _narrow(size)
        flags = 0x800  # names are UTF-8
        version = 45 if long else 20
        self._out(_LOCAL.pack(0x04034B50, version, flags, 0, 0, _DATE, crc, short, short, len(encoded), len(extra)) + encoded + extra)
        for part in parts:
            for start in range(0, len(part), _BLOCK_BYTES):
                self._out(part[start : start + _BLOCK_BYTES])
        wide = [value for value in (size, size, header) if _narrow(value) != value]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        fields = (0x02014B50, 45, 45 if wide else 20, flags, 0, 0, _DATE, crc, short, short, len(encoded), len(extra), 0, 0, 0, 0)
        self._central.append(_CENTRAL.pack(*fields, _narrow(header)) + encoded + extra)

    def finish(self) -> None:
        """Write the directory after the entries."""
        start, count = self.position, len(self._central)
        self._out(b"".join(self._central))
        end = self.position
        few = count if count < _narrow_limits[1] else _MANY
        if few != count or _narrow(end) != end:
            self._out(_END64.pack(0x06064B50, _END64.size - 12, 45, 45, 0, 0, count, count, end - start, start))
            self._out(_LOCATOR64.pack(0x07064B50, 0, end, 1))
        self._out(_END.pack(0x06054B50, 0, 0, few, few, _narrow(end - start), _narrow(start), 0))

    def _out(self, data: memoryview | bytes) -> None:
        self._write(data)
        self.position += len(data)


def _narrow(value: int) -> int:
    return value if value < _narrow_limits[0] else _LARGE


def _padding(at: int) -> bytes:
    """Return an extra field for position ``at`` that aligns the byte after it to a multiple of ALIGNMENT."""
    length = (-(at + 4)) % ALIGNMENT
    return b"FB" + struct.pack("<H", length) + b"Z" * length
