"""Blending of several data sets by weight: each sample comes from the set that lags furthest behind its share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_sp.data.dataset import CombinedDataset, RowSet, hash_of
from megatron_sp.utils.errors import ConfigError, DataError

_SURPLUS = 0.005
_MIN_CHUNK = 256
_MAX_CHUNKS = 4096
MAX_SETS = 2**15 - 1


class Blend(NamedTuple):
    """Parsed --data-path: prefixes and their weights (None: by size)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(parts: tuple[str, ...], flag: str = "--data-path") -> Blend:
    """Parse PREFIX, PREFIX PREFIX PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ... Raises ConfigError."""
    # an even number of words is pairs if the first word of any pair is a number
    values: list[float | None] = []
    for word in parts[::2] if len(parts) % 2 == 0 else ():
        try:
            values.append(float(word))
        except ValueError:
            values.append(None)
    blend = Blend(parts, None)
    if any(value is not None for value in values):
        for word, value in zip(parts[::2], values, strict=True):
            if value is None or not (0 < value < math.inf):
                rule = "must be a weight above 0: give WEIGHT PREFIX pairs, leave out sets of weight 0"
                raise ConfigError(f"{flag}: '{word}' {rule}")
        blend = Blend(parts[1::2], tuple(v for v in values if v is not None))
    if len(blend.prefixes) > MAX_SETS:
        raise ConfigError(f"{flag}: {len(blend.prefixes)} data sets: at most {MAX_SETS} can be blended")
    return blend


def normalized(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.array(weights, dtype=np.float64)
    if float(array.max()) > np.finfo(np.float64).max / len(array):  # their sum could overflow
        array = np.ldexp(array, -MAX_SETS.bit_length())  # a power of two changes no share
    result: np.ndarray = array / np.sum(array)
    return result


def blending_weights(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the user's weights, normalised twice."""
    # As Megatron-core does: the second division can change the last bit of a weight if the first results do not sum to
    # exactly 1, and that bit decides near-ties.
    return normalized(normalized(weights))


def samples_per_set(weights: np.ndarray, num_samples: int) -> list[int]:
    # its share, rounded up, plus half a percent
    return [math.ceil(math.ceil(num_samples * float(w)) * (1 + _SURPLUS)) for w in weights]


def build_blending_indices(weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute for each sample of the blend its data set, int16 [n], and its index in that set, int64 [n]."""
    # The rule is greedy and sequential (Megatron-LM's build_blending_indices): with t_d samples taken from set d,
    # sample i comes from argmax_d (w_d * max(i, 1) - t_d), the lowest d on a tie. A Python loop over i takes many
    # seconds, so the range is split into chunks that are walked side by side, each from a guess of the counts before
    # it; a chunk whose guess differs from the counts at the end of the previous one is walked again from those. Once no
    # guess is wrong, the result equals the loop's bit for bit; the lags stay small, so a few passes suffice.
    num_chunks = max(1, min(_MAX_CHUNKS, num_samples // _MIN_CHUNK))
    size = -(-num_samples // num_chunks)  # samples per chunk; the surplus of the last one is cut off
    starts = np.arange(num_chunks, dtype=np.int64) * size
    sets = np.empty((size, num_chunks), np.int16)
    samples = np.empty((size, num_chunks), np.int64)
    # the guess, float64 [k, chunks]: the shares rounded by largest remainder, so that they sum to the chunk's start
    share = weights[:, None] * starts
    taken_before = np.floor(share)
    missing = starts - taken_before.sum(axis=0)
    remainder_rank = np.argsort(np.argsort(taken_before - share, axis=0, kind="stable"), axis=0, kind="stable")
    taken_before += remainder_rank < missing
    taken_after = np.empty_like(taken_before)
    pending = np.arange(num_chunks)
    while pending.size:
        # the rule for these chunks at once; what is taken from each set, [k, pending], has one flat index per element,
        # which is cheaper than a pair
        first, column, taken = starts[pending], np.arange(pending.size), taken_before[:, pending].copy(order="C")
        flat = taken.reshape(-1)
        for step in range(size):
            chosen = np.argmax(weights[:, None] * np.maximum(first + step, 1) - taken, axis=0)  # on a tie the lowest
            place = chosen * pending.size + column
            sets[step, pending], samples[step, pending] = chosen, flat[place]
            flat[place] += 1
        taken_after[:, pending] = taken
        follows = pending[pending + 1 < num_chunks]
        wrong = follows[(taken_before[:, follows + 1] != taken_after[:, follows]).any(axis=0)] + 1
        taken_before[:, wrong] = taken_after[:, wrong - 1]
        pending = wrong
    return sets.T.reshape(-1)[:num_samples], samples.T.reshape(-1)[:num_samples]


class BlendedDataset(CombinedDataset):
    """Blend of several data sets; sample i is sample ``samples[i]`` of set ``sets[i]``."""

    def __init__(self, datasets: Sequence[RowSet], weights: np.ndarray, sets: np.ndarray, samples: np.ndarray) -> None:
        fingerprints = [dataset.fingerprint() for dataset in datasets]
        super().__init__(len(sets), hash_of(kind="blend-1", weights=weights.tolist(), sets=fingerprints))
        self.datasets, self.sets, self.samples = datasets, sets, samples
        for dataset, count in zip(datasets, np.bincount(sets, minlength=len(datasets)).tolist(), strict=True):
            if count > len(dataset):
                needs = f"the blend needs {count} samples of it, it has {len(dataset)}"
                raise DataError(f"{dataset.indexed.prefix}: {needs}")

    def _place(self, i: int) -> tuple[RowSet, int]:
        return self.datasets[int(self.sets[i])], int(self.samples[i])


class ChainedDataset(CombinedDataset):
    """Passes over the same data one after another, each in its own order."""

    def __init__(self, parts: Sequence[RowSet]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        # the first pass determines the later ones, so a longer run begins like a shorter one
        super().__init__(int(self._ends[-1]), parts[0].fingerprint())

    def _place(self, i: int) -> tuple[RowSet, int]:
        part = int(np.searchsorted(self._ends, i, side="right"))
        return self.parts[part], i - (int(self._ends[part - 1]) if part else 0)
