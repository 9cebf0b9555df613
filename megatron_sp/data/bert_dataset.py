"""BERT samples: two segments of sentences from one document, in order or swapped, with masked tokens to predict.

``bert_index`` determines the sentences of sample i from the documents, the seed and the sequence length. The rest is
drawn from ``RandomState((seed + i) mod 2**32)``, in Megatron-LM's order: where A ends and B begins, whether they are
swapped, at which end excess tokens are removed, which words are masked (``bert_rows``). So sample i is the same on
every rank and in every epoch of a cyclic order. Without the binary head there is one segment, [CLS] A [SEP]. Source:
Megatron-LM's core/datasets/bert_dataset.py.

The text of a ``MockBERTDataset``'s sample (--mock-data) is a walk around a ring of ids: each id is one, two or three
steps after the previous one, so its neighbours leave at most three candidates for a masked id. The walk is cut in two;
if swapped, the second segment does not continue the first, which the binary head can learn. Lengths vary, and some of
the samples fill the row. Sample i depends on (seed, split, i) alone.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_sp.data.bert_index import LONG_SENTENCE, SampleRule, build_bert_index, eligible_documents
from megatron_sp.data.bert_rows import MaskRule, Piece, lay_out, mask_tokens, pack, row_lengths
from megatron_sp.data.dataset import Sample, hash_of
from megatron_sp.data.index_cache import ANY_LENGTH, Arrays, Expected, cached_arrays
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, special_tokens
from megatron_sp.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_MAX_STEP = 3
_RING = 512  # ids of synthetic samples, at most: large enough to look like text, small enough to learn from few samples
_FULL = 4  # one synthetic sample in this many fills the row
_SPLITS = {"train": 0, "valid": 1, "test": 2}


_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
_LITTLE = 0.5  # warn if the samples cover a smaller share of the tokens


@dataclass(frozen=True)
class BERTOptions:
    """Options that determine the BERT samples, besides the data and the tokenizer.

    Raises:
        ConfigError: ``seq_length`` leaves no room for a sample, or packing with two segments.
    """

    seq_length: int
    seed: int  # seed of the sample order and of all random draws
    mask_prob: float = 0.15  # fraction of the tokens to predict
    short_seq_prob: float = 0.1  # fraction of samples with a shorter target length
    binary_head: bool = True  # two segments, which may be swapped; otherwise one
    pack: bool = False  # pack several samples into a row

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(
                f"seq_length ({self.seq_length}) must be at least {_NUM_SPECIAL + 2} for BERT: [CLS], two times [SEP], and two of text"
            )
        if self.pack and self.binary_head:
            raise ConfigError(
                "--bert-pack-sequences has no place for the order of two segments: add --bert-no-binary-head, or leave it out"
            )

    @property
    def max_length(self) -> int:
        """Maximum number of text tokens in a sample."""
        return self.seq_length - _NUM_SPECIAL

    @property
    def rule(self) -> SampleRule:
        """Rule by which sentences become samples."""
        return SampleRule(self.max_length, self.short_seq_prob, self.seed, 2 if self.binary_head else 1)


_WAY_OUT = {
    False: "Make the data with megatron-sp preprocess --split-sentences, from longer documents",
    True: "Put ends of sentences, or lines, into that text before megatron-sp preprocess --split-sentences; or leave it out, and"
    " train with --bert-no-binary-head: a document of one sequence may be of any length",
}
"""By whether most documents have a sentence that is too long."""


class BERTDataset:
    """BERT rows of one split of one data set of sentences.

    Args:
        indexed: the tokens, one sequence per sentence.
        bounds: first document of the split and the one after its last.
        options: see ``BERTOptions``.
        num_samples: minimum number of rows; the split is repeated as often as needed. None: one epoch.
        tokenizer: provides the special tokens, the word boundaries and the fingerprint.
        vocab_size: ids not below this are errors (default: the tokenizer's; never more than that).
        name: name of the split, for messages.
        cache_folder: folder for the index arrays; None keeps them in memory.
    Raises:
        DataError: no document of the split yields a sample.
        ConfigError: the tokenizer lacks [CLS], [SEP], [MASK] or [PAD].
    """

    def __init__(
        self, indexed: IndexedDataset, bounds: tuple[int, int], options: BERTOptions, *, num_samples: int | None, tokenizer: Tokenizer,
        vocab_size: int | None = None, name: str = "train", cache_folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.indexed, self.options, self.tokenizer = indexed, options, tokenizer
        self._bounds, self._name = bounds, name
        self._vocab_size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
        special = special_tokens(tokenizer)
        self._special = special
        self._mask_rule = MaskRule(options.mask_prob, special.cls, special.sep, special.mask, tokenizer.vocab_size)
        rule = options.rule
        facts = {"kind": "BERT-1", "data": indexed.digest(), "bounds": list(bounds), "rule": rule._asdict()}
        wanted = hash_of(**facts, num_samples=num_samples, pack=options.pack)
        dtype = np.dtype(np.uint32 if len(indexed) <= 2**32 - 1 else np.uint64)
        expected: Expected = {"sample": ((ANY_LENGTH, 3), dtype)}
        if options.pack:
            expected["row"] = ((ANY_LENGTH,), np.dtype(np.int64))
        arrays = cached_arrays(
            cache_folder,
            f"{os.path.basename(indexed.prefix)}-{name}-{wanted[:24]}",
            expected,
            lambda: self._build(num_samples),
        )
        self.index = arrays["sample"]
        self.rows = arrays.get("row")
        self._fingerprint = hash_of(
            **facts,
            options=asdict(options),
            samples=len(self.index),
            tokenizer=tokenizer.fingerprint(),
            special=special._asdict(),
        )

    def __len__(self) -> int:
        return len(self.index) if self.rows is None else len(self.rows) - 1

    def __getitem__(self, i: int) -> Sample:
        """Return row ``i``; see ``bert_rows.lay_out``.

        Raises:
            IndexError: no such row.
            DataError: a token is outside the vocabulary, or the ``.bin`` has become shorter.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        samples = [i] if self.rows is None else range(int(self.rows[i]), int(self.rows[i + 1]))
        pieces = [self._piece(k) for k in samples]
        return lay_out(pieces, self.options.seq_length, self._special.pad, packed=self.rows is not None)

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each sample in row ``i``, and of the padding, int64; one document where rows are not packed."""
        if self.rows is None:
            return np.array([self.options.seq_length])
        sample = self.index[int(self.rows[i]) : int(self.rows[i + 1])]
        sizes = [
            int(self.indexed.sequence_lengths[first:last].sum(dtype=np.int64)) for first, last in sample[:, :2].tolist()
        ]
        return row_lengths(np.minimum(sizes, sample[:, 2].astype(np.int64)) + 2, self.options.seq_length)

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        samples = (i, i) if self.rows is None else (int(self.rows[i]), int(self.rows[i + 1]) - 1)
        first, last = int(self.index[samples[0], 0]), int(self.index[samples[1], 1]) - 1
        return f"{self.indexed.bin_path}, sentences {first} to {last}" + (
            "" if self.rows is None else " (of the first and last sample)"
        )

    def _piece(self, i: int) -> Piece:
        first, last, target = self.index[i].tolist()
        sentences = self._read(first, last)
        random = np.random.RandomState((self.options.seed + i) % 2**32)
        return make_piece(sentences, target, self.options.binary_head, self.tokenizer, self._mask_rule, random)

    def _read(self, first: int, last: int) -> list[np.ndarray]:
        tokens = self.indexed.get_range(first, last)
        lengths = self.indexed.sequence_lengths[first:last]
        sentences = np.split(tokens.astype(np.int64), np.cumsum(lengths[:-1]))
        for number, sentence in enumerate(sentences, start=first):
            self.indexed.check_tokens(sentence, number, 0, self._vocab_size)
        return sentences

    # ---- the index, built once ----

    def _build(self, num_samples: int | None) -> Arrays:
        first, last = self._bounds
        bounds, lengths = self.indexed.document_index[first : last + 1], self.indexed.sequence_lengths
        self._check_documents(bounds, lengths)
        asked = num_samples
        while True:
            sample = build_bert_index(bounds, lengths, self.options.rule, asked, 1 if asked is None else None)
            if asked == num_samples:
                self._warn_of_waste(sample)
            if not self.options.pack:
                return {"sample": sample}
            row = pack(self._piece_lengths(sample), self.options.seq_length)
            if num_samples is None or asked is None or len(row) - 1 >= num_samples:
                return {"sample": sample, "row": row}
            asked = max(len(sample) + 1, math.ceil(len(sample) * num_samples / (len(row) - 1)))

    def _piece_lengths(self, sample: np.ndarray) -> np.ndarray:
        # int64 [n]: tokens of each one-segment sample, including [CLS] and [SEP]
        return np.minimum(self._text_lengths(sample), sample[:, 2].astype(np.int64)) + 2

    def _text_lengths(self, sample: np.ndarray) -> np.ndarray:
        # int64 [n]: tokens of the sentences of each sample, before truncation
        before = np.concatenate([[0], np.cumsum(self.indexed.sequence_lengths, dtype=np.int64)])
        result: np.ndarray = before[sample[:, 1]] - before[sample[:, 0]]
        return result

    def _check_documents(self, bounds: np.ndarray, lengths: np.ndarray) -> None:
        least = self.options.rule.min_sentences
        eligible = eligible_documents(bounds, lengths, least).first.size
        total = len(bounds) - 1
        if eligible:
            return
        sizes = np.diff(bounds)
        prefix, name = self.indexed.prefix, self._name
        if total == 0:
            raise DataError(
                f"{prefix}: the {name} split is empty (0 of {self.indexed.document_index.size - 1} documents): give it a larger share with"
                " --split (or 0 to go without it), or use more data"
            )
        if int(sizes.max()) == 1 and least > 1:
            raise DataError(
                f"{prefix}: every document is one sequence, BERT's two segments are made of sentences: make the data with"
                " megatron-sp preprocess --split-sentences (if it was, from documents of several sentences), or train without the order"
                " of segments (--bert-no-binary-head)"
            )
        few, long = int((sizes < least).sum()), int((sizes >= least).sum())
        raise DataError(
            f"{prefix}: none of the {total} documents of the {name} split gives a sample: {few} have fewer than {least} sentence(s), {long}"
            f" have one above {LONG_SENTENCE} tokens. {_WAY_OUT[few < long]}"
        )

    def _warn_of_waste(self, sample: np.ndarray) -> None:
        text = self._text_lengths(sample)
        seen = np.minimum(text, sample[:, 2].astype(np.int64)).sum()
        if seen < _LITTLE * text.sum():
            logger.warning(
                "%s: the samples of the %s split take in %.0f %% of the text of their sentences, the rest is cut off: was it made without"
                " --split-sentences, or is --seq-length (%d) meant to be so short?",
                self.indexed.prefix, self._name, 100 * seen / text.sum(), self.options.seq_length,
            )  # fmt: skip


def make_piece(
    sentences: list[np.ndarray],
    target_length: int,
    binary_head: bool,
    tokenizer: Tokenizer,
    rule: MaskRule,
    random: np.random.RandomState,
) -> Piece:
    """Make one sample from its sentences.

    Args:
        sentences: int64 ids of each sentence; at least two with the binary head.
    """
    pivot, swapped = len(sentences), None
    if binary_head:
        pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        swapped = bool(random.random_sample() < 0.5)
    nothing = np.zeros(0, np.int64)
    a, b = np.concatenate([nothing, *sentences[:pivot]]), np.concatenate([nothing, *sentences[pivot:]])
    a, b = _truncated(*((b, a) if swapped else (a, b)), target_length, random)
    tokens = np.concatenate([[rule.cls], a, [rule.sep], b, [rule.sep] if b.size else nothing])
    types = np.zeros(tokens.size, np.int64)
    types[a.size + 2 :] = 1
    seen, masked = mask_tokens(tokens, tokenizer.starts_word(tokens), target_length, rule, random)
    return Piece(seen, types, masked, tokens[masked], swapped)


def _truncated(
    a: np.ndarray, b: np.ndarray, target_length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    excess = a.size + b.size - target_length
    if excess <= 0:
        return a, b
    size, front, back = [a.size, b.size], [0, 0], [0, 0]
    for coin in (random.random_sample(excess) < 0.5).tolist():
        longer = 0 if size[0] > size[1] else 1
        size[longer] -= 1
        (front if coin else back)[longer] += 1
    return a[front[0] : a.size - back[0]], b[front[1] : b.size - back[1]]


class MockBERTDataset:
    """Data set of ``num_samples`` synthetic rows of one split; the other arguments are those of ``BERTDataset``."""

    def __init__(self, options: BERTOptions, *, num_samples: int, tokenizer: Tokenizer, name: str = "train") -> None:
        self.options, self.tokenizer, self._num_samples, self._split = options, tokenizer, num_samples, _SPLITS[name]
        special = special_tokens(tokenizer)
        self._special = special
        self._mask_rule = MaskRule(options.mask_prob, special.cls, special.sep, special.mask, tokenizer.vocab_size)
        reserved = {*special, tokenizer.eod}
        ring = [i for i in range(min(tokenizer.vocab_size, _RING + len(reserved))) if i not in reserved][:_RING]
        self._ring = np.array(ring or [special.mask], np.int64)
        self._rows = self._packed_rows() if options.pack else None
        self._fingerprint = hash_of(
            kind="mock-bert-1", options=asdict(options), split=name, tokenizer=tokenizer.fingerprint()
        )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        first, last = (i, i + 1) if self._rows is None else self._rows[i : i + 2].tolist()
        lengths = self._text_lengths(first, last).tolist()
        pieces = [self._piece(k, length) for k, length in zip(range(first, last), lengths, strict=True)]
        return lay_out(pieces, self.options.seq_length, self._special.pad, packed=self.options.pack)

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each sample in row ``i``, and of the padding, int64; one document where rows are not packed."""
        if self._rows is None:
            return np.array([self.options.seq_length])
        return row_lengths(self._text_lengths(*self._rows[i : i + 2].tolist()) + 2, self.options.seq_length)

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        return "the synthetic samples of --mock-data"

    def _piece(self, i: int, length: int) -> Piece:
        random = np.random.RandomState(
            np.array([self.options.seed & 0xFFFFFFFF, self._split, i & 0xFFFFFFFF, i >> 32], np.uint32)
        )
        steps = random.randint(1, _MAX_STEP + 1, length)
        text = self._ring[(random.randint(self._ring.size) + np.cumsum(steps)) % self._ring.size]
        cut = int(random.randint(1, length))
        sentences = [text[:cut], text[cut:]]
        return make_piece(
            sentences, self.options.max_length, self.options.binary_head, self.tokenizer, self._mask_rule, random
        )

    def _text_lengths(self, first: int, last: int) -> np.ndarray:
        """int64 [last - first]: text tokens of these samples, a hash of their indices so that packing need not draw the samples."""
        longest = self.options.max_length
        shortest = max(2, longest // 4)
        mixed = _mix(
            np.arange(first, last, dtype=np.uint64)
            + np.uint64((self.options.seed * 3 + self._split) << 24 & (2**64 - 1))
        )
        length = shortest + (mixed >> np.uint64(8)).astype(np.int64) % (longest - shortest + 1)
        result: np.ndarray = np.where(mixed % np.uint64(_FULL) == 0, longest, length)
        return result

    def _packed_rows(self) -> np.ndarray:
        # int64 [num_samples + 1]: first sample of each row, and of the row after the last
        count = 2 * self._num_samples
        while True:
            rows = pack(self._text_lengths(0, count) + 2, self.options.seq_length)
            if len(rows) - 2 >= self._num_samples:  # without the last row, which may have room for more
                return rows[: self._num_samples + 1]
            count *= 2


def _mix(x: np.ndarray) -> np.ndarray:
    # mix uint64 values so that every bit depends on every bit (splitmix64, public domain)
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = x ^ (x >> np.uint64(31))
    return result
