"""Global batch size of each step, as a function of consumed samples alone: constant, growing evenly, or in steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from megatron_sp.config.rules_training import steps_in_samples
from megatron_sp.config.schema import BatchConfig
from megatron_sp.utils.numbers import divide

_FOR_EVER = 10**15  # a step after all changes


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
