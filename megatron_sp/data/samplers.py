"""Order of the samples as pure functions of the number of samples consumed, so that a resumed run needs no other state.

The global batch of a step is the next ids of one order that all ranks share; each chunk of ``micro_batch_size *
dp_size`` of them is one micro-batch, of which data parallel rank r takes the r-th slice. With --balance-rows they are
put into another order first (``parallel/row_dealing.py``), which changes only who reads a sample. Another ``dp_size``
or micro-batch size on resume only distributes the same ids differently. ``single`` is the data set's own order.
``cyclic`` draws a new permutation in every epoch, keyed by (seed, epoch); unlike Megatron-LM's, it does not depend on
the number of ranks.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from megatron_sp.utils.errors import DataError

Order = Literal["single", "cyclic"]


def next_ids(order: Order, consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return the global sample ids after ``consumed`` samples, int64 [count], in order.

    Raises:
        DataError: ``single`` would go beyond the end of the data set, or the data set is empty.
        ValueError: an unknown order.
    """
    if order == "single":
        return single_ids(consumed, count, total)
    if order == "cyclic":
        return cyclic_ids(consumed, count, total, seed)
    raise ValueError(f"dataloader_type ({order}) must be 'single' or 'cyclic'")


def single_ids(consumed: int, count: int, total: int) -> np.ndarray:
    """Return ``count`` consecutive ids from ``consumed`` on, out of ``total``."""
    if consumed < 0 or consumed + count > total:
        raise DataError(
            f"samples {consumed} to {consumed + count - 1} are wanted, the data set was built with {total}: it was built for fewer steps;"
            " --dataloader-type cyclic starts over at its end"
        )
    return np.arange(consumed, consumed + count, dtype=np.int64)


def cyclic_ids(consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return ids of an endless sequence of epochs, each with its own permutation; a batch may span the end of an epoch."""
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
    """Return the permutation of an epoch, int64 [total], read-only; it never changes, as numpy has frozen RandomState's streams."""
    permutation = np.random.RandomState(np.array([seed & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32], np.uint32)).permutation(total)
    permutation.flags.writeable = False
    return permutation


def deal(ids: np.ndarray, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Return this rank's share of a global batch, [num_microbatches, micro_batch_size].

    Raises:
        ValueError: the batch does not divide into whole micro-batches, or there is no such rank.
    """
    if ids.size % (micro_batch_size * dp_size) or not 0 <= dp_rank < dp_size:
        raise ValueError(f"cannot deal {ids.size} samples to rank {dp_rank} of {dp_size} in micro-batches of {micro_batch_size}")
    return ids.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
