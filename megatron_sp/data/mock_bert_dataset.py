"""Synthetic BERT samples for --mock-data: no files, any vocabulary with BERT's special tokens, and something to learn.

The text of a sample is a walk around a ring of ids: each id is one, two or three steps after the previous one, so its
neighbours leave at most three candidates for a masked id. The walk is cut in two; if swapped, the second segment does
not continue the first, which the binary head can learn. Lengths vary, and some of the samples fill the row. Sample i
depends on (seed, split, i) alone.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from megatron_sp.data.bert_dataset import BERTOptions, make_piece
from megatron_sp.data.bert_masking import MaskRule
from megatron_sp.data.bert_rows import Piece, lay_out, pack, row_lengths
from megatron_sp.data.dataset import Sample, hash_of
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, special_tokens

_STEPS = 3
_RING = 512  # ids in use, at most: large enough to look like text, small enough to learn from few samples
_FULL = 4  # one sample in this many fills the row
_SPLITS = {"train": 0, "valid": 1, "test": 2}


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
        self._fingerprint = hash_of(kind="mock-bert-1", options=asdict(options), split=name, tokenizer=tokenizer.fingerprint())

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
        random = np.random.RandomState(np.array([self.options.seed & 0xFFFFFFFF, self._split, i & 0xFFFFFFFF, i >> 32], np.uint32))
        steps = random.randint(1, _STEPS + 1, length)
        text = self._ring[(random.randint(self._ring.size) + np.cumsum(steps)) % self._ring.size]
        cut = int(random.randint(1, length))
        sentences = [text[:cut], text[cut:]]
        return make_piece(sentences, self.options.max_length, self.options.binary_head, self.tokenizer, self._mask_rule, random)

    def _text_lengths(self, first: int, last: int) -> np.ndarray:
        """int64 [last - first]: text tokens of these samples, a hash of their indices so that packing need not draw the samples."""
        longest = self.options.max_length
        shortest = max(2, longest // 4)
        mixed = _mix(np.arange(first, last, dtype=np.uint64) + np.uint64((self.options.seed * 3 + self._split) << 24 & (2**64 - 1)))
        length = shortest + (mixed >> np.uint64(8)).astype(np.int64) % (longest - shortest + 1)
        result: np.ndarray = np.where(mixed % np.uint64(_FULL) == 0, longest, length)
        return result

    def _packed_rows(self) -> np.ndarray:
        """int64 [num_samples + 1]: first sample of each row, and of the row after the last."""
        count = 2 * self._num_samples
        while True:
            rows = pack(self._text_lengths(0, count) + 2, self.options.seq_length)
            if len(rows) - 2 >= self._num_samples:  # without the last row, which may have room for more
                return rows[: self._num_samples + 1]
            count *= 2


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix uint64 values so that every bit depends on every bit (splitmix64, public domain)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = x ^ (x >> np.uint64(31))
    return result
