"""Format of ``.idx`` files, and every check that can be made on one before it is used.

Layout (little endian): 9 bytes of magic, uint64 version = 1, uint8 dtype code, uint64 N sequences, uint64 D entries of
the document index, then int32 lengths [N] in tokens, int64 byte offsets [N] into the ``.bin``, int64 document index [D]
(the sequence at which each document starts; first 0, last N). The ``.bin`` holds only the tokens, one sequence after
another, so the offsets must be the running sum of length * itemsize and the file must end where the last sequence does.
Source: the format of Megatron-LM's core/datasets/indexed_dataset.py. Multimodal files (one mode byte per sequence at
the end) and the older TNTIDX files are recognised and rejected.
"""

from __future__ import annotations

import difflib
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.utils.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
MAX_COUNT = 1 << 60  # N or D above this is damage, and their products could no longer be trusted to be a file size

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 26


class Header(NamedTuple):
    """The fixed part of an ``.idx`` file."""

    dtype: np.dtype
    num_sequences: int
    num_document_entries: int

    @property
    def lengths_at(self) -> int:
        """Offset of the sequence lengths in the file."""
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        """Offset of the sequence pointers in the file."""
        return self.lengths_at + 4 * self.num_sequences

    @property
    def documents_at(self) -> int:
        """Offset of the document index in the file."""
        return self.pointers_at + 8 * self.num_sequences

    @property
    def file_size(self) -> int:
        """Size that the file must have."""
        return self.documents_at + 8 * self.num_document_entries


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which tokens of a vocabulary are written: uint16 where Megatron-LM would read it as such, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def resolve_prefix(prefix: str | Path) -> str:
    """Return the common prefix of a ``.bin``/``.idx`` pair; the name of either file is accepted.

    Raises:
        DataError: one of the two files is missing; the message lists pairs that are in the folder.
    """
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")) and not os.path.exists(text + ".idx"):
        text = text[:-4]
    for suffix in (".idx", ".bin"):
        if not os.path.isfile(text + suffix):
            raise DataError(f"{text}{suffix} does not exist: {_neighbours(text)}")
    return text


def _neighbours(prefix: str) -> str:
    folder, name = os.path.split(prefix)
    place, folder = folder or "the current folder", folder or os.curdir
    if not os.path.isdir(folder):
        return f"there is no folder {place}; give a data path as PREFIX of PREFIX.bin and PREFIX.idx"
    try:
        entries = {entry[:-4] for entry in os.listdir(folder) if entry.endswith((".bin", ".idx"))}
    except OSError as error:
        return f"its folder cannot be listed ({error.strerror})"
    whole = sorted(e for e in entries if all(os.path.isfile(os.path.join(folder, e + s)) for s in (".bin", ".idx")))
    if not whole:
        return f"{place} has no complete pair of .bin and .idx; megatron-sp preprocess makes one"
    near = difflib.get_close_matches(name, whole, n=3, cutoff=0.3) or whole[:5]
    return f"{place} has {', '.join(near)}{' ...' if len(whole) > len(near) else ''}"


def pread_exact(fd: int, offset: int, num_bytes: int, path: str) -> bytes | bytearray:
    """Read exactly ``num_bytes`` bytes at ``offset``.

    Raises:
        DataError: the file ends too early (SIGBUS with a memory map), or cannot be read.
    """
    try:
        data = os.pread(fd, num_bytes, offset)
        if len(data) == num_bytes:
            return data
        parts = bytearray(data)  # a short read: the 2 GiB limit of one call, a signal, or the end of the file
        while len(parts) < num_bytes and data:
            data = os.pread(fd, num_bytes - len(parts), offset + len(parts))
            parts += data
    except OSError as error:
        raise DataError(f"{path}: byte offset {offset}: cannot read {num_bytes} bytes: {error.strerror}") from error
    if len(parts) < num_bytes:
        raise DataError(
            f"{path}: byte offset {offset}: expected {num_bytes} bytes, found {len(parts)}: the file has become shorter since it was"
            " opened. Restore it from its source and start again"
        )
    return parts


def read_array(fd: int, offset: int, count: int, dtype: np.dtype, path: str) -> np.ndarray:
    """Read an array from a file in pieces, so that there is never a second copy of it in memory."""
    array = np.empty(count, dtype)
    raw = array.view(np.uint8)
    for start in range(0, raw.size, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, raw.size - start)
        raw[start : start + size] = np.frombuffer(pread_exact(fd, offset + start, size, path), np.uint8)
    return array


