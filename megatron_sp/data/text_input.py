"""Input of preprocessing, and of the training of tokenizers: documents from many kinds of files."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megatron_sp.utils.errors import ConfigError, DataError, ReportedError
from megatron_sp.utils.strict_json import parse_object

# .jsonl .json .ndjson    a JSON object on each line                 plain, .gz, .zst
# text                    paragraphs, lines, or the whole file       plain, .gz, .zst
# .parquet                a document for each row                    pyarrow
# .arrow                  the same, as IPC stream or file            pyarrow
# a folder                what ``Dataset.save_to_disk`` wrote        pyarrow
# -                       standard input, JSONL or text
STDIN = "-"
_CHUNK_BYTES = 1 << 19
_ROWS = 1024  # rows of a columnar file that are read at a time
_JSON_SUFFIXES = tuple(suffix + packed for suffix in (".jsonl", ".json", ".ndjson") for packed in ("", ".gz", ".zst"))
_BOM = b"\xef\xbb\xbf"
_MAX_STATE_BYTES = 1 << 24

InputFormat = Literal["auto", "jsonl", "text"]
TextUnit = Literal["paragraph", "line", "file"]


class TextChunk(NamedTuple):
    """Chunk of whole documents of one input."""

    path: str  # the input's name in messages
    is_json: bool  # True if each document is a JSON object, False if it is text
    documents: list[bytes]  # raw bytes
    lines: list[int]  # number, from 1, of the line or row at which each document begins
    bytes_read: int  # bytes of the file on disk read since the last chunk


@dataclass(frozen=True)
class Part:
    """One of ``count`` runs of consecutive documents, for array jobs; the parts, concatenated, are the whole input."""

    index: int = 1  # from 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse text such as "3/8". Raises ConfigError."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.index <= part.count:
            raise ConfigError(f"--part {text[:40]} must be I/N with I from 1 to N, such as 3/8")
        return part

    @property
    def suffix(self) -> str:
        """Suffix of the output prefix; empty for the whole input."""
        return f"-{self.index:05d}-of-{self.count:05d}" if self.count > 1 else ""


WHOLE = Part()


class _Range(NamedTuple):
    """Range of one input, in bytes or row groups; ``stop`` None: the whole input."""

    path: str
    start: int = 0
    stop: int | None = None


def is_json(path: str, input_format: InputFormat) -> bool:
    """Return whether the documents of an input are JSON objects."""
    if input_format != "auto":
        return input_format == "jsonl"
    return _is_table(path) or path.endswith(_JSON_SUFFIXES)


def _is_table(path: str) -> bool:
    return path.endswith((".parquet", ".arrow")) or os.path.isdir(path)


def check_inputs(paths: Iterable[str], input_format: InputFormat, keys: tuple[str, ...], part: Part = WHOLE) -> None:
    """Check that inputs can be read, before any work is done.

    Raises:
        ConfigError: a package is missing, or the format, ``keys`` or ``part`` do not fit an input.
        DataError: an input does not exist, or is a folder without a readable data set.
    """
    for path in paths:
        if path == STDIN:
            if input_format == "auto":
                unnamed = "is standard input, which has no name to tell its format by: add --input-format jsonl or text"
                raise ConfigError(f"--input - {unnamed}")
            if part.count > 1:
                whole = "standard input cannot be read in parts; write it to a file first"
                raise ConfigError(f"--part {part.index}/{part.count}: {whole}")
        elif _is_table(path) and os.path.exists(path):
            _package("pyarrow", path)
            if os.path.isdir(path):
                _files_of(path)
            elif input_format == "text":
                raise ConfigError(f"{path} has columns: leave --input-format out; --json-keys names the columns")
        elif not os.path.isfile(path):
            raise DataError(f"{path}: no such input file")
        elif path.endswith(".zst"):
            _package("zstandard", path)
        if not is_json(path, input_format) and keys != ("text",):
            way = "leave --json-keys out, or give --input-format jsonl"
            raise ConfigError(f"{path} is plain text, which has no keys: {way}")


def input_bytes(paths: Iterable[str]) -> int:
    """Return the total size of the inputs on disk in bytes; standard input counts as 0."""
    return sum(os.path.getsize(file) for path in paths if path != STDIN for file in _files_of(path))


def read_chunks(
    paths: Iterable[str], *, input_format: InputFormat = "auto", text_unit: TextUnit = "paragraph",
    keys: tuple[str, ...] = ("text",), part: Part = WHOLE,
) -> Iterator[TextChunk]:  # fmt: skip
    """Read inputs as chunks of whole documents, in order; of plain text, each ``text_unit`` is a document.

    Raises:
        DataError: an input cannot be read, is damaged or lacks a column.
    """
    for piece in _ranges(list(paths), input_format, text_unit, part):
        json_lines = is_json(piece.path, input_format)
        try:
            if piece.path != STDIN and _is_table(piece.path):
                yield from _chunks_of_table(piece, keys)
            else:
                yield from _chunks_of_file(piece, json_lines, "line" if json_lines else text_unit)
        except ReportedError:
            raise
        except Exception as error:
            # what the loaded readers raise for damaged files; gzip's own errors are OSErrors
            packages = (("zstandard", "ZstdError"), ("pyarrow", "ArrowException"))
            kinds = [getattr(sys.modules.get(module), name, None) for module, name in packages]
            damage = (OSError, EOFError, zlib.error, *(kind for kind in kinds if isinstance(kind, type)))
            if not isinstance(error, damage):
                raise
            raise DataError(f"{_name(piece.path)}: cannot be read: {error}") from error


def _ranges(paths: list[str], input_format: InputFormat, text_unit: TextUnit, part: Part) -> Iterator[_Range]:
    # Yield the ranges of the inputs that belong to a part. The parts have equal shares of the bytes of all inputs;
    # uncompressed JSONL and text with one document per line are split between any two lines, Parquet between two row
    # groups, and any other file belongs to the part in which it begins.
    if part.count == 1:
        yield from (_Range(path) for path in paths)
        return
    files = [file for path in paths for file in _files_of(path)]
    total = sum(os.path.getsize(file) for file in files)
    first, last = total * (part.index - 1) // part.count, total * part.index // part.count
    begin = 0
    for file in files:
        size = os.path.getsize(file)
        start, stop = first - begin, last - begin  # the part's range within this file
        has_lines = is_json(file, input_format) or text_unit == "line"
        if file.endswith(".parquet"):
            groups = importlib.import_module("pyarrow.parquet").ParquetFile(file).num_row_groups
            low, high = (-(-groups * max(0, min(size, at)) // size) if size else 0 for at in (start, stop))
            if low < high:
                yield _Range(file, low, high)
        elif has_lines and not file.endswith((".gz", ".zst", ".arrow")):
            if start < size and stop > 0:
                yield _Range(file, max(0, start), min(size, stop))
        elif start <= 0 < stop and size:
            yield _Range(file)
        begin += size


# ---- texts ----

BAD_DOCUMENT = (DataError, ValueError, RecursionError)
"""What ``texts_of`` raises; RecursionError: JSON that is nested too deeply."""


def texts_of(document: bytes, json_object: bool, keys: tuple[str, ...]) -> list[str]:
    """Return the texts of a document, one for each key; those of a blank line are empty. Raises ``BAD_DOCUMENT``."""
    text = document.decode("utf-8")
    if not json_object:
        return [text]
    if not text.strip():
        return [""] * len(keys)
    try:
        record: Any = json.loads(text)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object with {', '.join(keys)}, found {type(record).__name__}")
    for key in keys:
        if key not in record:
            raise DataError(f"no key '{key}'; this line has {', '.join(sorted(map(repr, record))[:8]) or 'none'}")
        if not isinstance(record[key], str):
            raise DataError(f"'{key}' is {type(record[key]).__name__}, expected a string")
    return [record[key] for key in keys]


def bad_line(chunk: TextChunk, line: int, error: Exception) -> DataError:
    """Return the error about a document that begins at a line of a chunk's input."""
    return DataError(f"{chunk.path}:{line}: {error}; --skip-bad-lines leaves such lines out")


