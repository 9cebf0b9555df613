"""Samples that know where their documents end: --reset-position-ids and --reset-attention-mask.

A GPT sample is a stretch of the token stream and may hold the end of one document and the beginning of others. With these flags positions
start again behind each end-of-document token, and tokens attend within their own document only. The order of samples and their tokens
do not change, so neither does the fingerprint.
"""

from __future__ import annotations

import numpy as np

from megatron_sp.data.dataset import Dataset, Sample


class PackedDataset:
    """Adds ``positions`` int64 [s] and ``documents`` int64 [s] to the samples of another data set, each where it is asked for.

    Args:
        dataset: whose samples these are.
        eod: the token that ends a document; it belongs to the document that it ends.
        positions: add positions within the document.
        documents: add the number of each token's document, from 0.
    """

    def __init__(self, dataset: Dataset, eod: int, *, positions: bool, documents: bool) -> None:
        self.dataset, self.eod, self.positions, self.documents = dataset, eod, positions, documents

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        sample = dict(self.dataset[i])
        number = document_numbers(sample["tokens"], self.eod)
        if self.documents:
            sample["documents"] = number
        if self.positions:
            at = np.arange(number.size, dtype=np.int64)
            starts = np.flatnonzero(np.diff(number, prepend=-1))
            sample["positions"] = at - starts[number]
        return sample

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()

    def where(self, i: int) -> str:
        return self.dataset.where(i)


def document_numbers(tokens: np.ndarray, eod: int) -> np.ndarray:
    """int64 [s]: which document of the sample each token belongs to."""
    ended = np.cumsum(tokens == eod, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ended[:-1]]) if tokens.size else ended
