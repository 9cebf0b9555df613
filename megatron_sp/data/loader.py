"""Micro-batches of a step for one data parallel rank, prefetched in the background.

The loader has no position of its own: ``step`` takes the number of consumed samples. After each call it predicts that
the next one continues where this one ended, with as many micro-batches, and prefetches those in threads; a wrong
prediction (batch size ramp-up, a skip on resume) is discarded and wastes only the reads. Threads suffice because the
time goes into file reads and numpy copies, and they avoid the costs of worker processes: start-up, a copy of the
indices in each, and shared memory for every batch.

The order of the samples is a pure function of their number, so a resumed run needs no other state. The global batch of
a step is the next ids of one order that all ranks share; each chunk of ``micro_batch_size * dp_size`` of them is one
micro-batch, of which data parallel rank r takes the r-th slice. With --balance-rows they are put into another order
first (``parallel/row_balancing.py``), which changes only who reads a sample. Another ``dp_size`` or micro-batch size on
resume only distributes the same ids differently. ``single`` is the data set's own order. ``cyclic`` draws a new
permutation in every epoch, keyed by (seed, epoch); unlike Megatron-LM's, it does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_sp.data.dataset import Dataset
from megatron_sp.data.digests import sample_digest
from megatron_sp.utils.errors import DataError

Order = Literal["single", "cyclic"]
Batch = dict[str, Tensor]


class BatchLoader:
    """Loader of the batches of one data set for one data parallel rank.

    Args:
        dataset: the samples.
        micro_batch_size: b, sequences per micro-batch and rank.
        dp_rank, dp_size: data parallel rank and size; tp and sp ranks of one data parallel rank read the same samples.
        order: 'single' or 'cyclic' (``samplers``).
        seed: seed of the cyclic order.
        num_workers: number of reader threads; 0 reads in the calling thread, without prefetching.
        pin_memory: put batches into page-locked memory, for asynchronous copies to a GPU.
        digests: add the digests of the samples (``digests``) to each batch, computed where the samples are read, and the
            samples' places in the global batch.
        deal_rows: returns, given the ids of a global batch, its places in the order in which they are dealt to the ranks,
            the same on every rank (``parallel/row_balancing.py``); None: by index. It runs where the samples are read.
    """

    def __init__(
        self, dataset: Dataset, *, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, order: Order = "single", seed: int = 1234,
        num_workers: int = 0, pin_memory: bool = False, digests: bool = False, deal_rows: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"micro_batch_size ({micro_batch_size}) must be at least 1 and dp_rank ({dp_rank}) below dp_size ({dp_size})"
            )
        self.dataset, self.order, self.seed, self.pin_memory = dataset, order, seed, pin_memory
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers > 0 else None
        self._ahead: tuple[tuple[int, int], list[Future[Batch]]] | None = None
        self._digests, self._deal_rows, self._closed = digests, deal_rows, False

    def step(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return this rank's micro-batches of the global batch that follows ``consumed_samples``.

        Returns:
            ``num_microbatches`` dicts of ``tokens`` and ``labels`` int64 [b, s], ``loss_mask`` float32 [b, s],
            ``sample_ids`` int64 [b]; with ``digests`` also ``digests`` float64 [b] and ``places`` int64 [b], on the host.
        Raises:
            DataError: the data are damaged or exhausted; errors of background threads are raised here, too.
            RuntimeError: the loader is closed.
        """
        if self._closed:
            raise RuntimeError("BatchLoader.step() after close()")
        if self._pool is None:
            ids = self.global_sample_ids(consumed_samples, num_microbatches)
            return [self._batch(ids, places) for places in self._my_places(ids)]
        key = (consumed_samples, num_microbatches)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == key:
            futures = ahead[1]
        else:
            if ahead is not None:
                _discard(ahead[1])
            futures = self._submit(*key)
        batches = [future.result() for future in futures]
        self._read_ahead(consumed_samples + self.samples_per_step(num_microbatches), num_microbatches)
        return batches

    def samples_per_step(self, num_microbatches: int) -> int:
        return num_microbatches * self.micro_batch_size * self.dp_size

    def global_sample_ids(self, consumed_samples: int, num_microbatches: int) -> np.ndarray:
        """Return the ids of the global batch of all ranks, int64, in order; the same on every rank."""
        return next_ids(
            self.order, consumed_samples, self.samples_per_step(num_microbatches), len(self.dataset), self.seed
        )

    def close(self) -> None:
        """Stop the threads and discard prefetched batches."""
        self._closed = True
        self._ahead = None
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _my_places(self, ids: np.ndarray) -> np.ndarray:
        # the places of this rank's samples in the global batch ``ids``, int64 [num_microbatches, b]
        places = np.arange(ids.size) if self._deal_rows is None else self._deal_rows(ids)
        return deal(places, self.micro_batch_size, self.dp_rank, self.dp_size)

    def _submit(self, consumed_samples: int, num_microbatches: int) -> list[Future[Batch]]:
        assert self._pool is not None
        ids = self.global_sample_ids(consumed_samples, num_microbatches)
        own_places = self._pool.submit(
            self._my_places, ids
        )  # before its batches in the queue: none of them waits for it in vain
        return [self._pool.submit(self._dealt_batch, ids, own_places, index) for index in range(num_microbatches)]

    def _dealt_batch(self, ids: np.ndarray, mine: Future[np.ndarray], index: int) -> Batch:
        return self._batch(ids, mine.result()[index])

    def _read_ahead(self, consumed_samples: int, num_microbatches: int) -> None:
        try:
            self._ahead = ((consumed_samples, num_microbatches), self._submit(consumed_samples, num_microbatches))
        except DataError:
            self._ahead = None  # the data end here; an error only if a further batch is requested

    def _batch(self, ids: np.ndarray, places: np.ndarray) -> Batch:
        # read the samples of one micro-batch, those at ``places`` of the global batch
        ids = ids[places]
        samples = [self.dataset[int(i)] for i in ids]
        batch = {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}
        batch["sample_ids"] = torch.from_numpy(ids)  # int64 [b]; shares memory with an array of this step alone
        if self.pin_memory:
            batch = {name: value.pin_memory() for name, value in batch.items()}
        if self._digests:
            batch["digests"] = torch.tensor([sample_digest(sample) for sample in samples], dtype=torch.float64)
            batch["places"] = torch.from_numpy(places.copy())
        return batch


