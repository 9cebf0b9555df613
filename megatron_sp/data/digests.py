"""Digests of the training samples: the same in every parallel layout, and different as soon as one token differs.

A sample's digest is the first 48 bits of SHA-256 over its tokens and labels (int32, little endian): few enough for a
float64 to hold them exactly, so they are sent along with the sums that a step exchanges anyway, and enough that a
change goes unnoticed with a probability of only 2**-48. A step's digest is SHA-256 over the digests of its samples in
the order of the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

DIGEST_BYTES = 6
_DIGESTED = ("tokens", "labels", "label")  # masks and positions follow from these and from flags


def sample_digest(sample: Mapping[str, np.ndarray]) -> int:
    """Return a 48-bit digest of the tokens and labels of a sample."""
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
    """Decode digests; the inverse of ``to_bytes``. Raises ValueError: ``data`` is not a whole number of digests."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, DIGEST_BYTES)
    wide = np.zeros((len(parts), 8), np.uint8)
    wide[:, :DIGEST_BYTES] = parts
    return [int(value) for value in wide.view("<u8").ravel()]


def step_digest(digests: Sequence[int]) -> str:
    """Return a short hash of the samples of a step, in order; equal if two runs saw the same tokens."""
    return hashlib.sha256(to_bytes(digests)).hexdigest()[:16]
