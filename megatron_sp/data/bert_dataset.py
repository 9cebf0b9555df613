"""BERT samples: two segments of sentences from one document, in order or swapped, with masked tokens to predict.

``bert_index`` determines the sentences of sample i; all else is drawn from a generator keyed by the seed and i, in the
order of Megatron-LM's core/datasets/bert_dataset.py and masked_dataset.py, so it is the same on every rank.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.data.bert_index import LONG_SENTENCE, SampleRule, build_bert_index, eligible_documents
from megatron_sp.data.dataset import RowSet, Sample, hash_of
from megatron_sp.data.index_cache import ANY_LENGTH, Arrays, Expected, cached_arrays
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, special_tokens
from megatron_sp.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# Synthetic samples: a walk around a ring of ids, each one, two or three steps after the previous one, so its neighbours
# leave at most three candidates for a masked id. The walk is cut in two; if swapped, the second segment does not
# continue the first, which the binary head can learn.
_MAX_STEP = 3
_RING = 512  # ids, at most: large enough to look like text, small enough to learn from few samples
_FULL = 4  # one synthetic sample in this many fills the row
_SPLITS = {"train": 0, "valid": 1, "test": 2}

_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
_LITTLE = 0.5  # warn if the samples cover a smaller share of the tokens
_MAX_NGRAM = 3
_SHARES = 1.0 / np.arange(1, _MAX_NGRAM + 1)
_SHARES = _SHARES / _SHARES.sum()
_CUMULATIVE = (_SHARES.cumsum() / _SHARES.cumsum()[-1]).tolist()  # computed as in RandomState.choice
_MASK_SHARE, _KEEP_SHARE = 0.8, 0.5  # the second is a share of those that do not become [MASK]
_LONGER_DOCUMENTS = "Make the data with megatron-sp preprocess --split-sentences, from longer documents"
_MORE_SENTENCES = (
    "Put ends of sentences, or lines, into that text before megatron-sp preprocess --split-sentences; or leave it out,"
    " and train with --bert-no-binary-head: a document of one sequence may be of any length"
)


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
        if self.seq_length - _NUM_SPECIAL < 2:
            least = f"at least {_NUM_SPECIAL + 2} for BERT: [CLS], two times [SEP], and two of text"
            raise ConfigError(f"seq_length ({self.seq_length}) must be {least}")
        if self.pack and self.binary_head:
            way = "add --bert-no-binary-head, or leave it out"
            raise ConfigError(f"--bert-pack-sequences has no place for the order of two segments: {way}")

    @property
    def rule(self) -> SampleRule:
        """Rule by which sentences become samples."""
        least = 2 if self.binary_head else 1
        return SampleRule(self.seq_length - _NUM_SPECIAL, self.short_seq_prob, self.seed, least)


class Piece(NamedTuple):
    """One unpadded sample of n tokens."""

    tokens: np.ndarray  # int64 [n], the model's input
    types: np.ndarray  # int64 [n], 0 for [CLS] A [SEP], 1 for B [SEP]
    masked: np.ndarray  # int64 [m], positions to predict
    labels: np.ndarray  # int64 [m], original tokens at these positions
    swapped: bool | None  # True if A and B are swapped; None if there is no B


class _Rows(RowSet):
    """Base of the two data sets: rows of one sample each, or of several that are packed."""

    rows: np.ndarray | None = None  # first sample of each row, and of the row after the last; None: row i is sample i

    def __init__(self, options: BERTOptions, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer, self._special = options, tokenizer, special_tokens(tokenizer)

    def _samples_of(self, i: int) -> tuple[int, int]:
        return (i, i + 1) if self.rows is None else (int(self.rows[i]), int(self.rows[i + 1]))

    def _lay_out(self, pieces: list[Piece]) -> Sample:
        """Return ``tokens``, ``types`` and ``labels`` int64 [s] and ``loss_mask`` float32 [s] of a row.

        A single sample also has ``length`` int64 [] (tokens before the padding) and, with two segments, ``order`` int64
        [] (1 if they are swapped); packed ones have ``documents`` and ``positions`` int64 [s].
        """
        s = self.options.seq_length
        tokens, types = np.full(s, self._special.pad, np.int64), np.zeros(s, np.int64)
        labels, loss_mask = np.zeros(s, np.int64), np.zeros(s, np.float32)
        # the padding counts as a document of its own: it attends to nothing else, and nothing to it
        documents, positions = np.full(s, len(pieces), np.int64), np.empty(s, np.int64)
        start = 0
        for number, piece in enumerate(pieces):
            end = start + piece.tokens.size
            tokens[start:end], types[start:end], documents[start:end] = piece.tokens, piece.types, number
            labels[start + piece.masked], loss_mask[start + piece.masked] = piece.labels, 1.0
            positions[start:end] = np.arange(end - start)
            start = end
        positions[start:] = np.arange(s - start)
        row: Sample = {"tokens": tokens, "types": types, "labels": labels, "loss_mask": loss_mask}
        if self.rows is not None:
            return row | {"documents": documents, "positions": positions}
        row["length"] = np.array(start, np.int64)
        if pieces[0].swapped is not None:
            row["order"] = np.array(pieces[0].swapped, np.int64)
        return row

    def document_lengths(self, i: int) -> np.ndarray:
        if self.rows is None:  # one document, with its padding
            return np.array([self.options.seq_length])
        pieces = self._piece_lengths(*self._samples_of(i))
        padding = self.options.seq_length - int(pieces.sum())
        return np.append(pieces, padding) if padding else pieces

    def _piece_lengths(self, first: int, last: int) -> np.ndarray:
        # int64 [last - first]: tokens of these one-segment samples, including [CLS] and [SEP]
        raise NotImplementedError

    def _make_piece(self, sentences: list[np.ndarray], target_length: int, random: np.random.RandomState) -> Piece:
        # one sample from int64 ids of each sentence; the draws are Megatron-LM's, in its order
        pivot, swapped = len(sentences), None
        if self.options.binary_head:
            pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
            swapped = bool(random.random_sample() < 0.5)
        nothing = np.zeros(0, np.int64)
        segments = [np.concatenate([nothing, *part]) for part in (sentences[:pivot], sentences[pivot:])]
        if swapped:
            segments.reverse()
        size, front = [segment.size for segment in segments], [0, 0]
        excess = sum(size) - target_length
        if excess > 0:  # one token after another goes from the longer one, from its front or its back
            for coin in (random.random_sample(excess) < 0.5).tolist():
                longer = 0 if size[0] > size[1] else 1
                size[longer] -= 1
                front[longer] += coin
        a, b = (segment[start : start + n] for segment, start, n in zip(segments, front, size, strict=True))
        cls, sep = [self._special.cls], [self._special.sep]
        tokens = np.concatenate([cls, a, sep, b, sep if b.size else nothing])
        types = np.zeros(tokens.size, np.int64)
        types[a.size + 2 :] = 1
        seen, masked = self._mask(tokens, target_length, random)
        return Piece(seen, types, masked, tokens[masked], swapped)

    def _mask(
        self, tokens: np.ndarray, target_length: int, random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        # Mask whole words: the model's input, int64 [n], and the masked positions, int64 [m], unordered. Words are
        # visited in random order; at each, a run of n = 1, 2 or 3 words is proposed with P(n) ~ 1/n, shortened until it
        # fits into the number of tokens that may still be masked, and accepted unless one of its tokens is already
        # masked. Of the accepted tokens, 80 % become [MASK], 10 % a random id, and 10 % stay. The draws of Megatron-LM
        # after the last mask (a permutation that BERT does not use) have no effect and are omitted.
        words: list[list[int]] = []  # positions; a piece whose word begins before the sample joins the preceding word
        starts_word = self.tokenizer.starts_word(tokens).tolist()
        for position, (token, starts) in enumerate(zip(tokens.tolist(), starts_word, strict=True)):
            if token == self._special.cls or token == self._special.sep:
                continue
            if starts or not words:
                words.append([position])
            else:
                words[-1].append(position)
        prob = self.options.mask_prob
        limit = min(prob * target_length, max(1, round(tokens.size * prob)))
        order = np.arange(len(words))
        random.shuffle(order)
        seen = tokens.copy()
        masked: list[int] = []
        taken: set[int] = set()
        for first in order.tolist():
            if len(masked) >= limit:
                break
            n = 1 + bisect_right(_CUMULATIVE, random.random_sample())
            runs = ([p for word in words[first : first + length] for p in word] for length in range(n, 0, -1))
            run = next((run for run in runs if len(run) <= limit - len(masked)), [])
            if not taken.isdisjoint(run):
                continue
            taken.update(run)
            masked.extend(run)
            for position in run:
                if random.random_sample() < _MASK_SHARE:
                    seen[position] = self._special.mask
                elif random.random_sample() >= _KEEP_SHARE:
                    seen[position] = random.randint(0, self.tokenizer.vocab_size)
        return seen, np.array(masked, np.int64)


def pack(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Assign samples of these lengths to rows, in order: row k holds those from entry k up to entry k + 1, int64.

    A row begins when the next sample no longer fits, so what it holds depends on the lengths alone.
    """
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    next_row = array("q", (np.searchsorted(before, before[:-1] + seq_length, side="right") - 1).tobytes())
    rows, sample = array("q", [0]), 0
    while sample < len(next_row):
        sample = next_row[sample]
        rows.append(sample)
    return np.frombuffer(rows, np.int64)


