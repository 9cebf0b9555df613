"""Crash-safe writing of Megatron data sets, their merging and splitting."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megatron_sp.data import digest_file
from megatron_sp.data.indexed_dataset import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    pread_exact,
    resolve_prefix,
    token_dtype,
)  # fmt: skip
from megatron_sp.utils.errors import ConfigError, DataError, DiskError
from megatron_sp.utils.files import file_place, fsync_dir

_COPY_BYTES = 1 << 24
_MAX_LENGTH = 2**31 - 1
_PART = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})")


def make_folder(prefix: str | Path) -> None:
    """Create a data set's folder."""
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{folder}: cannot be made: {error.strerror}") from error


class IndexedDatasetWriter:
    """Writer of one pair of files, a context manager; they appear when the block ends without an error.

    Args:
        prefix: common path of the files; its folder must exist.
        vocab_size: ids must be below this, or below what ``dtype`` holds (default: ``token_dtype``).
    """

    # An incomplete data set can never be mistaken for a complete one: both files and their digests are written under
    # temporary names in the same folder, flushed to the disk, and renamed, the .bin first. An exception or a kill
    # within the block leaves an older pair of this name unchanged.

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
        self._lengths, self._documents = array("i"), array("q", [0])
        self._hasher = hashlib.sha256()
        try:
            suffixes = (".bin", ".idx", digest_file.SUFFIX)
            self._final = {suffix: os.fspath(file_place(f"{self.prefix}{suffix}")) for suffix in suffixes}
            self._temporary = {suffix: f"{path}.part-{os.getpid()}" for suffix, path in self._final.items()}
            self._bin: IO[bytes] = open(self._temporary[".bin"], "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DiskError(f"{self.prefix}.bin: cannot be written: {error.strerror}") from error

    def add_document(self, tokens: np.ndarray | list[int], sequence_lengths: list[int] | None = None) -> None:
        """Append one document; ``tokens`` [t] are those of all its sequences (default: one, or none without tokens).

        Raises:
            DataError: an id is outside the vocabulary. ValueError: the lengths do not add up to the tokens.
        """
        ids = np.asarray(tokens, np.int64) if isinstance(tokens, list) else tokens
        lengths = ([ids.size] if ids.size else []) if sequence_lengths is None else sequence_lengths
        if sum(lengths) != ids.size or min(lengths, default=0) < 0:
            raise ValueError(f"sequence lengths {lengths} do not add up to {ids.size} tokens")
        self.add_documents(ids, np.asarray(lengths, np.int64), np.array([len(lengths)], np.int64))

    def add_documents(self, tokens: np.ndarray, sequence_lengths: np.ndarray, num_sequences: np.ndarray) -> None:
        """Append documents: ``tokens`` [t] of sequences of these lengths [n], ``num_sequences`` [d] of them in each."""
        summed, counted = int(sequence_lengths.sum()), int(num_sequences.sum())
        if summed != tokens.size or counted != sequence_lengths.size:
            raise ValueError(
                f"sequence lengths add up to {summed}, there are {tokens.size} tokens; documents have {counted}"
                f" sequences, there are {sequence_lengths.size}"
            )
        self._write(tokens)
        if sequence_lengths.size and int(sequence_lengths.max()) > _MAX_LENGTH:
            longest = f"a sequence of {int(sequence_lengths.max())} tokens"
            raise DataError(f"{self.prefix}: {longest}: the format allows {_MAX_LENGTH}")
        ends = len(self._lengths) + np.cumsum(num_sequences)
        self._lengths.frombytes(sequence_lengths.astype(np.int32).tobytes())
        self._documents.frombytes(ends.astype(np.int64).tobytes())

    def merge(self, other: str | Path | IndexedDataset, documents: range | None = None) -> None:
        """Append consecutive ``documents`` (default: all) of a data set. Raises DataError: it has another dtype."""
        source = other if isinstance(other, IndexedDataset) else IndexedDataset(other)
        if source.dtype != self.dtype:
            names = f"{source.prefix} has {source.dtype.name} tokens, {self.prefix} has {self.dtype.name}"
            raise DataError(f"{names}: only data sets of one dtype can be merged; make both with the same tokenizer")
        chosen = range(len(source.document_index) - 1) if documents is None else documents
        bounds = source.document_index[chosen.start : chosen.stop + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        begin, end = (int(source.sequence_lengths[:i].sum(dtype=np.int64)) for i in (first, last))
        itemsize = self.dtype.itemsize
        step = _COPY_BYTES // itemsize
        for start in range(begin, end, step):
            num_bytes = min(step, end - start) * itemsize
            raw = pread_exact(source._fd, start * itemsize, num_bytes, source.bin_path)
            self._write(np.frombuffer(raw, self.dtype))
        self._documents.frombytes((bounds[1:] - first + len(self._lengths)).tobytes())
        self._lengths.frombytes(source.sequence_lengths[first:last].tobytes())

    def _write(self, ids: np.ndarray) -> None:
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limit):
            bad = int(ids[np.argmax((ids < 0) | (ids >= self._limit))])
            rule = f"expected 0 to {self._limit - 1} (vocabulary, and dtype {self.dtype.name})"
            raise DataError(f"{self.prefix}: token id {bad}: {rule}")
        try:
            contents = np.ascontiguousarray(ids, dtype=self.dtype).data
            self._bin.write(contents)
            self._hasher.update(contents)
        except OSError as error:
            raise DiskError(f"{self.prefix}.bin: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Flush the files and move them into place. Raises DiskError; no temporary file remains."""
        try:
            _sync_and_close(self._bin)
            lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            hasher = hashlib.sha256()
            with open(self._temporary[".idx"], "wb") as idx:
                for part in (
                    HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], len(lengths), len(self._documents)),
                    lengths.astype("<i4", copy=False).data,
                    (ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8", copy=False).data,
                    np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).data,
                ):
                    idx.write(part)
                    hasher.update(part)
                _sync_and_close(idx)
            with open(self._temporary[digest_file.SUFFIX], "wb") as file:
                digests = {".bin": self._hasher.hexdigest(), ".idx": hasher.hexdigest()}
                file.write(digest_file.text_of(self.prefix, digests).encode())
                _sync_and_close(file)
            # what describes the old .bin goes before it is replaced: a crash in between leaves a lone .bin at worst
            for suffix in (digest_file.SUFFIX, ".idx"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._final[suffix])
            for suffix, temporary in self._temporary.items():
                os.replace(temporary, self._final[suffix])
                fsync_dir(os.path.dirname(self._final[suffix]) or ".")
        except OSError as error:
            self._abort()
            raise DiskError(f"{self.prefix}.bin/.idx: cannot be written: {error.strerror}") from error

    def _abort(self) -> None:
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
            self._abort()


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def merge_datasets(prefixes: Sequence[str], output: str) -> IndexedDataset:
    """Concatenate the documents of several data sets into a new one, and open it.

    Args:
        prefixes: or names of their files; a data set named by several of them counts once.
    Raises:
        ConfigError: the output is an input, or a part (``--part``) is missing or out of order.
        DataError: a data set is damaged, or has another dtype.
    """
    names = list(dict.fromkeys(map(_prefix_of, prefixes)))
    if not names:
        raise ConfigError("there is no data set to merge")
    parts: dict[tuple[str, int], list[int]] = {}
    for match in filter(None, map(_PART.fullmatch, names)):
        parts.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    for (name, count), numbers in parts.items():
        missing = sorted(set(range(1, count + 1)) - set(numbers))
        if missing:
            shown = ", ".join(f"{name}-{i:05d}-of-{count:05d}" for i in missing[:4])
            more = ", ..." if len(missing) > 4 else ""
            raise ConfigError(f"{len(missing)} of the {count} parts of {name} are missing: {shown}{more}")
        if numbers != sorted(numbers):
            order = ", ".join(map(str, numbers[:8]))
            raise ConfigError(f"the parts of {name} are not in order ({order}): give them in that of their numbers")
    _require_other_place([output], names)
    sources = [_opened(name) for name in names]
    make_folder(output)
    with IndexedDatasetWriter(output, dtype=sources[0].dtype) as writer:
        for source in sources:
            writer.merge(source)
    return IndexedDataset(output)


