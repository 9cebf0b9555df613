"""Conversion of text to ``.bin``/``.idx``: read documents (``text_input``), tokenize in worker processes, write in input order.

The parent process only splits the input into chunks of whole documents and writes the results in order, so the files
are byte-identical for any number of workers. The death of a worker is an error, not a hang. Output files appear once
everything has succeeded (``writer``).

JSONL: one object per line; each of --json-keys becomes a separate data set. A blank line or an empty text is an empty
document: it counts in the document index and has no tokens, and neither BOS nor --append-eod adds one. Plain text: documents
are the paragraphs between blank lines, lines, or whole files (--text-unit). A document is one sequence, or with
--split-sentences one sequence per sentence (``sentences``), as BERT needs it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import NamedTuple, Protocol

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.idx_format import token_dtype
from megatron_sp.data.sentences import split_sentences
from megatron_sp.data.text_input import (
    BAD_DOCUMENT,
    WHOLE,
    InputFormat,
    Part,
    TextChunk,
    TextUnit,
    bad_line,
    check_inputs,
    input_bytes,
    read_chunks,
    texts_of,
)
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer, choose_bos
from megatron_sp.data.writer import IndexedDatasetWriter, make_folder
from megatron_sp.utils.errors import ConfigError, DataError

_CHUNKS_PER_WORKER = 3  # in flight: enough that no worker waits, few enough that the parent's memory stays small


@dataclass(frozen=True)
class PreprocessOptions:
    """Options of ``preprocess``: the flags of megatron-sp preprocess."""

    inputs: tuple[str, ...]
    output_prefix: str
    data: DataConfig
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    bos: bool | None = None
    workers: int = 1
    input_format: InputFormat = "auto"
    text_unit: TextUnit = "paragraph"
    skip_bad_lines: bool = False
    split_sentences: bool = False
    part: Part = WHOLE


@dataclass
class PreprocessReport:
    """Result of ``preprocess``; ``num_tokens`` and ``num_sequences`` are per key, ``begin`` has the ids before each document."""

    num_documents: int = 0
    num_skipped: int = 0
    num_input_bytes: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_sequences: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    begin: tuple[int, ...] = ()
    seconds: float = 0.0


class Encoded(NamedTuple):
    """Tokens of a chunk: for each key all ids in one array, the length of each sequence, and the number of sequences per document."""

    tokens: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    num_sequences: dict[str, np.ndarray]
    num_skipped: int
    bytes_read: int


class Progress(Protocol):
    """Receiver of progress reports."""

    def update(self, report: PreprocessReport, bytes_read: int, bytes_total: int) -> None:
        """Report progress after a chunk; byte counts are those of the files on disk, before decompression."""


def preprocess(options: PreprocessOptions, progress: Progress | None = None) -> PreprocessReport:
    """Tokenize the inputs into ``{output_prefix}_{key}_document.{bin,idx}`` (``_sentence`` with --split-sentences).

    Raises:
        ConfigError: invalid flags.
        DataError: an input is missing, has no text or a bad line (named by file and line); or a worker died.
        DiskError: the output cannot be written; no partial output remains.
    """
    tokenizer = _check(options)
    began = time.monotonic()
    report = PreprocessReport(num_tokens=dict.fromkeys(options.json_keys, 0), num_sequences=dict.fromkeys(options.json_keys, 0))
    report.begin = tokenizer.begin
    bytes_total = input_bytes(options.inputs) // options.part.count
    bytes_read = 0
    with contextlib.ExitStack() as stack:
        writers = {}
        for key in options.json_keys:
            unit = "sentence" if options.split_sentences else "document"
            report.outputs[key] = f"{options.output_prefix}_{key}_{unit}{options.part.suffix}"
            writers[key] = stack.enter_context(IndexedDatasetWriter(report.outputs[key], vocab_size=tokenizer.vocab_size))
        for encoded in _encode_all(options, tokenizer):
            for key, writer in writers.items():
                writer.add_documents(encoded.tokens[key], encoded.lengths[key], encoded.num_sequences[key])
                report.num_tokens[key] += encoded.tokens[key].size
                report.num_sequences[key] += encoded.lengths[key].size
            report.num_documents += encoded.num_sequences[options.json_keys[0]].size
            report.num_skipped += encoded.num_skipped
            bytes_read += encoded.bytes_read
            report.num_input_bytes, report.seconds = bytes_read, time.monotonic() - began
            if progress is not None:
                progress.update(report, bytes_read, bytes_total)
        empty = [key for key, count in report.num_tokens.items() if count == 0]
        if empty and options.part.count == 1:  # with several jobs, one may have nothing to do
            raise DataError(
                f"{', '.join(options.inputs)}: no text under {', '.join(empty)} ({report.num_documents} documents): nothing is written"
            )
    report.seconds = time.monotonic() - began
    return report


def _check(options: PreprocessOptions) -> Tokenizer:
    """Check files, folder and tokenizer before any work is done; return the tokenizer."""
    if not options.inputs or not options.json_keys or options.workers < 1:
        raise ConfigError("preprocessing needs at least one --input, one of --json-keys and --workers 1 or more")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: each key once")
    check_inputs(options.inputs, options.input_format, options.json_keys, options.part)
    if options.bos and options.split_sentences:
        raise ConfigError("--bos is for GPT's documents, and --split-sentences for BERT, whose samples begin with [CLS]: leave one out")
    make_folder(options.output_prefix)
    return _tokenizer_of(options)


def _tokenizer_of(options: PreprocessOptions) -> Tokenizer:
    """Build the tokenizer; BERT's sentences never begin with BOS."""
    tokenizer = build_tokenizer(options.data, options.vocab_size)
    choose_bos(tokenizer, False if options.split_sentences else options.bos)
    return tokenizer


