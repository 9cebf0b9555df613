"""From the number of samples consumed to the samples that come next: pure functions, so a resumed run needs no other state.

A step's global batch is the next ids of one order that all ranks share; each chunk of ``micro_batch_size * dp_size`` of them is one
micro-batch, of which data parallel rank r takes the r-th slice. Another ``dp_size`` on resume, or another micro-batch size,
deals the same ids out differently and changes nothing else. ``single`` is the data set's own order. ``cyclic`` draws a
new permutation in every epoch, keyed by (seed, epoch); unlike Megatron-LM's it does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from megatron_sp.utils.errors import DataError

Order = Literal["single", "cyclic"]


def next_ids(order: Order, consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    """int64 [count]: the global sample ids after ``consumed`` samples, in order.

    Raises:
        DataError: ``single`` reaches beyond the data set.
        ValueError: an unknown order.
    """
    if order == "single":
        return single_ids(consumed, count, total)
    if order == "cyclic":
        return cyclic_ids(consumed, count, total, seed)
    raise ValueError(f"dataloader_type ({order}) must be 'single' or 'cyclic'")


def single_ids(consumed: int, count: int, total: int) -> np.ndarray:
    """Consecutive ids from ``consumed``; there are ``total``."""
    if consumed < 0 or consumed + count > total:
        raise DataError(
            f"samples {consumed} to {consumed + count - 1} are wanted, the data set was built with {total}: it was built for fewer steps;"
            " --dataloader-type cyclic starts over at its end"
        )
    return np.arange(consumed, consumed + count, dtype=np.int64)


def cyclic_ids(consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    """Ids of an endless order of epochs, each a permutation of its own; a batch may span the end of an epoch."""
    if total < 1:
        raise DataError("the data set has no samples")
    parts = []
    while count > 0:
        epoch, start = divmod(consumed, total)
        part = epoch_permutation(total, seed, epoch)[start : start + count]
        parts.append(part)
        consumed, count = consumed + part.size, count - part.size
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@functools.lru_cache(maxsize=2)
def epoch_permutation(total: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [total], read-only. RandomState's streams are frozen by numpy, so this order is for ever."""
    permutation = np.random.RandomState(np.array([seed & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32], np.uint32)).permutation(total)
    permutation.flags.writeable = False
    return permutation


def deal(ids: np.ndarray, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """[num_microbatches, micro_batch_size]: this rank's share of a global batch.

    Raises:
        ValueError: the batch does not divide into whole micro-batches, or there is no such rank.
    """
    if ids.size % (micro_batch_size * dp_size) or not 0 <= dp_rank < dp_size:
        raise ValueError(f"cannot deal {ids.size} samples to rank {dp_rank} of {dp_size} in micro-batches of {micro_batch_size}")
    return ids.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
