"""Interface of the data sets of training samples, and what those of this package have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from megatron_sp.data.indexed_dataset import IndexedDataset

Sample = dict[str, np.ndarray]
# The first 48 bits of SHA-256: few enough for a float64 to hold them exactly, so that digests travel with the sums that
# a step exchanges anyway, and enough that a change goes unnoticed with a probability of only 2**-48.
DIGEST_BYTES = 6
_DIGESTED = ("tokens", "labels", "label")  # masks and positions follow from these and from flags


class Dataset(Protocol):
    """Samples by index, the same on every rank and in every run with the same fingerprint."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample:
        """Return ``tokens`` int64 [s], ``labels`` int64 [s], ``loss_mask`` float32 [s]; BERT's have more."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the samples and their order."""
        ...

    def where(self, i: int) -> str:
        """Return the origin of a sample for messages."""
        ...


@runtime_checkable
class RowDataset(Dataset, Protocol):
    """Samples whose documents are known without reading their tokens."""

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each document in sample ``i``, int64, above 0, summing to s."""
        ...


class SampleSet:
    """Base of data sets."""

    def __init__(self, num_samples: int, fingerprint: str) -> None:
        self._num_samples, self._fingerprint = num_samples, fingerprint

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        return self._sample(i)

    def _sample(self, i: int) -> Sample:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return self._fingerprint


class RowSet(SampleSet):
    """Base of data sets for pretraining."""

    indexed: IndexedDataset  # without it, samples are synthetic

    def document_lengths(self, i: int) -> np.ndarray:
        raise NotImplementedError

    def where(self, i: int) -> str:
        return "the synthetic samples of --mock-data"


class CombinedDataset(RowSet):
    """Base of data sets whose samples are those of other ones."""

    def _place(self, i: int) -> tuple[RowDataset, int]:  # data set, index in it
        raise NotImplementedError

    def _sample(self, i: int) -> Sample:
        dataset, index = self._place(i)
        return dataset[index]

    def document_lengths(self, i: int) -> np.ndarray:
        dataset, index = self._place(i)
        return dataset.document_lengths(index)

    def where(self, i: int) -> str:
        dataset, index = self._place(i)
        return dataset.where(index)


def make_sample(tokens_and_last_label: np.ndarray, masked_eod: int | None) -> Sample:
    """Split tokens, int64 [s + 1], into inputs and labels, without loss where the input is ``masked_eod``."""
    tokens, labels = tokens_and_last_label[:-1], tokens_and_last_label[1:]
    mask = np.ones(tokens.size, np.float32)
    if masked_eod is not None:  # what follows it is the beginning of another document: as in Megatron-LM
        mask[tokens == masked_eod] = 0.0
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def hash_of(**facts: Any) -> str:
    """Return the SHA-256 (hex) of JSON-serialisable values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def sample_digest(sample: Mapping[str, np.ndarray]) -> int:
    """Return a digest of the tokens and labels of a sample."""
    hasher = hashlib.sha256()
    for name in _DIGESTED:
        if name in sample:
            hasher.update(name.encode())
            hasher.update(np.ascontiguousarray(sample[name], "<i4").data)
    return int.from_bytes(hasher.digest()[:DIGEST_BYTES], "little")


def to_bytes(digests: Sequence[int]) -> bytes:
    """Encode digests as six bytes each."""
    return np.array(digests, "<u8").reshape(-1, 1).view(np.uint8)[:, :DIGEST_BYTES].tobytes()


def from_bytes(data: bytes) -> list[int]:
    """Decode digests. Raises ValueError: ``data`` is not a whole number of them."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, DIGEST_BYTES)
    wide = np.zeros((len(parts), 8), np.uint8)
    wide[:, :DIGEST_BYTES] = parts
    return [int(value) for value in wide.view("<u8").ravel()]


def step_digest(digests: Sequence[int]) -> str:
    """Return a short hash of the samples of a step, in the order of the global batch."""
    return hashlib.sha256(to_bytes(digests)).hexdigest()[:16]