def read_texts(
    paths: Iterable[str], *, input_format: InputFormat = "auto", keys: tuple[str, ...] = ("text",),
    skip_bad_lines: bool = False,
) -> Iterator[list[str]]:  # fmt: skip
    """Yield the texts of each document, in order; plain text is read by paragraphs. Raises DataError."""
    for chunk in read_chunks(paths, input_format=input_format, keys=keys):
        for line, document in zip(chunk.lines, chunk.documents, strict=True):
            try:
                texts = texts_of(document, chunk.is_json, keys)
            except BAD_DOCUMENT as error:
                if not skip_bad_lines:
                    raise bad_line(chunk, line, error) from None
                continue
            yield texts


# ---- lines ----


def _chunks_of_file(piece: _Range, json_lines: bool, unit: TextUnit) -> Iterator[TextChunk]:
    name = _name(piece.path) if piece.start == 0 else f"{piece.path} (from byte {piece.start} on)"
    with _opened(piece.path) as (raw, file):
        lines = file if piece.stop is None else _lines_between(file, piece.start, piece.stop)
        before, size = piece.start, 0
        documents: list[bytes] = []
        numbers: list[int] = []
        for number, document in _documents(lines, unit, has_bom=piece.start == 0):
            documents.append(document)
            numbers.append(number)
            size += len(document) + 64
            if size >= _CHUNK_BYTES:
                position = raw.tell() if raw is not None else 0
                yield TextChunk(name, json_lines, documents, numbers, max(0, position - before))
                before, documents, numbers, size = position, [], [], 0
        position = raw.tell() if raw is not None else 0
        yield TextChunk(name, json_lines, documents, numbers, max(0, position - before))


