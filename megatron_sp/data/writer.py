"""Crash-safe writer of Megatron data sets: an incomplete one can never be mistaken for a complete one.

Both files, and their digests (``digest_file``), are written under temporary names in the same folder; ``close`` flushes
them to disk and renames the ``.bin``, then the ``.idx``, then the digests. The digests and ``.idx`` of an older pair of
the same name are removed before its ``.bin`` is replaced, so there are never files that do not belong together. An
exception or a kill inside the ``with`` block leaves the old pair unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megatron_sp.data import digest_file
from megatron_sp.data.idx_format import DTYPE_CODES, HEADER, MAGIC, VERSION, pread_exact, token_dtype
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.utils.errors import DataError, DiskError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.output_file import file_place

_COPY_BYTES = 1 << 24
_MAX_LENGTH = 2**31 - 1


def make_folder(prefix: str | Path) -> None:
    """Create the folder of a new data set, with its parents. Raises DiskError."""
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{folder}: cannot be made: {error.strerror}") from error


class IndexedDatasetWriter:
    """Writer of one ``.bin``/``.idx`` pair, a context manager; the files appear when the block ends without an error.

    Args:
        prefix: common path of the two files; its folder must exist.
        vocab_size: ids must be below this; also determines the dtype (uint16 if below 65500, else int32).
        dtype: write this dtype instead; without ``vocab_size``, ids are limited by its range.
    Raises:
        DiskError: the files cannot be written.
        ValueError: neither ``vocab_size`` nor ``dtype`` is given, or the dtype is not a supported integer type.
    """

    def __init__(
        self, prefix: str | Path, *, vocab_size: int | None = None, dtype: np.dtype | type | None = None
    ) -> None:
        if dtype is None and vocab_size is None:
            raise ValueError("IndexedDatasetWriter needs vocab_size or dtype")
        self.dtype = np.dtype(dtype).newbyteorder("<") if dtype is not None else token_dtype(vocab_size or 0)
        if self.dtype not in DTYPE_CODES or self.dtype.kind == "f":
            raise ValueError(f"tokens cannot be {self.dtype}: use uint8, int8, int16, uint16, int32 or int64")
        top = int(np.iinfo(self.dtype).max) + 1
        self._limit = top if vocab_size is None else min(vocab_size, top)
        self.prefix = os.fspath(prefix)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._hasher = hashlib.sha256()
        try:
            self._final = {
                suffix: os.fspath(file_place(f"{self.prefix}{suffix}"))
                for suffix in (".bin", ".idx", digest_file.SUFFIX)
            }
            self._temporary = {suffix: f"{path}.part-{os.getpid()}" for suffix, path in self._final.items()}
            self._bin: IO[bytes] = open(self._temporary[".bin"], "wb", buffering=1 << 20)  # noqa: SIM115 - closed by close() or abort()
        except OSError as error:
            raise DiskError(f"{self.prefix}.bin: cannot be written: {error.strerror}") from error

    def add_document(self, tokens: np.ndarray | list[int], sequence_lengths: list[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: [t], ids of all its sequences.
            sequence_lengths: length of each sequence (default: one sequence; none if there are no tokens).
        Raises:
            DataError: an id is outside the vocabulary. ValueError: the lengths do not add up to the tokens.
        """
        ids = np.asarray(tokens, np.int64) if isinstance(tokens, list) else tokens
        lengths = ([ids.size] if ids.size else []) if sequence_lengths is None else sequence_lengths
        if sum(lengths) != ids.size or min(lengths, default=0) < 0:
            raise ValueError(f"sequence lengths {lengths} do not add up to {ids.size} tokens")
        self._write(ids)
        self._extend(np.asarray(lengths, np.int64))
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: np.ndarray, sequence_lengths: np.ndarray, num_sequences: np.ndarray) -> None:
        """Append many documents.

        Args:
            tokens: [t], ids of all sequences, in order. sequence_lengths: [n], summing to t. num_sequences: [d],
                sequences per document, summing to n; a document with 0 is empty.
        """
        if int(sequence_lengths.sum()) != tokens.size or int(num_sequences.sum()) != sequence_lengths.size:
            raise ValueError(
                f"sequence lengths add up to {int(sequence_lengths.sum())}, there are {tokens.size} tokens; documents have"
                f" {int(num_sequences.sum())} sequences, there are {sequence_lengths.size}"
            )
        self._write(tokens)
        ends = len(self._lengths) + np.cumsum(num_sequences)
        self._extend(sequence_lengths)
        self._documents.frombytes(ends.astype(np.int64).tobytes())

    def merge(self, other: str | Path | IndexedDataset, documents: range | None = None) -> None:
        """Append the documents of a data set: tokens, lengths and document bounds.

        Args:
            documents: consecutive documents to append (default: all).
        Raises:
            DataError: the data set is damaged, or of another dtype.
        """
        source = other if isinstance(other, IndexedDataset) else IndexedDataset(other)
        if source.dtype != self.dtype:
            names = f"{source.prefix} has {source.dtype.name} tokens, {self.prefix} has {self.dtype.name}"
            raise DataError(f"{names}: only data sets of one dtype can be merged; make both with the same tokenizer")
        chosen = range(len(source.document_index) - 1) if documents is None else documents
        bounds = source.document_index[chosen.start : chosen.stop + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        begin, end = (int(source.sequence_lengths[:i].sum(dtype=np.int64)) for i in (first, last))
        per_read = _COPY_BYTES // self.dtype.itemsize
        for start in range(begin, end, per_read):
            count = min(per_read, end - start)
            raw = pread_exact(source._fd, start * self.dtype.itemsize, count * self.dtype.itemsize, source.bin_path)
            self._write(np.frombuffer(raw, self.dtype))
        self._documents.frombytes((bounds[1:] - first + len(self._lengths)).tobytes())
        self._lengths.frombytes(source.sequence_lengths[first:last].tobytes())

    def close(self) -> None:
        """Flush the files and move them into place.

        Raises:
            DiskError: no space or no permission; no temporary file remains.
        """
        try:
            _sync_and_close(self._bin)
            hasher = hashlib.sha256()
            with open(self._temporary[".idx"], "wb") as idx:
                for part in self._index():
                    idx.write(part)
                    hasher.update(part)
                _sync_and_close(idx)
            with open(self._temporary[digest_file.SUFFIX], "wb") as file:
                digests = {".bin": self._hasher.hexdigest(), ".idx": hasher.hexdigest()}
                file.write(digest_file.text_of(self.prefix, digests).encode())
                _sync_and_close(file)
            for suffix in (digest_file.SUFFIX, ".idx"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._final[suffix])
            for suffix, temporary in self._temporary.items():
                os.replace(temporary, self._final[suffix])
                fsync_dir(os.path.dirname(self._final[suffix]) or ".")
        except OSError as error:
            self.abort()
            raise DiskError(f"{self.prefix}.bin/.idx: cannot be written: {error.strerror}") from error

    def _index(self) -> Iterator[bytes | memoryview]:
        # yield the parts of the ``.idx``
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        yield HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], len(lengths), len(self._documents))
        yield lengths.astype("<i4", copy=False).data
        yield (ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8", copy=False).data
        yield np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).data

    def abort(self) -> None:
        # remove the temporary files; an older pair of this name stays
        with contextlib.suppress(OSError):
            self._bin.close()
        for path in self._temporary.values():
            with contextlib.suppress(OSError):
                os.unlink(path)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _write(self, ids: np.ndarray) -> None:
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limit):
            bad = int(ids[np.argmax((ids < 0) | (ids >= self._limit))])
            raise DataError(
                f"{self.prefix}: token id {bad}: expected 0 to {self._limit - 1} (vocabulary, and dtype {self.dtype.name})"
            )
        try:
            contents = np.ascontiguousarray(ids, dtype=self.dtype).data
            self._bin.write(contents)
            self._hasher.update(contents)
        except OSError as error:
            raise DiskError(f"{self.prefix}.bin: cannot be written: {error.strerror}") from error

    def _extend(self, lengths: np.ndarray) -> None:
        if lengths.size and int(lengths.max()) > _MAX_LENGTH:
            raise DataError(
                f"{self.prefix}: a sequence of {int(lengths.max())} tokens: the format allows {_MAX_LENGTH}"
            )
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
