"""Global batch size and its ramp-up, as a function of consumed samples alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import BatchConfig
from megatron_sp.utils.numbers import divide


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of a run.

    Attributes:
        micro_batch_size: sequences per forward pass and data-parallel rank.
        dp_size: number of data-parallel ranks.
        full: global batch size after ramp-up.
        start, increment, ramp_samples: first batch size, increment and length of the ramp-up; ``ramp_samples`` 0: no
            ramp-up.
    """

    micro_batch_size: int
    dp_size: int
    full: int
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def from_config(cls, config: BatchConfig, dp_size: int) -> BatchPlan:
        """Create the plan from a ``config`` that has been validated for ``dp_size`` ranks."""
        full = config.global_batch_size or config.micro_batch_size * dp_size
        start, increment, ramp_samples = config.rampup_batch_size or (full, 0, 0)
        return cls(config.micro_batch_size, dp_size, full, start, increment, ramp_samples)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the global batch size of the step that begins after ``consumed_samples``."""
        if self.ramp_samples == 0 or self.increment == 0 or consumed_samples > self.ramp_samples or self.start >= self.full:
            return self.full
        num_increments = divide(self.full - self.start, self.increment)
        stage = int(consumed_samples * num_increments / self.ramp_samples)
        return min(self.start + stage * self.increment, self.full)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per data-parallel rank of the step that begins after ``consumed_samples``."""
        return divide(self.global_batch_size(consumed_samples), self.micro_batch_size * self.dp_size)

    def samples_after(self, num_steps: int, consumed: int = 0) -> int:
        """Return the number of samples consumed after ``num_steps`` more steps, beginning at ``consumed``."""
        for step in range(num_steps):
            size = self.global_batch_size(consumed)
            if size == self.full:  # the ramp is over: the rest is a product
                return consumed + (num_steps - step) * self.full
            consumed += size
        return consumed

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Return the number of steps from ``consumed`` samples to at most ``samples``; a last partial batch is dropped."""
        steps = 0
        while consumed + (size := self.global_batch_size(consumed)) <= samples:
            if size == self.full:
                return steps + (samples - consumed) // self.full
            consumed, steps = consumed + size, steps + 1
        return steps
