"""Reader of Megatron data sets: an ``.idx`` with the position of each sequence and a ``.bin`` with nothing but tokens.

The whole index is checked when the data set is opened (``idx_format``), and the ``.bin`` must have exactly the size
that follows from it. Tokens are read with ``pread`` and a length check rather than through a memory map: if the file
shrinks during a job, the result is an error message and exit code 4, not a SIGBUS. Token values are checked as they are
read (``check_tokens``), or all at once (``verify``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.data.idx_format import check_arrays, pread_exact, read_array, read_header, resolve_prefix
from megatron_sp.utils.errors import DataError

__all__ = ["IndexedDataset", "VerifyReport"]

_SCAN_BYTES = 1 << 24
_PROBES = 16
_PROBE_BYTES = 4096


class VerifyReport(NamedTuple):
    """Result of a full scan; ``smallest`` and ``largest`` token are None if there are no tokens."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    smallest: int | None
    largest: int | None


class IndexedDataset:
    """The sequences of one ``.bin``/``.idx`` pair, opened for reading.

    Reads are thread-safe: ``pread`` does not use a shared file position.

    Args:
        prefix: the files' common path; the name of either file is accepted.
    Raises:
        DataError: a file is missing or damaged; the message gives the file, the byte offset, and the expected and
            actual contents.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = resolve_prefix(prefix)
        self.idx_path, self.bin_path = self.prefix + ".idx", self.prefix + ".bin"
        fd = _open(self.idx_path)
        try:
            self._header = read_header(fd, self.idx_path)
            header = self._header
            self._lengths = read_array(fd, header.lengths_at, header.num_sequences, np.dtype("<i4"), self.idx_path)
            self._pointers = read_array(fd, header.pointers_at, header.num_sequences, np.dtype("<i8"), self.idx_path)
            self._documents = read_array(
                fd, header.documents_at, header.num_document_entries, np.dtype("<i8"), self.idx_path
            )
        finally:
            os.close(fd)
        expected = check_arrays(self.idx_path, header, self._lengths, self._pointers, self._documents)
        for array in (self._lengths, self._pointers, self._documents):
            array.flags.writeable = False
        self.dtype = header.dtype
        self.num_tokens = expected // self.dtype.itemsize
        self._digest: str | None = None
        self._fd = _open(self.bin_path)
        found = os.fstat(self._fd).st_size
        if found != expected:
            self.close()
            raise DataError(
                f"{self.bin_path}: byte offset {min(found, expected)}: expected a file of {expected} bytes, found {found}: "
                f"{self.idx_path} lists {self.num_tokens} tokens of {self.dtype.itemsize} bytes. The pair does not belong together"
                " or the .bin was cut off while copying"
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._header.num_sequences

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the ``.bin``; reading afterwards is an error."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [N], tokens per sequence."""
        return self._lengths

    @property
    def document_index(self) -> np.ndarray:
        """int64 [D]: document d is the sequences from entry d to entry d+1."""
        return self._documents

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens of sequence ``i`` from ``offset`` on (default: to the end).

        Returns:
            A read-only array in the dtype of the file.
        Raises:
            IndexError: no such sequence. ValueError: the range exceeds the sequence.
            DataError: the file no longer has these bytes.
        """
        total = int(self._lengths[i])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise ValueError(f"{self.prefix}: sequence {i} has {total} tokens, asked for {length} from {offset}")
        start = int(self._pointers[i]) + offset * self.dtype.itemsize
        return np.frombuffer(pread_exact(self._fd, start, length * self.dtype.itemsize, self.bin_path), self.dtype)

    def get_range(self, first: int, last: int) -> np.ndarray:
        """Return the concatenated tokens of sequences ``first`` to ``last - 1``, in one read; otherwise like ``get``."""
        if not 0 <= first < last <= len(self):
            raise IndexError(f"{self.prefix}: sequences {first} to {last - 1} of {len(self)}")
        start = int(self._pointers[first])
        end = int(self._pointers[last - 1]) + int(self._lengths[last - 1]) * self.dtype.itemsize
        return np.frombuffer(pread_exact(self._fd, start, end - start, self.bin_path), self.dtype)

    def check_tokens(self, tokens: np.ndarray, i: int, offset: int, vocab_size: int) -> None:
        """Raise a DataError if any of ``tokens``, read from sequence ``i`` at ``offset``, is outside the vocabulary."""
        if tokens.size == 0 or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
            return
        first = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        at = int(self._pointers[i]) + (offset + first) * self.dtype.itemsize
        raise DataError(
            f"{self.bin_path}: byte offset {at}: sequence {i}, token {offset + first} is {int(tokens[first])}: expected 0 to"
            f" {vocab_size - 1}, the vocabulary has {vocab_size} entries. The data were made with another tokenizer, or are damaged"
        )

    def verify(self, vocab_size: int | None = None, hasher: hashlib._Hash | None = None) -> VerifyReport:
        """Read and check every token once, in pieces.

        Args:
            vocab_size: ids not below this are errors; None: only negative ids are.
            hasher: updated with the whole ``.bin`` in a separate thread, while the next piece is read.
        Raises:
            DataError: the first bad token, or the place where the file ends too early.
        """
        limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
        with ThreadPoolExecutor(1) as pool:
            return self._verify(limit, (lambda raw: None) if hasher is None else _in_turn(pool, hasher.update))

    def _verify(self, limit: int, look: Callable[[bytes | bytearray], None]) -> VerifyReport:
        step = _SCAN_BYTES // self.dtype.itemsize
        smallest: int | None = None
        largest: int | None = None
        for start in range(0, self.num_tokens, step):
            count = min(step, self.num_tokens - start)
            raw = pread_exact(self._fd, start * self.dtype.itemsize, count * self.dtype.itemsize, self.bin_path)
            look(raw)
            tokens = np.frombuffer(raw, self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= limit:
                self._report_bad_token(tokens, start, limit)
            smallest = low if smallest is None else min(smallest, low)
            largest = high if largest is None else max(largest, high)
        return VerifyReport(self._documents.size - 1, len(self), self.num_tokens, smallest, largest)

    def _report_bad_token(self, tokens: np.ndarray, start: int, limit: int) -> None:
        position = start + int(np.argmax((tokens >= limit) | (tokens < 0)))
        at = position * self.dtype.itemsize
        i = (
            int(np.searchsorted(self._pointers, at, side="right")) - 1
        )  # the last of several that start here: the others are empty
        offset = position - int(self._pointers[i]) // self.dtype.itemsize
        self.check_tokens(tokens[position - start : position - start + 1], i, offset, limit)

    def digest(self) -> str:
        """Return a hash that identifies the data: dtype, lengths, document bounds, and a few probes of the tokens.

        Cheap on purpose (the ``.bin`` is not fully read): it distinguishes data sets, but does not prove integrity.
        """
        if self._digest is None:
            hasher = hashlib.sha256(f"{self.dtype.str} {len(self)} {self.num_tokens}".encode())
            hasher.update(self._lengths.data)
            hasher.update(self._documents.data)
            size = self.num_tokens * self.dtype.itemsize
            for k in range(_PROBES):
                start = max(size - _PROBE_BYTES, 0) * k // (_PROBES - 1)
                hasher.update(pread_exact(self._fd, start, min(_PROBE_BYTES, size), self.bin_path))
            self._digest = hasher.hexdigest()
        return self._digest


def _in_turn(
    pool: ThreadPoolExecutor, work: Callable[[bytes | bytearray], object]
) -> Callable[[bytes | bytearray], None]:
    # a function that runs ``work`` on one item at a time in the pool's thread; at most two items are in memory
    under_way: list[Future[object]] = []

    def start(raw: bytes | bytearray) -> None:
        while under_way:
            under_way.pop().result()
        under_way.append(pool.submit(work, raw))

    return start


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error
