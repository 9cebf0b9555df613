"""Megatron data sets: a ``.bin`` with nothing but tokens, and an ``.idx`` with the position of each sequence in it."""

from __future__ import annotations

import difflib
import hashlib
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.utils.errors import ConfigError, DataError

# Layout of an .idx, little endian: 9 bytes of magic, uint64 version = 1, uint8 dtype code, uint64 N sequences, uint64 D
# entries of the document index; then int32 lengths [N] in tokens, int64 byte offsets [N] into the .bin, int64 document
# index [D]: the sequence at which each document starts, first 0, last N. The .bin has one sequence after another, so
# the offsets are the running sum of length * itemsize. Source: Megatron-LM's core/datasets/indexed_dataset.py.
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in enumerate(_DTYPES, start=1)}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

_MAX_COUNT = 1 << 60  # N or D above this is damage, and their products could no longer be trusted to be a file size
_CHUNK_BYTES = 1 << 26
_SCAN_BYTES = 1 << 24
_PROBES, _PROBE_BYTES = 16, 4096


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which tokens of a vocabulary are written."""
    # the bound is Megatron-LM's (DType.optimal_dtype)
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def resolve_prefix(prefix: str | Path) -> str:
    """Return the common prefix of a ``.bin``/``.idx`` pair, given it or the name of either file.

    Raises:
        DataError: one of the two files is missing; the message lists pairs that are in the folder.
    """
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")) and not os.path.exists(text + ".idx"):
        text = text[:-4]
    missing = next((suffix for suffix in (".idx", ".bin") if not os.path.isfile(text + suffix)), None)
    if missing is None:
        return text
    folder, name = os.path.split(text)
    place, folder = folder or "the current folder", folder or os.curdir
    missing_file = f"{text}{missing} does not exist: "
    if not os.path.isdir(folder):
        raise DataError(
            f"{missing_file}there is no folder {place}; give a data path as PREFIX of PREFIX.bin and PREFIX.idx"
        )
    try:
        files = set(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{missing_file}its folder cannot be listed ({error.strerror})") from None
    pairs = sorted(file[:-4] for file in files if file.endswith(".idx") and file[:-4] + ".bin" in files)
    pairs = [pair for pair in pairs if all(os.path.isfile(os.path.join(folder, pair + s)) for s in (".bin", ".idx"))]
    if not pairs:
        raise DataError(
            f"{missing_file}{place} has no complete pair of .bin and .idx; megatron-sp preprocess makes one"
        )
    near = difflib.get_close_matches(name, pairs, n=3, cutoff=0.3) or pairs[:5]
    raise DataError(f"{missing_file}{place} has {', '.join(near)}{' ...' if len(pairs) > len(near) else ''}")


def pread_exact(fd: int, offset: int, num_bytes: int, path: str) -> bytes | bytearray:
    """Read exactly ``num_bytes`` bytes at ``offset``. Raises DataError: it cannot."""
    # Not through a memory map: if the file shrinks during a job, that ends in SIGBUS, this in a message.
    try:
        data = os.pread(fd, num_bytes, offset)
        if len(data) == num_bytes:
            return data
        parts = bytearray(data)  # a short read: the 2 GiB limit of one call, a signal, or the end of the file
        while len(parts) < num_bytes and data:
            data = os.pread(fd, num_bytes - len(parts), offset + len(parts))
            parts += data
    except OSError as error:
        raise _damage(path, offset, f"cannot read {num_bytes} bytes: {error.strerror}") from error
    if len(parts) < num_bytes:
        shorter = "the file has become shorter since it was opened. Restore it from its source and start again"
        raise _damage(path, offset, f"expected {num_bytes} bytes, found {len(parts)}: {shorter}")
    return parts


def _damage(path: str, offset: int, what: str) -> DataError:
    return DataError(f"{path}: byte offset {offset}: {what}")


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error


def _read_header(fd: int, path: str) -> tuple[np.dtype, int, int]:
    # (dtype, N, D), checked against the file's size before anything is allocated from these counts
    size = os.fstat(fd).st_size
    start = os.pread(fd, HEADER.size, 0)
    if start.startswith(b"TNTIDX\x00\x00"):
        old = "this is a TNTIDX file, the 'lazy'/'cached' format of old Megatron and fairseq, which is not read"
        way = "create it again with megatron-sp preprocess, or convert it with the tools that wrote it"
        raise _damage(path, 0, f"{old}: {way}")
    magic = start[: len(MAGIC)]
    if magic != MAGIC:
        raise _damage(path, 0, f"expected the magic {MAGIC!r}, found {magic!r}: not an index of a data set")
    if len(start) < HEADER.size:
        ends = f"the header ends here, expected {HEADER.size} bytes: the file is cut off"
        raise _damage(path, len(start), ends)
    _, version, code, num_sequences, num_entries = HEADER.unpack(start)
    if version != VERSION:
        raise _damage(path, 9, f"expected version {VERSION}, found {version}")
    if code not in DTYPES:
        raise _damage(path, 17, f"expected a dtype code from 1 to 8, found {code}")
    dtype = DTYPES[code]
    if dtype.kind == "f":
        raise _damage(path, 17, f"dtype code {code} is {dtype.name}: tokens must be integers")
    wrong_count = f"cannot be right: the file has {size} bytes"
    if num_sequences > _MAX_COUNT:
        raise _damage(path, 18, f"{num_sequences} sequences {wrong_count}")
    if not 1 <= num_entries <= _MAX_COUNT:
        raise _damage(path, 26, f"a document index of {num_entries} entries {wrong_count}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size != expected:
        why = "the file is cut off or damaged"
        if size == expected + num_sequences:
            why = "one more byte per sequence means images and text, which is not supported"
        counts = f"{num_sequences} sequences and {num_entries} document entries"
        raise _damage(path, min(size, expected), f"expected {expected} bytes for {counts}, found {size}: {why}")
    return dtype, num_sequences, num_entries


def _check_index(path: str, itemsize: int, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray) -> int:
    # check the three arrays against each other, name the first entry that is wrong; return the size of the .bin
    pointers_at = HEADER.size + lengths.nbytes
    documents_at = pointers_at + pointers.nbytes
    if lengths.size and int(lengths.min()) < 0:
        i = int(np.argmax(lengths < 0))
        raise _damage(path, HEADER.size + 4 * i, f"sequence {i} has length {lengths[i]}: expected 0 or more")
    ends = np.cumsum(lengths, dtype=np.int64)
    ends *= itemsize  # in place: a large data set has billions of sequences
    if lengths.size:
        wrong = pointers[1:] != ends[:-1]
        if pointers[0] != 0 or wrong.any():
            i = 0 if pointers[0] != 0 else int(np.argmax(wrong)) + 1
            before = f"expected {int(ends[i - 1]) if i else 0}, the end of the sequence before it"
            raise _damage(path, pointers_at + 8 * i, f"sequence {i} starts at byte {pointers[i]}: {before}")
    if documents[0] != 0:
        raise _damage(path, documents_at, f"the first document starts at sequence {documents[0]}: expected 0")
    if documents[-1] != lengths.size:
        last = f"the document index ends at {documents[-1]}: expected {lengths.size} sequences"
        raise _damage(path, documents_at + 8 * (documents.size - 1), last)
    falls = documents[1:] < documents[:-1]
    if falls.any():
        i = int(np.argmax(falls)) + 1
        least = f"expected at least {documents[i - 1]}, where the document before it starts"
        raise _damage(path, documents_at + 8 * i, f"document {i} starts at sequence {documents[i]}: {least}")
    return int(ends[-1]) if lengths.size else 0


class VerifyReport(NamedTuple):
    """Result of a full scan."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    smallest: int | None  # None if there are no tokens
    largest: int | None