def read_header(fd: int, path: str) -> Header:
    """Read the header and check it against the file size, before anything is allocated from its counts.

    Raises:
        DataError: not a supported ``.idx`` file, a dtype that is not an integer type, or counts that do not match the
            file size.
    """
    size = os.fstat(fd).st_size
    start = os.pread(fd, HEADER.size, 0)
    if start.startswith(OLD_MAGIC):
        raise DataError(
            f"{path}: byte offset 0: this is a TNTIDX file, the 'lazy'/'cached' format of old Megatron and fairseq, which is not read:"
            " create it again with megatron-sp preprocess, or convert it with the tools that wrote it"
        )
    if start[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path}: byte offset 0: expected the magic {MAGIC!r}, found {start[: len(MAGIC)]!r}: not an index of a data set"
        )
    if len(start) < HEADER.size:
        raise DataError(
            f"{path}: byte offset {len(start)}: the header ends here, expected {HEADER.size} bytes: the file is cut off"
        )
    _, version, code, num_sequences, num_entries = HEADER.unpack(start)
    if version != VERSION:
        raise DataError(f"{path}: byte offset 9: expected version {VERSION}, found {version}")
    if code not in DTYPES:
        raise DataError(f"{path}: byte offset 17: expected a dtype code from 1 to 8, found {code}")
    if DTYPES[code].kind == "f":
        raise DataError(f"{path}: byte offset 17: dtype code {code} is {DTYPES[code].name}: tokens must be integers")
    if num_sequences > MAX_COUNT:
        raise DataError(f"{path}: byte offset 18: {num_sequences} sequences cannot be right: the file has {size} bytes")
    if num_entries > MAX_COUNT or num_entries < 1:
        raise DataError(
            f"{path}: byte offset 26: a document index of {num_entries} entries cannot be right: the file has {size} bytes"
        )
    header = Header(DTYPES[code], num_sequences, num_entries)
    if size != header.file_size:
        modes = size == header.file_size + num_sequences
        raise DataError(
            f"{path}: byte offset {min(size, header.file_size)}: expected {header.file_size} bytes for {num_sequences} sequences and"
            f" {num_entries} document entries, found {size}: "
            + (
                "one more byte per sequence means images and text, which is not supported"
                if modes
                else "the file is cut off or damaged"
            )
        )
    return header


def check_arrays(path: str, header: Header, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray) -> int:
    """Check the three arrays against each other.

    Args:
        lengths: int32 [N]. pointers: int64 [N]. documents: int64 [D].
    Returns:
        The size that the ``.bin`` must have, in bytes.
    Raises:
        DataError: the first entry that is wrong, with its byte offset.
    """
    if lengths.size and int(lengths.min()) < 0:
        i = int(np.argmax(lengths < 0))
        raise DataError(
            f"{path}: byte offset {header.lengths_at + 4 * i}: sequence {i} has length {lengths[i]}: expected 0 or more"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    ends *= header.dtype.itemsize
    if lengths.size:
        wrong = pointers[1:] != ends[:-1]
        if pointers[0] != 0 or wrong.any():
            i = 0 if pointers[0] != 0 else int(np.argmax(wrong)) + 1
            expected = int(ends[i - 1]) if i else 0
            raise DataError(
                f"{path}: byte offset {header.pointers_at + 8 * i}: sequence {i} starts at byte {pointers[i]}: expected {expected},"
                " the end of the sequence before it"
            )
    _check_documents(path, header, documents)
    return int(ends[-1]) if lengths.size else 0


def _check_documents(path: str, header: Header, documents: np.ndarray) -> None:
    if documents[0] != 0:
        raise DataError(
            f"{path}: byte offset {header.documents_at}: the first document starts at sequence {documents[0]}: expected 0"
        )
    if documents[-1] != header.num_sequences:
        at = header.documents_at + 8 * (documents.size - 1)
        raise DataError(
            f"{path}: byte offset {at}: the document index ends at {documents[-1]}: expected {header.num_sequences} sequences"
        )
    falls = documents[1:] < documents[:-1]
    if falls.any():
        i = int(np.argmax(falls)) + 1
        raise DataError(
            f"{path}: byte offset {header.documents_at + 8 * i}: document {i} starts at sequence {documents[i]}: expected at least"
            f" {documents[i - 1]}, where the document before it starts"
        )
