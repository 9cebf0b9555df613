"""Blending of several data sets by weight: each sample comes from the set that lags furthest behind its share.

The rule is greedy and sequential (Megatron-LM's build_blending_indices): with t_d samples taken from set d, sample i
comes from argmax_d (w_d * max(i, 1) - t_d), the lowest d on a tie. A loop over i in Python would take many seconds for
a long run, so the range is split into chunks that are processed side by side, with one numpy operation for all of them:
each chunk starts from a guess of the counts before it, and every chunk whose guess differs from the counts at the end
of the previous chunk is recomputed from those. Once no guess is wrong, the result equals that of the loop bit for bit;
the lags stay small, so a few passes suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_sp.utils.errors import ConfigError

_SURPLUS = 0.005
_MIN_CHUNK = 256
_MAX_CHUNKS = 4096
MAX_SETS = 2**15 - 1


class Blend(NamedTuple):
    """Parsed --data-path: prefixes and their weights (None: by size)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(parts: tuple[str, ...], flag: str = "--data-path") -> Blend:
    """Parse PREFIX, PREFIX PREFIX PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...

    An odd number of words is read as prefixes; an even number as pairs if the first word of any pair is a number,
    otherwise as prefixes.

    Raises:
        ConfigError: a weight is not a number above 0, or there are too many data sets.
    """
    weights: tuple[float, ...] | None = None
    prefixes = parts
    if len(parts) % 2 == 0 and any(_as_number(word) is not None for word in parts[::2]):
        values = [_as_number(word) for word in parts[::2]]
        for word, value in zip(parts[::2], values, strict=True):
            if value is None or not (0 < value < math.inf):
                raise ConfigError(
                    f"{flag}: '{word}' must be a weight above 0: give WEIGHT PREFIX pairs, leave out sets of weight 0"
                )
        weights, prefixes = tuple(v for v in values if v is not None), parts[1::2]
    if len(prefixes) > MAX_SETS:
        raise ConfigError(f"{flag}: {len(prefixes)} data sets: at most {MAX_SETS} can be blended")
    return Blend(prefixes, weights)


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the weights as float64, divided by their sum."""
    array = np.array(weights, dtype=np.float64)
    if float(array.max()) > np.finfo(np.float64).max / len(
        array
    ):  # their sum could overflow; a power of two changes no share
        array = np.ldexp(array, -MAX_SETS.bit_length())
    result: np.ndarray = array / np.sum(array)
    return result


def blending_weights(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the weights for ``build_blending_indices`` if the user gave weights: normalised twice, as in Megatron-core.

    The second division can change the last bit of a weight if the first results do not sum to exactly 1, and that bit
    decides near-ties.
    """
    return normalized(normalized(weights))


def samples_per_set(weights: np.ndarray, num_samples: int) -> list[int]:
    """Return the number of samples that each set must provide: its share, rounded up, plus half a percent."""
    return [math.ceil(math.ceil(num_samples * float(w)) * (1 + _SURPLUS)) for w in weights]


def build_blending_indices(weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute for each sample of the blend its data set and its index in that set.

    Args:
        weights: float64 [k], above 0, summing to 1.
    Returns:
        int16 [n] set, int64 [n] sample of that set.
    """
    num_chunks = max(1, min(_MAX_CHUNKS, num_samples // _MIN_CHUNK))
    size = -(-num_samples // num_chunks)  # samples per chunk; the surplus of the last one is cut off
    starts = np.arange(num_chunks, dtype=np.int64) * size
    sets = np.empty((size, num_chunks), np.int16)
    samples = np.empty((size, num_chunks), np.int64)
    taken_before = _guess(weights, starts)
    taken_after = np.empty_like(taken_before)
    pending = np.arange(num_chunks)
    while pending.size:
        sets[:, pending], samples[:, pending], taken_after[:, pending] = _walk(
            weights, starts[pending], size, taken_before[:, pending]
        )
        follows = pending[pending + 1 < num_chunks]
        wrong = follows[(taken_before[:, follows + 1] != taken_after[:, follows]).any(axis=0)] + 1
        taken_before[:, wrong] = taken_after[:, wrong - 1]
        pending = wrong
    return sets.T.reshape(-1)[:num_samples], samples.T.reshape(-1)[:num_samples]


def _guess(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """float64 [k, chunks]: guessed counts before each chunk, the shares rounded by largest remainder so that they sum to its start."""
    share = weights[:, None] * starts
    taken = np.floor(share)
    missing = starts - taken.sum(axis=0)
    rank = np.argsort(np.argsort(taken - share, axis=0, kind="stable"), axis=0, kind="stable")
    return taken + (rank < missing)


def _walk(
    weights: np.ndarray, starts: np.ndarray, size: int, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Apply the rule to several ranges of ``size`` samples at once. starts: [ranges], first sample of each range. taken:
    # float64 [k, ranges], samples taken from each set before it. Sets and samples, both [size, ranges], and the samples
    # taken from each set by the end of each range, [k, ranges].
    taken = np.array(taken, order="C")
    flat = taken.reshape(-1)  # a view: one flat index is cheaper than a pair
    sets = np.empty((size, starts.size), np.int16)
    samples = np.empty((size, starts.size), np.int64)
    column = np.arange(starts.size)
    for step in range(size):
        chosen = _argmax_of_few(weights[:, None] * np.maximum(starts + step, 1) - taken)
        place = chosen * starts.size + column
        sets[step] = chosen
        samples[step] = flat[place]
        flat[place] += 1
    return sets, samples, taken


def _argmax_of_few(lags: np.ndarray) -> np.ndarray:
    """argmax over dim 0 of [k, ranges], the lowest index on a tie; for small k one comparison per row is faster than numpy's own."""
    if len(lags) > 12:
        return np.argmax(lags, axis=0)
    best = lags[0].copy()
    chosen = np.zeros(best.size, np.int64)
    for d in range(1, len(lags)):
        chosen[lags[d] > best] = d
        np.maximum(best, lags[d], out=best)
    return chosen
