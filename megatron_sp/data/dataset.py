"""Interface of the data sets of training samples, and the split of a run of tokens into inputs and labels."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from megatron_sp.data.indexed_dataset import IndexedDataset

Sample = dict[str, np.ndarray]


class Dataset(Protocol):
    """Samples by index; an index gives the same sample on every rank and in every run with the same fingerprint."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample:
        """Return ``tokens`` int64 [s], ``labels`` int64 [s], ``loss_mask`` float32 [s]; BERT samples have more (``bert_rows``)."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the samples and their order."""
        ...

    def where(self, i: int) -> str:
        """Return the origin of sample ``i`` for messages: the file and the position in it."""
        ...


@runtime_checkable
class RowDataset(Dataset, Protocol):
    """Samples whose documents are known without reading their tokens."""

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each document in sample ``i``, int64, in order and above 0; their sum is s.

        Cheap where an index says it, so that every rank can ask for all rows of a step.
        """
        ...


class FileDataset(RowDataset, Protocol):
    """Samples of one ``.bin``/``.idx`` pair."""

    @property
    def indexed(self) -> IndexedDataset:
        """Data set on disk that the samples come from."""
        ...


def make_sample(stretch: np.ndarray, masked_eod: int | None) -> Sample:
    """Split a run of tokens into inputs and labels.

    Args:
        stretch: int64 [s + 1].
        masked_eod: with --eod-mask-loss the end-of-document id: positions with this *input* are excluded from the loss
            (they would have to predict the beginning of another document), as in Megatron-LM.
    """
    tokens, labels = stretch[:-1], stretch[1:]
    mask = np.ones(tokens.size, np.float32)
    if masked_eod is not None:
        mask[tokens == masked_eod] = 0.0
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def hash_of(**facts: Any) -> str:
    """Return the SHA-256 (hex) of JSON-serialisable values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