def _lines_between(file: IO[bytes], start: int, stop: int) -> Iterator[bytes]:
    # yield the lines that begin at a byte from ``start`` on and before ``stop``
    position = start
    if start > 0:  # skip the rest of a line that began before the part, or the line end just before it
        file.seek(start - 1)
        position += len(file.readline()) - 1
    while position < stop and (line := file.readline()):
        position += len(line)
        yield line


def _documents(lines: Iterable[bytes], unit: TextUnit, *, has_bom: bool) -> Iterator[tuple[int, bytes]]:
    # yield (number of the first line, bytes) of each document; a whole file keeps its final line break, others do not
    block: list[bytes] = []
    start = 1
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(_BOM) if number == 1 and has_bom else line
        if unit == "line":
            yield number, line.rstrip(b"\r\n")
        elif unit == "paragraph" and not line.strip():
            if block:
                yield start, b"".join(block).rstrip(b"\r\n")
            block = []
        else:
            start = start if block else number
            block.append(line)
    if block:
        yield start, b"".join(block) if unit == "file" else b"".join(block).rstrip(b"\r\n")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes] | None, Any]]:
    # open an input; yield the file on disk (None for standard input) and a file of its decompressed lines
    if path == STDIN:
        yield None, sys.stdin.buffer
        return
    with open(path, "rb") as raw:
        if path.endswith(".gz"):
            with gzip.open(raw) as file:
                yield raw, file
        elif path.endswith(".zst"):
            with io.BufferedReader(_ZstdReader(raw, _package("zstandard", path)), 1 << 20) as file:
                yield raw, file
        else:
            yield raw, raw


