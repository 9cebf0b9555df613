"""Micro-batches of a step for one data parallel rank, prefetched in the background."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_sp.data.dataset import Dataset, sample_digest
from megatron_sp.utils.errors import DataError

Order = Literal["single", "cyclic"]
Batch = dict[str, Tensor]


class BatchLoader:
    """Loader of the batches of one data set for one data parallel rank.

    Args:
        digests: add to each batch the digests of its samples and their places in the global batch.
        deal_rows: given the ids of a global batch, its places in the order in which they are dealt to the ranks.
    """

    # The order of the samples is a pure function of their number, so a resumed run needs no other state than the number
    # of consumed samples, and another layout only distributes the same ids differently.
    # Threads suffice: the time goes into file reads and numpy copies. After each step the loader predicts that the next
    # one continues where it ended, with as many micro-batches, and reads ahead; a wrong prediction (a batch size ramp,
    # a skip on resume) is discarded and wastes only the reads.

    def __init__(
        self, dataset: Dataset, *, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, order: Order = "single",
        seed: int = 1234, num_workers: int = 0, pin_memory: bool = False, digests: bool = False,
        deal_rows: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            rank = f"dp_rank ({dp_rank}) below dp_size ({dp_size})"
            raise ValueError(f"micro_batch_size ({micro_batch_size}) must be at least 1 and {rank}")
        self.dataset, self.order, self.seed, self.pin_memory = dataset, order, seed, pin_memory
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        # without threads it reads in the caller's, and not ahead
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers > 0 else None
        self._ahead: tuple[tuple[int, int], list[Future[Batch]]] | None = None
        self._digests, self._deal_rows, self._closed = digests, deal_rows, False

    def step(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return this rank's micro-batches of the global batch that follows ``consumed_samples``.

        Each has ``tokens`` and ``labels`` int64 [b, s], ``loss_mask`` float32 [b, s], ``sample_ids`` int64 [b]; with
        ``digests`` also ``digests`` float64 [b] and ``places`` int64 [b], on the host.

        Raises:
            DataError: the data are damaged or exhausted.
        """
        if self._closed:
            raise RuntimeError("BatchLoader.step() after close()")
        if self._pool is None:
            ids = self.global_sample_ids(consumed_samples, num_microbatches)
            return [self._batch(ids, places) for places in self._own_places(ids)]
        key = (consumed_samples, num_microbatches)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == key:
            futures = ahead[1]
        else:
            for future in ahead[1] if ahead is not None else ():
                future.cancel()  # what has started goes on, and its errors are nobody's
            futures = self._submit(*key)
        batches = [future.result() for future in futures]
        self._read_ahead(consumed_samples + num_microbatches * self.micro_batch_size * self.dp_size, num_microbatches)
        return batches

    def _read_ahead(self, consumed_samples: int, num_microbatches: int) -> None:
        try:
            self._ahead = ((consumed_samples, num_microbatches), self._submit(consumed_samples, num_microbatches))
        except DataError:
            self._ahead = None  # the data end here; an error only if a further batch is requested

    def global_sample_ids(self, consumed_samples: int, num_microbatches: int) -> np.ndarray:
        """Return the ids of the global batch of all ranks, int64, in order; the same on every rank."""
        count = num_microbatches * self.micro_batch_size * self.dp_size
        return next_ids(self.order, consumed_samples, count, len(self.dataset), self.seed)

    def close(self) -> None:
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

    def _own_places(self, ids: np.ndarray) -> np.ndarray:
        # the places of this rank's samples in the global batch ``ids``, int64 [num_microbatches, b]
        places = np.arange(ids.size) if self._deal_rows is None else self._deal_rows(ids)
        return deal(places, self.micro_batch_size, self.dp_rank, self.dp_size)

    def _submit(self, consumed_samples: int, num_microbatches: int) -> list[Future[Batch]]:
        assert self._pool is not None
        ids = self.global_sample_ids(consumed_samples, num_microbatches)
        # queued before the batches that wait for it: with one thread it would otherwise never run
        places = self._pool.submit(self._own_places, ids)
        return [self._pool.submit(self._dealt_batch, ids, places, index) for index in range(num_microbatches)]

    def _dealt_batch(self, ids: np.ndarray, places: Future[np.ndarray], index: int) -> Batch:
        return self._batch(ids, places.result()[index])

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


def next_ids(order: Order, consumed: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return the global sample ids after ``consumed`` of ``total`` samples, int64 [count]. Raises DataError."""
    if order == "single":
        if consumed < 0 or consumed + count > total:
            wanted = f"samples {consumed} to {consumed + count - 1} are wanted, the data set was built with {total}"
            way = "it was built for fewer steps; --dataloader-type cyclic starts over at its end"
            raise DataError(f"{wanted}: {way}")
        return np.arange(consumed, consumed + count, dtype=np.int64)
    if order != "cyclic":
        raise ValueError(f"dataloader_type ({order}) must be 'single' or 'cyclic'")
    if total < 1:
        raise DataError("the data set has no samples")
    parts = []
    while count > 0:  # a batch may span the end of an epoch
        epoch, start = divmod(consumed, total)
        part = epoch_permutation(total, seed, epoch)[start : start + count]
        parts.append(part)
        consumed, count = consumed + part.size, count - part.size
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@functools.lru_cache(maxsize=2)
def epoch_permutation(total: int, seed: int, epoch: int) -> np.ndarray:
    # read-only; it does not depend on the number of ranks
    key = np.array([seed & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32], np.uint32)
    permutation = np.random.RandomState(key).permutation(total)  # numpy has frozen RandomState's streams
    permutation.flags.writeable = False
    return permutation


def deal(ids: np.ndarray, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Return this rank's share of a global batch, [num_microbatches, micro_batch_size]."""
    if ids.size % (micro_batch_size * dp_size) or not 0 <= dp_rank < dp_size:
        batches = f"in micro-batches of {micro_batch_size}"
        raise ValueError(f"cannot deal {ids.size} samples to rank {dp_rank} of {dp_size} {batches}")
    return ids.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
