"""Sequences of each step: the global batch size, --balance-rows, and whether ranks that share sequences read the same.

The size follows from consumed samples alone: constant, growing evenly, or in steps. A dry run asks for it, so torch is
not imported here.
"""

# A cp rank plans by its own mask what others send to it. Ranks with different masks would wait for rows that nobody
# sends, or compute with the wrong ones; so would stages of a pipeline with different lengths or documents. So with
# several cp or pp ranks each step begins with a comparison of a few bytes on the host; the device is not waited for.

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_sp.config.rules_training import steps_in_samples
from megatron_sp.config.schema import BatchConfig, Config
from megatron_sp.data.dataset import Dataset, RowDataset
from megatron_sp.utils.errors import ConfigError, DataError
from megatron_sp.utils.numbers import divide

if TYPE_CHECKING:
    from megatron_sp.comm.groups import ParallelGroups
    from megatron_sp.parallel.forward_context import MicroBatch
    from megatron_sp.parallel.load_balancing import RowDealer

_FOR_EVER = 10**15  # a step after all changes
_ROWS_LOOKED_AT = 8  # for the warning of --balance-rows
_READ_BY_THE_HOST = ("documents", "length")
_NOBODY = -(2**62)


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of a run, for ``dp_size`` ranks."""

    micro_batch_size: int  # sequences per forward pass and data-parallel rank
    dp_size: int
    full: int  # global batch size after ramp-up, or the last of the steps
    start: int = 0  # first batch size of the ramp-up
    increment: int = 0
    ramp_samples: int = 0  # length of the ramp-up; 0: there is none
    steps: tuple[tuple[int, int], ...] = ()  # (samples, global batch size of steps that begin after so many), from 0 on
    eval_size: int | None = None  # global batch size of validation and test; None: ``full``

    @classmethod
    def from_config(cls, config: BatchConfig, dp_size: int, seq_length: int | None = None) -> BatchPlan:
        """Create the plan of a validated configuration."""
        full = config.global_batch_size or config.micro_batch_size * dp_size
        start, increment, ramp_samples = config.rampup_batch_size or (full, 0, 0)
        steps = steps_in_samples(config, seq_length or 1)
        return cls(
            config.micro_batch_size, dp_size, full, start, increment, ramp_samples, steps, config.eval_global_batch_size
        )

    @property
    def evaluation(self) -> int:
        return self.eval_size or self.full

    @property
    def first(self) -> int:
        return self.global_batch_size(0)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the batch size of the step after ``consumed_samples``."""
        if self.steps:
            return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1][1]
        if not self._grows(consumed_samples):
            return self.full
        num_increments = divide(self.full - self.start, self.increment)
        stage = int(consumed_samples * num_increments / self.ramp_samples)
        return min(self.start + stage * self.increment, self.full)

    def _grows(self, consumed_samples: int) -> bool:
        # whether the ramp-up goes on after ``consumed_samples``
        has_ramp = self.ramp_samples > 0 and self.increment > 0 and self.start < self.full
        return has_ramp and consumed_samples <= self.ramp_samples

    def _same_size(self, consumed_samples: int) -> int | None:
        # how many steps from ``consumed_samples`` on certainly have the same size; None: all
        if not self.steps:
            return 1 if self._grows(consumed_samples) else None
        later = bisect_right(self.steps, consumed_samples, key=lambda step: step[0])
        if later == len(self.steps):
            return None
        return -(-(self.steps[later][0] - consumed_samples) // self.steps[later - 1][1])

    def num_microbatches(self, consumed_samples: int) -> int:
        return divide(self.global_batch_size(consumed_samples), self.micro_batch_size * self.dp_size)

    def samples_after(self, num_steps: int, consumed: int = 0) -> int:
        """Return the samples consumed after ``num_steps`` more steps."""
        while num_steps > 0:
            same = self._same_size(consumed)
            count = num_steps if same is None else min(same, num_steps)
            consumed, num_steps = consumed + count * self.global_batch_size(consumed), num_steps - count
        return consumed

    def steps_for_tokens(
        self, tokens: int, length: Callable[[int], int], start: tuple[int, int, int] = (0, 0, 0)
    ) -> int:
        """Return the steps until ``tokens`` are consumed."""
        step, samples, done = start
        while done < tokens:
            size, same = self.global_batch_size(samples), self._same_size(samples)
            last = length(step + 1)
            count = 1
            if last == length(_FOR_EVER):  # nothing but the size of a batch changes any more
                count = -(-(tokens - done) // (size * last))
                count = count if same is None else min(count, same)
            step, samples, done = step + count, samples + count * size, done + count * size * last
        return step - start[0]

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Return the steps to at most ``samples``; a last partial batch is dropped."""
        steps = 0
        while (fit := (samples - consumed) // (size := self.global_batch_size(consumed))) > 0:
            same = self._same_size(consumed)
            count = fit if same is None else min(same, fit)
            consumed, steps = consumed + count * size, steps + count
        return steps


def require_same_sequences(micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> None:
    """Raise DataError on every rank if ranks of a replica have read different sequences. Collective."""
    if groups.cp.size() == groups.pp.size() == 1:
        return
    import torch

    from megatron_sp.comm.collectives import all_reduce

    digest = hashlib.sha256()
    for batch in micro_batches:
        digest.update(str(tuple(batch["tokens"].shape)).encode())
        for name in _READ_BY_THE_HOST:
            digest.update(f"{name}: ".encode() + (batch[name].cpu().numpy().tobytes() if name in batch else b"none"))
    own_digest = int.from_bytes(digest.digest()[:7], "little")
    digests = torch.full((groups.dp_size, 2), _NOBODY, dtype=torch.int64)
    digests[groups.dp_rank] = torch.tensor([own_digest, -own_digest])  # largest, and smallest with another sign
    all_reduce(digests, groups.control, "max")
    differ = [i for i, (largest, smallest) in enumerate(digests.tolist()) if largest not in (-smallest, _NOBODY)]
    if differ:
        ranks, pipelined = groups.cp.size() * groups.sp.size() * groups.tp.size(), groups.pp.size() > 1
        firsts = [(stage * groups.dp_size + differ[0]) * ranks for stage in range(groups.pp.size())]
        which = ", ".join(f"{first} to {first + ranks - 1}" if ranks > 1 else f"{first}" for first in firsts)
        sizes = f"pp {groups.pp.size()} * " if pipelined else ""
        sizes += f"cp {groups.cp.size()} * sp {groups.sp.size()} * tp {groups.tp.size()}"
        raise DataError(
            f"ranks {which} ({sizes} = {groups.pp.size() * ranks}) share each sequence, and have read sequences of"
            " different lengths or documents: see that all hosts have the same data files and flags"
        )


def row_dealer(config: Config, dataset: Dataset, dp_size: int) -> RowDealer | None:
    """Return what deals the rows of ``dataset`` by their attention; None: by index. Raises ConfigError."""
    if not config.parallel.balance_rows:
        return None
    if not isinstance(dataset, RowDataset):
        raise ConfigError(
            "--balance-rows needs rows of packed documents whose lengths an index says, and this task's data have none:"
            " leave it out"
        )
    from megatron_sp.parallel.load_balancing import RowDealer

    model = config.model
    return RowDealer(
        dataset.document_lengths, config.batch.micro_batch_size, dp_size, not model.is_bert, model.window_size
    )


def warning_about_documents(config: Config, dataset: Dataset | None) -> str | None:
    """Return a warning if --balance-rows goes by other lengths than attention sees."""
    if not config.parallel.balance_rows or not isinstance(dataset, RowDataset):
        return None
    count = min(_ROWS_LOOKED_AT, len(dataset))
    wrong = 0
    for i in range(count):
        documents = dataset[i]["documents"]  # the number of each token's, int64 [s]
        starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
        lengths = np.diff(starts, append=documents.size)
        wrong += not np.array_equal(lengths, dataset.document_lengths(i))
    if not wrong:
        return None
    return (
        f"--balance-rows takes documents to end where those of the data files do, and in {wrong} of {count} rows looked"
        " at the tokens that end documents are elsewhere: the ranks' work may stay uneven. megatron-sp preprocess"
        " --append-eod puts one at each end"
    )