class IndexedDataset:
    """The sequences of one ``.bin``/``.idx`` pair, opened for thread-safe reading.

    ``sequence_lengths`` is int32 [N]; document d is the sequences from entry d of ``document_index`` (int64 [D]) to the
    next. The index is checked when it is opened, token values are not: see ``check_tokens`` and ``verify``.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = resolve_prefix(prefix)
        self.idx_path, self.bin_path = self.prefix + ".idx", self.prefix + ".bin"
        fd = _open(self.idx_path)
        try:
            self.dtype, num_sequences, num_entries = _read_header(fd, self.idx_path)
            arrays, offset = [], HEADER.size
            for count, kind in ((num_sequences, "<i4"), (num_sequences, "<i8"), (num_entries, "<i8")):
                array = np.empty(count, kind)
                raw = array.view(np.uint8)
                for start in range(0, raw.size, _CHUNK_BYTES):  # in pieces: never a second copy of it in memory
                    part = raw[start : start + _CHUNK_BYTES]
                    part[:] = np.frombuffer(pread_exact(fd, offset + start, part.size, self.idx_path), np.uint8)
                arrays.append(array)
                offset += raw.size
        finally:
            os.close(fd)
        self.sequence_lengths, self._pointers, self.document_index = arrays
        expected = _check_index(self.idx_path, self.dtype.itemsize, *arrays)
        for array in arrays:
            array.flags.writeable = False
        self.num_tokens = expected // self.dtype.itemsize
        self._digest: str | None = None
        self._fd = _open(self.bin_path)
        size = os.fstat(self._fd).st_size
        if size != expected:
            self.close()
            listed = f"{self.idx_path} lists {self.num_tokens} tokens of {self.dtype.itemsize} bytes. The pair does not"
            what = (
                f"expected a file of {expected} bytes, found {size}: {listed} belong together or the .bin was cut off"
            )
            raise _damage(self.bin_path, min(size, expected), f"{what} while copying")

    def __len__(self) -> int:
        return self.sequence_lengths.size

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens of sequence ``i`` from ``offset`` on (default: to the end), read-only."""
        total = int(self.sequence_lengths[i])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise ValueError(f"{self.prefix}: sequence {i} has {total} tokens, asked for {length} from {offset}")
        start = int(self._pointers[i]) + offset * self.dtype.itemsize
        return np.frombuffer(pread_exact(self._fd, start, length * self.dtype.itemsize, self.bin_path), self.dtype)

    def get_range(self, first: int, last: int) -> np.ndarray:
        """Return the concatenated tokens of sequences ``first`` to ``last - 1``, read-only."""
        if not 0 <= first < last <= len(self):
            raise IndexError(f"{self.prefix}: sequences {first} to {last - 1} of {len(self)}")
        start = int(self._pointers[first])
        end = int(self._pointers[last - 1]) + int(self.sequence_lengths[last - 1]) * self.dtype.itemsize
        return np.frombuffer(pread_exact(self._fd, start, end - start, self.bin_path), self.dtype)

    def check_tokens(self, tokens: np.ndarray, i: int, offset: int, vocab_size: int) -> None:
        """Raise DataError if one of ``tokens``, read from sequence ``i`` at ``offset``, is outside the vocabulary."""
        if tokens.size == 0 or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
            return
        first = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        what = f"sequence {i}, token {offset + first} is {int(tokens[first])}: expected 0 to {vocab_size - 1}, the"
        raise _damage(
            self.bin_path, int(self._pointers[i]) + (offset + first) * self.dtype.itemsize,
            f"{what} vocabulary has {vocab_size} entries. The data were made with another tokenizer, or are damaged",
        )  # fmt: skip

    def verify(self, vocab_size: int | None = None, hasher: hashlib._Hash | None = None) -> VerifyReport:
        """Check every token, and update ``hasher`` with the whole ``.bin``.

        Raises:
            DataError: the first bad token, or the place where the file ends too early.
        """
        limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
        itemsize = self.dtype.itemsize
        step = _SCAN_BYTES // itemsize
        ids: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            hashed: Future[None] | None = None
            for start in range(0, self.num_tokens, step):
                count = min(step, self.num_tokens - start)
                raw = pread_exact(self._fd, start * itemsize, count * itemsize, self.bin_path)
                if hasher is not None:  # in a thread, under the next read; no more than two pieces are in memory
                    if hashed is not None:
                        hashed.result()
                    hashed = pool.submit(hasher.update, raw)
                tokens = np.frombuffer(raw, self.dtype)
                low, high = int(tokens.min()), int(tokens.max())
                if low < 0 or high >= limit:
                    position = start + int(np.argmax((tokens >= limit) | (tokens < 0)))
                    # the last of several sequences that start here: the others are empty
                    i = int(np.searchsorted(self._pointers, position * itemsize, side="right")) - 1
                    offset = position - int(self._pointers[i]) // itemsize
                    self.check_tokens(tokens[position - start : position - start + 1], i, offset, limit)
                ids = [min(low, *ids), max(high, *ids)] if ids else [low, high]
        smallest, largest = ids or (None, None)
        return VerifyReport(self.document_index.size - 1, len(self), self.num_tokens, smallest, largest)

    def digest(self) -> str:
        """Return a hash that tells data sets apart; cheap, so it proves no integrity."""
        if self._digest is None:
            hasher = hashlib.sha256(f"{self.dtype.str} {len(self)} {self.num_tokens}".encode())
            hasher.update(self.sequence_lengths.data)
            hasher.update(self.document_index.data)
            size = self.num_tokens * self.dtype.itemsize
            for k in range(_PROBES):
                start = max(size - _PROBE_BYTES, 0) * k // (_PROBES - 1)
                hasher.update(pread_exact(self._fd, start, min(_PROBE_BYTES, size), self.bin_path))
            self._digest = hasher.hexdigest()
        return self._digest


def summary(dataset: IndexedDataset) -> str:
    """Return a one-line summary of a data set."""
    documents = len(dataset.document_index) - 1
    return f"{dataset.prefix}: {documents:,} documents, {len(dataset):,} sequences, {dataset.num_tokens:,} tokens"


def document_tokens(dataset: IndexedDataset, number: int) -> list[list[int]]:
    """Return the tokens of each sequence of a document. Raises ConfigError: there is no such document."""
    count = len(dataset.document_index) - 1
    if not count:
        raise ConfigError(f"{dataset.prefix} is empty")
    if not 0 <= number < count:
        raise ConfigError(f"--document {number}: {dataset.prefix} has documents 0 to {count - 1}")
    first, last = dataset.document_index[number : number + 2].tolist()
    return [dataset.get(i).tolist() for i in range(first, last)]
