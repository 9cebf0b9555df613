"""Synthetic GPT samples for --mock-data: no files, any vocabulary, and something to learn.

A sample is a walk around a ring of ids: each id is the previous one plus a small step, and short steps are more likely
than long ones. The loss of a model that learns the rule falls from ln(vocabulary) to the entropy of the step, about 1.2
nats. Occasionally the end-of-document id takes the place of an id. Sample i depends on (seed, split, i) alone.
"""

from __future__ import annotations

import numpy as np

from megatron_sp.data.dataset import Sample, hash_of, make_sample
from megatron_sp.data.gpt_dataset import GPTOptions
from megatron_sp.data.packing import document_numbers
from megatron_sp.data.tokenizers.tokenizer import Tokenizer

_STEPS = np.array([1, 2, 3, 5])
_CUMULATIVE = np.array([0.5, 0.75, 0.875])  # of their probabilities 1/2, 1/4, 1/8, 1/8
_EOD_PROBABILITY = 1 / 512
_RING = 512  # ids in use, at most: large enough to look like text, small enough to learn from few samples
_SPLITS = {"train": 0, "valid": 1, "test": 2}


class MockGPTDataset:
    """Data set of ``num_samples`` synthetic samples of one split; the arguments are those of ``GPTDataset``."""

    def __init__(self, options: GPTOptions, *, num_samples: int, tokenizer: Tokenizer, name: str = "train") -> None:
        self.seq_length, self._num_samples = options.seq_length, num_samples
        self._key = np.array([options.seed & (2**64 - 1), _SPLITS[name]], np.uint64)
        self._eod, self._mask_eod = tokenizer.eod, options.eod_mask_loss
        others = [i for i in range(min(tokenizer.vocab_size, _RING + 1)) if i != tokenizer.eod][:_RING]
        self._ring = np.array(others, np.int64)
        self._fingerprint = hash_of(
            kind="mock-1", seed=options.seed, split=name, seq_length=options.seq_length, tokenizer=tokenizer.fingerprint(),
            mask_eod=options.eod_mask_loss,
        )  # fmt: skip

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        random = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, i]))  # 2**192 numbers for each sample
        uniform = random.random((2, self.seq_length + 1))
        steps = _STEPS[np.searchsorted(_CUMULATIVE, uniform[0], side="right")]
        start = int(random.random() * self._ring.size)
        stretch = self._ring[(start + np.cumsum(steps)) % self._ring.size]
        stretch[uniform[1] < _EOD_PROBABILITY] = self._eod
        return make_sample(stretch, self._eod if self._mask_eod else None)

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each document in sample ``i``, int64; here the sample has to be drawn for it."""
        return np.bincount(document_numbers(self[i]["tokens"], self._eod)) if self._eod is not None else np.array([self.seq_length])

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        return "the synthetic samples of --mock-data"