def _discard(futures: list[Future[Batch]]) -> None:
    # discard a wrong prediction: cancel what has not started, and ignore errors of the rest
    for future in futures:
        future.cancel()


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
    # ``count`` consecutive ids from ``consumed`` on, out of ``total``
    if consumed < 0 or consumed + count > total:
        raise DataError(
            f"samples {consumed} to {consumed + count - 1} are wanted, the data set was built with {total}: it was built for fewer steps;"
            " --dataloader-type cyclic starts over at its end"
        )
    return np.arange(consumed, consumed + count, dtype=np.int64)


def cyclic_ids(consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    # ids of an endless sequence of epochs, each with its own permutation; a batch may span the end of an epoch
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
    # the permutation of an epoch, int64 [total], read-only; it never changes, as numpy has frozen RandomState's streams
    permutation = np.random.RandomState(
        np.array([seed & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32], np.uint32)
    ).permutation(total)
    permutation.flags.writeable = False
    return permutation


def deal(ids: np.ndarray, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Return this rank's share of a global batch, [num_microbatches, micro_batch_size].

    Raises:
        ValueError: the batch does not divide into whole micro-batches, or there is no such rank.
    """
    if ids.size % (micro_batch_size * dp_size) or not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"cannot deal {ids.size} samples to rank {dp_rank} of {dp_size} in micro-batches of {micro_batch_size}"
        )
    return ids.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
