"""What every data set of training samples can do, and how a sample is cut into inputs and labels."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

import numpy as np

from megatron_sp.data.indexed_dataset import IndexedDataset

Sample = dict[str, np.ndarray]


class Dataset(Protocol):
    """Samples by number; the same number is the same sample on every rank and in every run with the same fingerprint."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample:
        """``tokens`` int64 [s], ``labels`` int64 [s], ``loss_mask`` float32 [s]; BERT's have more (``bert_rows``)."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples and their order."""
        ...

    def where(self, i: int) -> str:
        """What sample ``i`` is read from, for messages: the file, and the place in it."""
        ...


class FileDataset(Dataset, Protocol):
    """Samples of one ``.bin``/``.idx`` pair."""

    @property
    def indexed(self) -> IndexedDataset: ...


def make_sample(stretch: np.ndarray, masked_eod: int | None) -> Sample:
    """Inputs and labels from one stretch of tokens.

    Args:
        stretch: int64 [s + 1].
        masked_eod: with --eod-mask-loss the id that ends a document: positions whose *input* it is do not count (what they
            would have to predict is the beginning of another document), as in Megatron-LM.
    """
    tokens, labels = stretch[:-1], stretch[1:]
    mask = np.ones(tokens.size, np.float32)
    if masked_eod is not None:
        mask[tokens == masked_eod] = 0.0
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def hash_of(**facts: Any) -> str:
    """SHA-256 (hex) of facts that JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