def split_dataset(prefix: str, weights: Sequence[float], outputs: Sequence[str]) -> list[IndexedDataset]:
    """Split a data set into ``outputs`` with shares of consecutive documents by these weights, and open them."""
    if len(weights) != len(outputs):
        counts = f"--weights has {len(weights)} numbers and --output {len(outputs)} names"
        raise ConfigError(f"{counts}: one weight for each")
    if not all(math.isfinite(w) and w > 0 for w in weights) or not math.isfinite(sum(weights)):
        raise ConfigError(f"--weights {','.join(f'{w:g}' for w in weights)}: weights are numbers above 0")
    if len(set(map(os.path.abspath, outputs))) < len(outputs):
        raise ConfigError(f"--output {' '.join(outputs)}: each name once")
    name = _prefix_of(prefix)
    _require_other_place(outputs, [name])
    source = _opened(name)
    count = len(source.document_index) - 1
    ends = [round(count * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    ranges = [range(first, last) for first, last in pairwise([0, *ends])]
    for output, documents in zip(outputs, ranges, strict=True):
        if not documents:
            few = f"{source.prefix} has {count} documents: by these weights {output} would get none of them"
            raise ConfigError(few)
    for output, documents in zip(outputs, ranges, strict=True):
        make_folder(output)
        with IndexedDatasetWriter(output, dtype=source.dtype) as writer:
            writer.merge(source, documents)
    return [IndexedDataset(output) for output in outputs]


def _prefix_of(name: str) -> str:
    return resolve_prefix(name.removesuffix(digest_file.SUFFIX))


def _opened(prefix: str) -> IndexedDataset:
    source = IndexedDataset(prefix)
    if digest_file.read(prefix) is not None:
        digest_file.compare(prefix, {suffix: digest_file.sha256_of(prefix + suffix) for suffix in (".bin", ".idx")})
    return source


def _require_other_place(outputs: Sequence[str], inputs: Sequence[str]) -> None:
    taken = {os.path.realpath(f"{name}.bin") for name in inputs}
    for output in outputs:
        if os.path.realpath(f"{output}.bin") in taken:
            raise ConfigError(f"--output {output} is one of the inputs: choose another name")