class _ZstdReader(io.RawIOBase):
    """Reader of all frames of a .zst file that, unlike the package's own reader, detects a truncated file."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw, self._zstandard = raw, zstandard
        self._frame: Any = None  # the frame that is being read
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._raw.read(_CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a compressed frame: it was cut off")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._plain = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


# ---- columns ----


def _chunks_of_table(piece: _Range, keys: tuple[str, ...]) -> Iterator[TextChunk]:
    # rows become JSON objects of the wanted columns; a value that is not a string is found, with its row, on encoding
    for file in _files_of(piece.path):
        documents: list[bytes] = []
        numbers: list[int] = []
        size = row = 0
        for batch in _batches(file, piece, keys):
            for values in zip(*(column.to_pylist() for column in batch), strict=True):
                row += 1
                documents.append(json.dumps(dict(zip(keys, values, strict=True))).encode())
                numbers.append(row)
                size += len(documents[-1]) + 64
            if size >= _CHUNK_BYTES:
                yield TextChunk(file, True, documents, numbers, 0)
                documents, numbers, size = [], [], 0
        yield TextChunk(file, True, documents, numbers, os.path.getsize(file))


def _batches(file: str, piece: _Range, keys: tuple[str, ...]) -> Iterator[list[Any]]:
    arrow = _package("pyarrow", file)
    if file.endswith(".parquet"):
        with importlib.import_module("pyarrow.parquet").ParquetFile(file) as table:
            _require_text(arrow, table.schema_arrow, keys, file)
            groups = range(piece.start, table.num_row_groups if piece.stop is None else piece.stop)
            for batch in table.iter_batches(_ROWS, row_groups=list(groups), columns=list(keys)):
                yield [batch.column(key) for key in keys]
        return
    with arrow.memory_map(file) as source:
        try:
            reader = arrow.ipc.open_stream(source)
            batches: Iterable[Any] = reader
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = arrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        _require_text(arrow, reader.schema, keys, file)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                yield [batch.column(key).slice(start, _ROWS) for key in keys]


def _require_text(arrow: Any, schema: Any, keys: tuple[str, ...], file: str) -> None:
    for key in keys:
        if key not in schema.names:
            names = ", ".join(map(repr, schema.names[:8])) or "none"
            raise DataError(f"{file}: no column '{key}'; it has {names}: --json-keys names columns")
        kind = schema.field(key).type
        if arrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or str(kind) == "string_view"):
            raise DataError(f"{file}: column '{key}' holds {kind}, expected text (string)")


def _files_of(path: str) -> list[str]:
    # the input itself, or the Arrow files of a data set written by ``Dataset.save_to_disk``, in order
    if not os.path.isdir(path):
        return [path]
    folder, state = Path(path), Path(path) / "state.json"
    if (folder / "dataset_dict.json").is_file():
        parts = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        names = ", ".join(os.path.join(path, name) for name in parts[:8])
        raise DataError(f"{path} holds several data sets: name one of them, {names}")
    try:
        with open(state, "rb") as file:
            dataset_state = parse_object(file.read(_MAX_STATE_BYTES), str(state))
    except OSError as error:
        why = f"that can be read (state.json: {error.strerror}): name its files one by one"
        raise DataError(f"{path} is a folder without a data set {why}") from None
    except ReportedError as error:
        raise DataError(str(error)) from None
    if dataset_state.get("_indices_data_files"):
        way = "call flatten_indices() and save it again"
        raise DataError(f"{path}: its rows are in the order of an index of their own: {way}")
    entries = dataset_state.get("_data_files")
    files = []
    for entry in entries if isinstance(entries, list) else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        is_arrow = isinstance(name, str) and name == os.path.basename(name) and name.endswith(".arrow")
        if not is_arrow or not (folder / str(name)).is_file():
            damaged = "it is damaged, or of another program"
            raise DataError(f"{state} does not name the Arrow files of a data set: {damaged}")
        files.append(str(folder / str(name)))
    return files


def _package(name: str, path: str) -> Any:
    # import an optional package that an input needs
    try:
        if name == "pyarrow":
            importlib.import_module("pyarrow.ipc")
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs the package {name}: pip install {name} ({error})") from None


def _name(path: str) -> str:
    return "standard input" if path == STDIN else path
