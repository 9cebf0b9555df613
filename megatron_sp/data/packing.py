"""Document boundaries within samples, for --reset-position-ids and --reset-attention-mask.

A GPT sample is a run of the token stream and may hold the end of one document and the beginning of others. With these
flags positions restart after each end-of-document token, and tokens attend only within their own document. The order of
samples and their tokens do not change, so neither does the fingerprint.
"""

from __future__ import annotations

import numpy as np

from megatron_sp.data.dataset import RowDataset, Sample


class PackedDataset:
    """Data set that adds ``positions`` and ``documents``, both int64 [s] and optional, to the samples of another one.

    Args:
        dataset: the underlying data set.
        eod: the end-of-document token; it belongs to the document that it ends.
        positions: add the position of each token within its document.
        documents: add the number of each token's document, from 0.
    """

    def __init__(self, dataset: RowDataset, eod: int, *, positions: bool, documents: bool) -> None:
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

    def document_lengths(self, i: int) -> np.ndarray:
        return self.dataset.document_lengths(i)

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()

    def where(self, i: int) -> str:
        return self.dataset.where(i)


def document_numbers(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return the document number of each token within the sample, int64 [s]."""
    ended = np.cumsum(tokens == eod, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ended[:-1]]) if tokens.size else ended
