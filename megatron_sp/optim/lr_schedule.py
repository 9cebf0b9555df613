"""Learning rate and weight decay as pure functions of the run's progress, counted in samples.

A step's value depends on the samples of the steps *before* it; skipped steps do not count. Shapes, names and bits are
Megatron's (optimizer_param_scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megatron_sp.config.rules_training import horizon_in_tokens
from megatron_sp.config.schema import BatchConfig, OptimizerConfig


@dataclass(frozen=True)
class LRSchedule:
    """A resolved schedule; lengths are in samples."""

    peak: float  # learning rate at the end of warm-up
    floor: float  # at the end of decay
    start: float  # at the start of warm-up
    warmup: float
    horizon: int  # warm-up plus decay
    style: str
    wsd_style: str
    wsd_length: int
    decay_start: float  # ramp of the weight decay over the ``length`` of the run
    decay_end: float
    decay_style: str
    length: int
    decoupled_peak: float | None = None  # of word embeddings and output layer; None: as all others
    decoupled_floor: float | None = None
    unit: Literal["tokens"] | None = None  # of ``warmup`` and ``horizon``, where sequences have several lengths

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, batch: BatchConfig, samples_after: Callable[[int], int]
    ) -> LRSchedule:
        """Create the schedule from the flags; ``samples_after(n)`` is the number of samples of the first n steps."""

        def samples(iters: int | None, in_samples: int | None) -> int | None:
            return in_samples if in_samples else samples_after(iters) if iters else None

        length = samples(batch.train_iters, batch.train_samples) or 1
        horizon = samples(config.lr_decay_iters, config.lr_decay_samples) or length
        if config.lr_warmup_fraction is not None:
            warmup: float = config.lr_warmup_fraction * horizon  # a part of a sample is one here
        else:
            warmup = samples(config.lr_warmup_iters, config.lr_warmup_samples) or 0
        wsd_length = config.lr_wsd_decay_samples or 0
        last = config.lr_decay_iters or batch.train_iters
        if config.lr_wsd_decay_iters and last:  # the last steps, not the first
            wsd_length = horizon - samples_after(max(last - config.lr_wsd_decay_iters, 0))
        unit: Literal["tokens"] | None = None
        if (in_tokens := horizon_in_tokens(config, batch)) is not None:
            unit, horizon = "tokens", in_tokens
            fraction = config.lr_warmup_fraction
            warmup = (config.lr_warmup_tokens or 0) if fraction is None else fraction * horizon
        decay = config.weight_decay
        return cls(
            peak=config.lr or 0.0, floor=config.min_lr, start=config.lr_warmup_init, warmup=warmup, horizon=horizon,
            style=config.lr_decay_style, wsd_style=config.lr_wsd_decay_style, wsd_length=wsd_length,
            decay_start=decay if config.start_weight_decay is None else config.start_weight_decay,
            decay_end=decay if config.end_weight_decay is None else config.end_weight_decay,
            decay_style=config.weight_decay_incr_style, length=length, decoupled_peak=config.decoupled_lr,
            decoupled_floor=config.decoupled_min_lr, unit=unit,
        )  # fmt: skip

    def lr(self, samples: int) -> float:
        """Return a step's learning rate, given the ``samples`` (or tokens: ``unit``) before it."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.start + (self.peak - self.start) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.horizon:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
        if self.style == "WSD":
            begin, share = self.horizon - self.wsd_length, 1.0
            if samples > begin and self.wsd_length > 0:
                done = (samples - begin) / self.wsd_length
                if self.wsd_style == "linear":
                    share = 1.0 - done
                elif self.wsd_style == "cosine":
                    share = 0.5 * (math.cos(math.pi * done) + 1.0)
                elif self.wsd_style == "minus_sqrt":
                    share = 1.0 - math.sqrt(done)
                else:
                    share = 2.0 * 0.5**done - 1.0  # exponential, shifted so that it ends at 0
            return self.floor + share * (self.peak - self.floor)
        done = (samples - self.warmup) / max(self.horizon - self.warmup, 1)
        share = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.floor + share * (self.peak - self.floor)

    def decoupled_lr(self, samples: int) -> float | None:
        # of word embeddings and output layer; None: ``lr``
        if self.decoupled_peak is None:
            return None
        floor = self.floor if self.decoupled_floor is None else self.decoupled_floor
        return replace(self, peak=self.decoupled_peak, floor=floor).lr(samples)

    def weight_decay(self, samples: int) -> float:
        if self.decay_style == "constant" or samples > self.length:
            return self.decay_end
        done = samples / self.length
        share = done if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.decay_start + share * (self.decay_end - self.decay_start)

    def state(self) -> dict[str, Any]:
        # what there is not is left out, as in older versions
        return {name: value for name, value in asdict(self).items() if value is not None}