class BERTDataset(_Rows):
    """BERT rows of one split of one data set of sentences; other arguments and errors are those of ``GPTDataset``.

    Args:
        indexed: the tokens, one sequence per sentence.
        bounds: first document of the split and the one after its last.
    Raises:
        DataError: no document of the split yields a sample.
        ConfigError: the tokenizer lacks [CLS], [SEP], [MASK] or [PAD].
    """

    def __init__(
        self, indexed: IndexedDataset, bounds: tuple[int, int], options: BERTOptions, *, num_samples: int | None,
        tokenizer: Tokenizer, vocab_size: int | None = None, name: str = "train",
        cache_folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, tokenizer)
        self.indexed, self._bounds, self._name = indexed, bounds, name
        self._vocab_size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
        facts = {"kind": "BERT-1", "data": indexed.digest(), "bounds": list(bounds), "rule": options.rule._asdict()}
        key = hash_of(**facts, num_samples=num_samples, pack=options.pack)
        dtype = np.dtype(np.uint32 if len(indexed) <= 2**32 - 1 else np.uint64)
        expected: Expected = {"sample": ((ANY_LENGTH, 3), dtype)}
        if options.pack:
            expected["row"] = ((ANY_LENGTH,), np.dtype(np.int64))
        key = f"{os.path.basename(indexed.prefix)}-{name}-{key[:24]}"
        arrays = cached_arrays(cache_folder, key, expected, lambda: self._build(num_samples))
        self.index, self.rows = arrays["sample"], arrays.get("row")
        self._fingerprint = hash_of(
            **facts, options=asdict(options), samples=len(self.index), tokenizer=tokenizer.fingerprint(),
            special=self._special._asdict(),
        )  # fmt: skip
        self._num_samples = len(self.index) if self.rows is None else len(self.rows) - 1

    def _sample(self, i: int) -> Sample:
        pieces = []
        for sample in range(*self._samples_of(i)):
            first, last, target_length = self.index[sample].tolist()
            tokens = self.indexed.get_range(first, last).astype(np.int64)
            sentences = np.split(tokens, np.cumsum(self.indexed.sequence_lengths[first : last - 1]))
            for number, sentence in enumerate(sentences, start=first):
                self.indexed.check_tokens(sentence, number, 0, self._vocab_size)
            random = np.random.RandomState((self.options.seed + sample) % 2**32)
            pieces.append(self._make_piece(sentences, target_length, random))
        return self._lay_out(pieces)

    def _piece_lengths(self, first: int, last: int) -> np.ndarray:
        samples, lengths = self.index[first:last], self.indexed.sequence_lengths
        sizes = [int(lengths[begin:end].sum(dtype=np.int64)) for begin, end in samples[:, :2].tolist()]
        return np.minimum(sizes, samples[:, 2].astype(np.int64)) + 2

    def where(self, i: int) -> str:
        samples = self._samples_of(i)
        first, last = int(self.index[samples[0], 0]), int(self.index[samples[1] - 1, 1]) - 1
        several = "" if self.rows is None else " (of the first and last sample)"
        return f"{self.indexed.bin_path}, sentences {first} to {last}{several}"

    def _build(self, num_samples: int | None) -> Arrays:
        first, last = self._bounds
        bounds, lengths = self.indexed.document_index[first : last + 1], self.indexed.sequence_lengths
        self._check_documents(bounds, lengths)
        before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens before each sentence
        asked = num_samples
        while True:
            sample = build_bert_index(bounds, lengths, self.options.rule, asked, 1 if asked is None else None)
            text = before[sample[:, 1]] - before[sample[:, 0]]  # tokens of the sentences of each sample
            taken = np.minimum(text, sample[:, 2].astype(np.int64))
            if asked == num_samples and taken.sum() < _LITTLE * text.sum():
                logger.warning(
                    "%s: the samples of the %s split take in %.0f %% of the text of their sentences, the rest is cut"
                    " off: was it made without --split-sentences, or is --seq-length (%d) meant to be so short?",
                    self.indexed.prefix, self._name, 100 * taken.sum() / text.sum(), self.options.seq_length,
                )  # fmt: skip
            if not self.options.pack:
                return {"sample": sample}
            row = pack(taken + 2, self.options.seq_length)
            if num_samples is None or asked is None or len(row) - 1 >= num_samples:
                return {"sample": sample, "row": row}
            asked = max(len(sample) + 1, math.ceil(len(sample) * num_samples / (len(row) - 1)))

    def _check_documents(self, bounds: np.ndarray, lengths: np.ndarray) -> None:
        least = self.options.rule.min_sentences
        if eligible_documents(bounds, lengths, least).first.size:
            return
        sizes = np.diff(bounds)
        prefix, name = self.indexed.prefix, self._name
        if not sizes.size:
            empty = f"the {name} split is empty (0 of {self.indexed.document_index.size - 1} documents)"
            larger = "give it a larger share with --split (or 0 to go without it), or use more data"
            raise DataError(f"{prefix}: {empty}: {larger}")
        if int(sizes.max()) == 1 and least > 1:
            raise DataError(
                f"{prefix}: every document is one sequence, BERT's two segments are made of sentences: make the data"
                " with megatron-sp preprocess --split-sentences (if it was, from documents of several sentences), or"
                " train without the order of segments (--bert-no-binary-head)"
            )
        few, long = int((sizes < least).sum()), int((sizes >= least).sum())
        none = f"none of the {sizes.size} documents of the {name} split gives a sample"
        why = f"{few} have fewer than {least} sentence(s), {long} have one above {LONG_SENTENCE} tokens"
        raise DataError(f"{prefix}: {none}: {why}. {_MORE_SENTENCES if few < long else _LONGER_DOCUMENTS}")


