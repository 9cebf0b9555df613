"""Index arrays that map a GPT sample to its tokens, computed without a Python loop over samples.

The shuffled documents of a split are concatenated, over as many epochs as the samples need; this stream is cut every
``seq_length`` tokens, each sample taking one more token (the last label); then the samples are shuffled.

    document index [E * docs]   order of the sequences in the stream
    sample index   [n + 1, 2]   position of each cut: (position in the document index, token offset within it)
    shuffle index  [n]          order of the samples

Sample i is the run from cut ``shuffle[i]`` to the next cut, both ends included. If less than 80 % of the last of
several epochs would be used, it is shuffled separately, so that the earlier epochs are used in full. Everything is
drawn from one ``numpy.random.RandomState``, whose streams numpy promises never to change, so the order equals
Megatron-LM's. Source: the algorithm of Megatron-LM's core/datasets/gpt_dataset.py and helpers.cpp. Its loop over the
documents takes S + 1 tokens and steps back one; cut k is therefore the position of token k*S in the stream, found
directly by binary search over the cumulative lengths. Only cut 0 is special: it is (0, 0) even if the first sequence is
empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_sp.utils.errors import ConfigError

_LAST_EPOCH_THRESHOLD = 0.80
_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_CHUNK = 1 << 22


class GPTIndex(NamedTuple):
    """Document, sample and shuffle index; see the module docstring."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class EpochPlan:
    """Number of repetitions of a split, and the quantities that follow from it."""

    num_epochs: int  # E, repetitions of the split
    separate_last: bool  # True if the last epoch is shuffled separately
    num_samples: int  # n, samples in all E epochs; at least the number requested
    num_samples_before_last: int  # samples in the first E-1 epochs


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> EpochPlan:
    """Find the smallest number of epochs that yields ``num_samples`` samples (None: one epoch).

    Raises:
        ValueError: there are no tokens.
    """
    if tokens_per_epoch < 1:
        raise ValueError("a split without tokens has no epochs")
    needed = 1 if num_samples is None else num_samples * seq_length + 1
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = False
    if num_epochs > 1 and num_samples is not None:
        per_epoch = (tokens_per_epoch - 1) // seq_length
        separate = num_samples - before_last < int(_LAST_EPOCH_THRESHOLD * per_epoch)
    return EpochPlan(num_epochs, separate, total, max(before_last, 0))


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the sequence ranges of train, validation and test, with Megatron-LM's rounding.

    Args:
        split: up to three weights, such as "969,30,1".
    Raises:
        ConfigError: the weights are not one to three numbers of at least 0, or are all 0.
    """
    try:
        weights = [float(part) for part in re.split("[,/]", split)]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < float("inf") for w in weights) or sum(weights) <= 0:
        raise ConfigError(
            f"split ('{split}') must be up to three numbers of at least 0, not all 0, joined by commas, such as 969,30,1"
        )
    weights += [0.0] * (3 - len(weights))
    total = float(np.sum(np.array(weights)))
    edges = [0.0]
    for weight in weights:
        edges.append(edges[-1] + weight / total)
    rounded = [round(edge * float(num_sequences)) for edge in edges]
    return [(rounded[k], rounded[k + 1]) for k in range(3)]


def build_gpt_index(lengths: np.ndarray, ids: np.ndarray, seq_length: int, plan: EpochPlan, seed: int) -> GPTIndex:
    """Build the index arrays of one split.

    Args:
        lengths: int32 [N], tokens per sequence of the whole data set.
        ids: [docs], the sequences of this split.
    """
    random = np.random.RandomState(seed)
    document = build_document_index(ids, plan, random)
    sample = build_sample_index(lengths, document, seq_length, plan.num_samples)
    return GPTIndex(document, sample, build_shuffle_index(plan, random))


def build_document_index(ids: np.ndarray, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    # build the document index, int32 [E * docs]: all epochs shuffled together, or the last one separately at the end
    first = np.tile(ids.astype(np.int32), plan.num_epochs - plan.separate_last)
    random.shuffle(first)
    if not plan.separate_last:
        return first
    last = ids.astype(np.int32)
    random.shuffle(last)
    return np.concatenate([first, last])


def build_sample_index(lengths: np.ndarray, document: np.ndarray, seq_length: int, num_samples: int) -> np.ndarray:
    # build the sample index, [n + 1, 2] cuts; int32 if the positions fit, else int64
    cuts = np.empty((num_samples + 1, 2), sample_index_dtype(document.size))
    cuts[0] = 0
    ends = np.cumsum(lengths[document], dtype=np.int64)  # one past the last token of each entry, in the stream
    for start in range(1, num_samples + 1, _CHUNK):  # the temporaries are int64: keep them small beside the result
        stop = min(start + _CHUNK, num_samples + 1)
        token = np.arange(start, stop, dtype=np.int64) * seq_length
        position = np.searchsorted(
            ends, token, side="right"
        )  # the first entry that ends after this token; empty ones never do
        cuts[start:stop, 0] = position
        cuts[start:stop, 1] = token - (ends[position] - lengths[document[position]])
    return cuts


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    # build the shuffle index, [n]; samples before a separate last epoch stay before those in it
    order = np.arange(plan.num_samples, dtype=shuffle_index_dtype(plan.num_samples))
    bound = plan.num_samples_before_last if plan.separate_last else plan.num_samples
    random.shuffle(order[:bound])
    if bound < plan.num_samples:
        random.shuffle(order[bound:])
    return order


def sample_index_dtype(num_entries: int) -> np.dtype:
    """Return int32, or int64 if positions in the document index need it (lengths are int32 by the format)."""
    return np.dtype(np.int32) if num_entries <= _INT32_MAX else np.dtype(np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype:
    """Return uint32, or int64 if there are too many samples."""
    return np.dtype(np.uint32) if num_samples < _UINT32_MAX - 1 else np.dtype(np.int64)
