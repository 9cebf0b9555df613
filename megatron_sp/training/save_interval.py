"""Interval between saves: a fixed number of steps, or, with --save-interval auto, the one that minimizes the expected loss of time.

A save stops training for C seconds; a failure, one in M seconds, costs the steps since the last save. The optimal
interval is

    sqrt(2 C M)                                       (Young 1974: C much smaller than M)
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C  (Daly 2006, used here; M for C >= 2M)

C is measured: the time for which the last save blocked the training thread, the maximum over ranks; so is the length of
a step. M is given (--mean-time-between-failures-hours), or taken from the largest run with published failures. The
interval is never so short that a background save would still be running at the next, and never longer than an hour.
Sources: CACM 17(9), 530; Future Generation Computer Systems 22(3), 303; arXiv:2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any

from megatron_sp.comm.groups import Group
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.config.schema import CheckpointConfig

FIRST_STEPS = 10  # before the first save, when nothing has been measured
LONGEST_S = 3600.0
DEVICE_HOURS_PER_FAILURE = 50_000.0  # 419 unexpected interruptions in 54 days of 16,384 GPUs
_SPARE = 1.25  # factor on the time of a background save


def best_interval_s(stall_s: float, failure_s: float) -> float:
    """Return the optimal seconds of training between two saves that cost ``stall_s`` each, with one failure in ``failure_s``."""
    ratio = stall_s / (2 * failure_s)
    if ratio >= 1:
        return failure_s
    return math.sqrt(2 * stall_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


class SaveInterval:
    """Schedule of saves, the same on every rank.

    Args:
        checkpoint: checkpoint section of the configuration.
        world_size: number of processes, for the default failure rate.
        group: group over which ranks agree on measurements; must support CPU tensors.
        start: step at which the process begins.
        stored: ``state()`` from the checkpoint that is resumed; ignored if it is anything else.

    Attributes:
        steps: steps between two saves; None without saves, or before the first measurement.
    """

    def __init__(self, checkpoint: CheckpointConfig, world_size: int, group: Group, start: int, stored: Any = None) -> None:
        self.is_auto = checkpoint.save_interval == "auto"
        self.steps = None if isinstance(checkpoint.save_interval, str) else checkpoint.save_interval
        self._group, self._last = group, start
        hours = checkpoint.mean_time_between_failures_hours
        self._failure_s = 3600 * (hours if hours is not None else DEVICE_HOURS_PER_FAILURE / world_size)
        self._lengths: deque[float] = deque(maxlen=200)
        self._step_began: float | None = None
        if self.is_auto and isinstance(stored, dict) and type(stored.get("steps")) is int and stored["steps"] > 0:
            self.steps = stored["steps"]

    def state(self) -> dict[str, Any] | None:
        """Return the state for ``state.json``; None unless the interval is automatic and known."""
        return {"steps": self.steps, "failure_s": self._failure_s} if self.is_auto and self.steps is not None else None

    def step_begins(self) -> None:
        """Record the beginning of a step: the time between two calls is the length of a step, pauses included."""
        now = time.monotonic()
        if self._step_began is not None:
            self._lengths.append(now - self._step_began)
        self._step_began = now

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step``."""
        if self.is_auto:
            return step - self._last >= (self.steps or FIRST_STEPS)
        return self.steps is not None and step % self.steps == 0

    def saved(self, step: int, stall_s: float, write_s: float) -> str | None:
        """Record a save of ``step`` and, with "auto", choose the next interval. Collective with "auto".

        Args:
            stall_s: seconds for which the save stopped this rank.
            write_s: seconds that the last background save took; 0 if there was none.
        Returns:
            With "auto", a log line if the interval has changed noticeably; else None.
        """
        self._last = step
        if not self.is_auto:
            return None
        mine = [stall_s, statistics.median(self._lengths) if self._lengths else 0.0, write_s]
        stall_s, step_s, write_s = (max(column) for column in zip(*gather_json(mine, self._group), strict=True))
        if step_s <= 0:
            return None
        best_s = best_interval_s(stall_s, self._failure_s)
        low, high = math.ceil(max(_SPARE * write_s / step_s, 1)), math.floor(max(LONGEST_S / step_s, 1))
        before, self.steps = self.steps, max(low, min(high, round(best_s / step_s)))
        if before is not None and 0.8 < self.steps / before < 1.25:
            return None
        bound = " (the longest that it may be)" if self.steps == high < best_s / step_s else ""
        bound = " (or the next save would wait for the one before)" if self.steps == low > best_s / step_s and write_s > 0 else bound
        return (
            f"--save-interval auto: every {self.steps} steps{bound}: a save stops training for {stall_s:.2g} s, a step takes"
            f" {step_s:.2g} s, and one failure in {self._failure_s / 3600:,.4g} h is assumed (--mean-time-between-failures-hours)"
        )