# ---- encoding, in the workers ----


class Encoder:
    """Encoder of chunks into tokens; each worker process has one."""

    def __init__(self, options: PreprocessOptions, tokenizer: Tokenizer | None = None) -> None:
        self.options = options
        self.tokenizer = tokenizer or _tokenizer_of(options)
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, chunk: TextChunk) -> Encoded:
        """Encode a chunk. Raises DataError for a bad document, unless bad lines are to be skipped."""
        ids: dict[str, list[np.ndarray]] = {key: [] for key in self.options.json_keys}
        counts: dict[str, list[int]] = {key: [] for key in self.options.json_keys}
        skipped = 0
        for line, raw in zip(chunk.lines, chunk.documents, strict=True):
            try:
                texts = texts_of(raw, chunk.is_json, self.options.json_keys)
                encoded = [self._encode(text) for text in texts]  # all keys first: nothing of a bad line is kept
            except BAD_DOCUMENT as error:
                if not self.options.skip_bad_lines:
                    raise bad_line(chunk, line, error) from None
                skipped += 1
                continue
            for key, sequences in zip(ids, encoded, strict=True):
                ids[key] += sequences
                counts[key].append(len(sequences))
        lengths = {key: np.array([a.size for a in arrays], np.int64) for key, arrays in ids.items()}
        tokens = {key: np.concatenate(arrays) if arrays else np.zeros(0, self.dtype) for key, arrays in ids.items()}
        num_sequences = {key: np.array(count, np.int64) for key, count in counts.items()}
        return Encoded(tokens, lengths, num_sequences, skipped, chunk.bytes_read)

    def _encode(self, text: str) -> list[np.ndarray]:
        """Encode a document as one sequence, or one per sentence; sequences without tokens are omitted."""
        parts = split_sentences(text) if self.options.split_sentences else [text]
        sequences = [ids for part in parts if (ids := self.tokenizer.encode(part))]
        if sequences:
            sequences[0][:0] = self.tokenizer.begin
        if sequences and self.options.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return [np.array(ids, self.dtype) for ids in sequences]


_encoder: Encoder | None = None  # the encoder of this worker process


def _start_worker(options: PreprocessOptions) -> None:
    global _encoder
    _encoder = Encoder(options)


def _encode_in_worker(chunk: TextChunk) -> Encoded:
    assert _encoder is not None, "the worker was not initialised"
    return _encoder(chunk)


def _chunks(options: PreprocessOptions) -> Iterator[TextChunk]:
    return read_chunks(
        options.inputs, input_format=options.input_format, text_unit=options.text_unit, keys=options.json_keys, part=options.part
    )


def _encode_all(options: PreprocessOptions, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield all chunks, encoded, in input order."""
    if options.workers == 1:
        yield from map(Encoder(options, tokenizer), _chunks(options))
        return
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(options,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for chunk in _chunks(options):
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= _CHUNKS_PER_WORKER * options.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process died (killed, or out of memory): nothing is written; try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
