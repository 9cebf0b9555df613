"""Conversion of text to ``.bin``/``.idx``: read documents (``text_input``), tokenize them, write them in input order.

JSONL has one object per line; each of --json-keys becomes a separate data set. A blank line or an empty text is an
empty document: it counts in the document index and has no tokens, neither BOS nor EOD. A document is one sequence, or
with --split-sentences one sequence per sentence, as BERT needs it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.data import text_input
from megatron_sp.data.indexed_dataset import token_dtype
from megatron_sp.data.text_input import WHOLE, InputFormat, Part, TextChunk, TextUnit
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
    """Result of ``preprocess``."""

    num_documents: int = 0
    num_skipped: int = 0
    num_input_bytes: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)  # by key
    num_sequences: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    begin: tuple[int, ...] = ()  # ids before each document
    seconds: float = 0.0


class _Encoded(NamedTuple):
    """Tokens of a chunk, by key."""

    tokens: dict[str, np.ndarray]  # all ids in one array
    lengths: dict[str, np.ndarray]  # tokens of each sequence
    num_sequences: dict[str, np.ndarray]  # sequences of each document
    num_skipped: int
    bytes_read: int


# what is told after each chunk: the report so far, bytes read and bytes in all, of the files on disk
Progress = Callable[[PreprocessReport, int, int], None]


def preprocess(options: PreprocessOptions, progress: Progress | None = None) -> PreprocessReport:
    """Tokenize the inputs into ``{output_prefix}_{key}_document.{bin,idx}`` (``_sentence`` with --split-sentences).

    The files are the same for any number of workers, and appear once everything has succeeded.

    Raises:
        ConfigError: invalid flags.
        DataError: an input is missing, has no text or a bad line (named by file and line); or a worker died.
        DiskError: the output cannot be written.
    """
    keys, part = options.json_keys, options.part
    if not options.inputs or not keys or options.workers < 1:
        raise ConfigError("preprocessing needs at least one --input, one of --json-keys and --workers 1 or more")
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--json-keys {' '.join(keys)}: each key once")
    text_input.check_inputs(options.inputs, options.input_format, keys, part)
    if options.bos and options.split_sentences:
        bert = "--split-sentences for BERT, whose samples begin with [CLS]: leave one out"
        raise ConfigError(f"--bos is for GPT's documents, and {bert}")
    make_folder(options.output_prefix)
    tokenizer = _tokenizer_of(options)
    began = time.monotonic()
    report = PreprocessReport(num_tokens=dict.fromkeys(keys, 0), num_sequences=dict.fromkeys(keys, 0))
    report.begin = tokenizer.begin
    bytes_total = text_input.input_bytes(options.inputs) // part.count
    with contextlib.ExitStack() as stack:
        writers = {}
        for key in keys:
            unit = "sentence" if options.split_sentences else "document"
            prefix = report.outputs[key] = f"{options.output_prefix}_{key}_{unit}{part.suffix}"
            writers[key] = stack.enter_context(IndexedDatasetWriter(prefix, vocab_size=tokenizer.vocab_size))
        for encoded in _encode_all(options, tokenizer):
            for key, writer in writers.items():
                writer.add_documents(encoded.tokens[key], encoded.lengths[key], encoded.num_sequences[key])
                report.num_tokens[key] += encoded.tokens[key].size
                report.num_sequences[key] += encoded.lengths[key].size
            report.num_documents += encoded.num_sequences[keys[0]].size
            report.num_skipped += encoded.num_skipped
            report.num_input_bytes += encoded.bytes_read
            report.seconds = time.monotonic() - began
            if progress is not None:
                progress(report, report.num_input_bytes, bytes_total)
        empty = [key for key, count in report.num_tokens.items() if count == 0]
        if empty and part.count == 1:  # with several jobs, one may have nothing to do
            nothing = f"no text under {', '.join(empty)} ({report.num_documents} documents): nothing is written"
            raise DataError(f"{', '.join(options.inputs)}: {nothing}")
    report.seconds = time.monotonic() - began
    return report


def _tokenizer_of(options: PreprocessOptions) -> Tokenizer:
    tokenizer = build_tokenizer(options.data, options.vocab_size)
    choose_bos(tokenizer, False if options.split_sentences else options.bos)  # BERT's sentences never begin with BOS
    return tokenizer


class Encoder:
    """Encoder of chunks into tokens; each worker process has one."""

    def __init__(self, options: PreprocessOptions, tokenizer: Tokenizer | None = None) -> None:
        self.options = options
        self.tokenizer = tokenizer or _tokenizer_of(options)
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, chunk: TextChunk) -> _Encoded:
        """Encode a chunk. Raises DataError for a bad document, unless bad lines are to be skipped."""
        keys = self.options.json_keys
        ids: dict[str, list[np.ndarray]] = {key: [] for key in keys}
        counts: dict[str, list[int]] = {key: [] for key in keys}
        skipped = 0
        for line, raw in zip(chunk.lines, chunk.documents, strict=True):
            try:
                texts = text_input.texts_of(raw, chunk.is_json, keys)
                encoded = [self._encode(text) for text in texts]  # all keys first: nothing of a bad line is kept
            except text_input.BAD_DOCUMENT as error:
                if not self.options.skip_bad_lines:
                    raise text_input.bad_line(chunk, line, error) from None
                skipped += 1
                continue
            for key, sequences in zip(keys, encoded, strict=True):
                ids[key] += sequences
                counts[key].append(len(sequences))
        lengths = {key: np.array([a.size for a in arrays], np.int64) for key, arrays in ids.items()}
        tokens = {key: np.concatenate(arrays) if arrays else np.zeros(0, self.dtype) for key, arrays in ids.items()}
        num_sequences = {key: np.array(count, np.int64) for key, count in counts.items()}
        return _Encoded(tokens, lengths, num_sequences, skipped, chunk.bytes_read)

    def _encode(self, text: str) -> list[np.ndarray]:
        # one sequence, or one per sentence; sequences without tokens are omitted
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


def _encode_in_worker(chunk: TextChunk) -> _Encoded:
    assert _encoder is not None, "the worker was not initialised"
    return _encoder(chunk)


def _encode_all(options: PreprocessOptions, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    chunks = text_input.read_chunks(
        options.inputs, input_format=options.input_format, text_unit=options.text_unit, keys=options.json_keys,
        part=options.part,
    )  # fmt: skip
    if options.workers == 1:
        yield from map(Encoder(options, tokenizer), chunks)
        return
    context = get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, mp_context=context, initializer=_start_worker, initargs=(options,))
    waiting: deque[Future[_Encoded]] = deque()  # in input order, whoever is done first
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= _CHUNKS_PER_WORKER * options.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        died = "a worker process died (killed, or out of memory): nothing is written; try fewer --workers"
        raise DataError(died) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---- sentences ----
# Rules and short lists of abbreviations, without a model or a download. A sentence ends at . ! ? or an ellipsis, with
# the closing quotes and brackets after it, if white space follows and the next word does not begin with a lower-case
# letter; at the full stops of Chinese and Japanese, with or without space; and at every blank line. A single line break
# counts as a space, since text is often wrapped. Such rules are sometimes wrong; a sentence that is a little too long
# or too short does not harm training, and one above 512 tokens costs its document (bert_index.py).

_CLOSING = "\"'”’»)\\]}›"
_OPENING = "\"'“‘„«([{‹¿¡-–—*• \t"
_ENDING = ".!?…؟۔।॥"
_MARK = re.compile(rf"(?<![{_ENDING}])(?P<mark>[{_ENDING}]+)[{_CLOSING}]*(?=\s)|[。！？｡]+[{_CLOSING}」』）]*")
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*|\r\n[^\S\n]*\r\n\s*|\f|\u2029")
_LONGEST_WORD = 64  # characters that are examined, so that a text without spaces takes no longer
_WORD = re.compile(r"[^\W_][\w'’-]*")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]\Z")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# never at the end: what they belong to follows
_TITLES = _words(
    "mr mrs ms mx dr prof st gen sen rep gov capt cpt cmdr lt col maj sgt adm rev fr hon supt messrs mme mlle mt ft vs"
    " cf viz ca approx"
)
# not at the end if a number follows
_BEFORE_NUMBERS = _words(
    "no nos nr fig figs eq eqs sec secs vol vols pp p ch chap art arts op ed eds para par tab ref refs jan feb mar apr"
    " jun jul aug sep sept oct nov dec"
)
# at the end if the next word often begins a sentence
_PERHAPS = _words("inc ltd co corp bros llc plc jr sr esq dept univ assn al a.m p.m ph.d m.d b.a m.a b.sc m.sc d.c")
_STARTERS = _words(
    "a an the this that these those he she it they we i you his her its their our my your there here in on at by for"
    " from with to of as if when while where what who why how which after before since until during but and or so yet"
    " however although though because then thus therefore meanwhile moreover furthermore also no not all some many most"
    " each every one two both another such now today"
)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, stripped; none is empty, and only white space is lost."""
    sentences = []
    for block in _BLANK_LINES.split(text):
        start = 0
        for match in _MARK.finditer(block):
            if match["mark"] is None or _ends_sentence(block, start, match):
                sentences.append(block[start : match.end()].strip())
                start = match.end()
        sentences.append(block[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(block: str, start: int, match: re.Match[str]) -> bool:
    # whether the mark, followed by white space, ends the sentence that began at ``start``
    rest = block[match.end() : match.end() + 80].lstrip().lstrip(_OPENING)
    if rest[:1].islower():
        return False
    if match.group() != ".":
        return True
    before = block[max(start, match.start() - _LONGEST_WORD) : match.start()].lstrip()
    word = (before.split() or [""])[-1].lstrip(_OPENING)
    if word == before and word.isdigit():
        return False  # the number of a list item
    next_match = _WORD.match(rest)
    next_word = next_match.group() if next_match else rest[:1]
    lower = word.lower()
    if lower in _TITLES or (lower in _BEFORE_NUMBERS and next_word[:1].isdigit()):
        return False
    if lower in _PERHAPS or (_INITIALS.match(word) and "." in word):
        return next_word.lower() in _STARTERS
    return word == "I" or not _INITIALS.match(word)