class MockBERTDataset(_Rows):
    """Data set of ``num_samples`` synthetic rows; each depends on (seed, split, index) alone."""

    def __init__(self, options: BERTOptions, *, num_samples: int, tokenizer: Tokenizer, name: str = "train") -> None:
        super().__init__(options, tokenizer)
        self._num_samples, self._split, special = num_samples, _SPLITS[name], self._special
        reserved = {*special, tokenizer.eod}
        ring = [i for i in range(min(tokenizer.vocab_size, _RING + len(reserved))) if i not in reserved][:_RING]
        self._ring = np.array(ring or [special.mask], np.int64)
        self._fingerprint = hash_of(
            kind="mock-bert-1", options=asdict(options), split=name, tokenizer=tokenizer.fingerprint()
        )
        count = num_samples
        while options.pack and self.rows is None:
            count *= 2
            rows = pack(self._piece_lengths(0, count), options.seq_length)
            if len(rows) - 2 >= num_samples:  # without the last row, which may have room for more
                self.rows = rows[: num_samples + 1]

    def _sample(self, i: int) -> Sample:
        first, last = self._samples_of(i)
        pieces = []
        for sample, length in zip(range(first, last), (self._piece_lengths(first, last) - 2).tolist(), strict=True):
            key = [self.options.seed & 0xFFFFFFFF, self._split, sample & 0xFFFFFFFF, sample >> 32]
            random = np.random.RandomState(np.array(key, np.uint32))
            steps = random.randint(1, _MAX_STEP + 1, length)
            text = self._ring[(random.randint(self._ring.size) + np.cumsum(steps)) % self._ring.size]
            cut = int(random.randint(1, length))
            pieces.append(self._make_piece([text[:cut], text[cut:]], self.options.rule.max_length, random))
        return self._lay_out(pieces)

    def _piece_lengths(self, first: int, last: int) -> np.ndarray:
        # a hash of the samples' indices (splitmix64, public domain), so that packing need not draw the samples
        longest = self.options.rule.max_length
        shortest = max(2, longest // 4)
        x = np.arange(first, last, dtype=np.uint64)
        x += np.uint64((self.options.seed * 3 + self._split) << 24 & (2**64 - 1))
        x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        length = shortest + (x >> np.uint64(8)).astype(np.int64) % (longest - shortest + 1)
        lengths: np.ndarray = np.where(x % np.uint64(_FULL) == 0, longest, length) + 2
        return lengths
