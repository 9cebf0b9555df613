"""Saves of a run: when they happen, and how their outcome is reported.

--async-save       copy and go on; hashing, writing and the commit run in a thread (``checkpoint/background.py``)
--no-async-save    training waits until the checkpoint is complete
"""

# The outcome of a background save is reported at the first step after its end, on every rank. A failure has the same
# effect in both modes: older checkpoints stay, the next save tries again, and the exit code is 6 only if the last
# save fails. Training always waits for the last save of a run and for that on a signal.
#
# With --save-interval auto the interval is the one that minimizes the expected loss of time. A save stops training
# for C seconds; a failure, one in M seconds, costs the steps since the last save. The optimal interval is
#
#     sqrt(2 C M)                                       (Young 1974: C much smaller than M)
#     sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C  (Daly 2006, used here; M for C >= 2M)
#
# C is measured: the time for which the last save blocked the training thread, the maximum over ranks; so is the
# length of a step. M is given (--mean-time-between-failures-hours), or taken from the largest run with published
# failures. The interval is never so short that a background save would still be running at the next, and never longer
# than an hour. Sources: CACM 17(9), 530; Future Generation Computer Systems 22(3), 303; arXiv:2407.21783, section
# 3.3.4.

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_sp.checkpoint.checkpointer import SaveReport
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.comm.groups import Group, background_group
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.config.schema import CheckpointConfig
from megatron_sp.training.nan_checks import require_finite_weights
from megatron_sp.utils.format import format_bytes

if TYPE_CHECKING:
    from megatron_sp.checkpoint.background import BackgroundSaves
    from megatron_sp.training.parts import Run

_PATIENCE_S = 2.0  # for a commit that is almost complete when a peer is lost
_KEPT = "older checkpoints are as they were"


class Saves:
    """The checkpoints that a run with --save writes. Collective but for ``poll`` and ``close``."""

    def __init__(self, run: Run) -> None:
        self._run, self._context = run, run.context
        checkpoint, step = run.context.config.checkpoint, run.state.progress.step
        stored = {} if run.origin is None or run.origin.finetunes else run.origin.stored
        self.interval = SaveInterval(
            checkpoint, run.context.launch.world_size, run.context.groups.control, step, stored.get("save_interval")
        )  # fmt: skip
        self._write_s = 0.0
        # the checkpoint that the run resumes from is complete: a signal before the first step leaves nothing to write
        self.saved_step, self.failed = step if run.continues_own else -1, False
        self._stall_s, self._stalled_until = 0.0, 0.0
        self.peer_is_lost = False  # so a save cannot complete: ``close`` waits for it only briefly
        self._closing = False
        self._background: BackgroundSaves | None = None
        is_complete = run.context.config.batch.skip_train or step >= run.plan.train_iters
        if not checkpoint.async_save or not checkpoint.save_interval or is_complete:
            return
        config, world_size = run.context.config, run.context.launch.world_size
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        from megatron_sp.checkpoint.background import BackgroundSaves
        from megatron_sp.estimate.rough import copy_bytes

        background = BackgroundSaves(run.checkpointer, background_group(world_size, timeout))
        available = run.memory_estimate.spare_host_bytes(copy_bytes(config, world_size))
        problem = background.reserve(self._tensors(), available)
        if problem is not None:
            self._context.console.line(
                f"saving in the background is off: {problem}; training waits for each save, as with --no-async-save"
            )
            return
        self._context.console.line(
            f"saving in the background: {format_bytes(background.num_bytes)} of host memory on each rank are kept for"
            " the copy"
        )
        run.train_step.before_update = background.join
        self._background = background

    def save(self) -> None:
        """Save this step, after waiting for the previous save."""
        background, step = self._background, self._run.state.progress.step
        began = time.monotonic()
        if background is None:
            self.save_last("training goes on")
        else:
            self._finish()
            self._context.watchdog.beat(f"copying step {step} for its save")
            background.start(step, *self._contents())
            self._stall_s, self._stalled_until = time.monotonic() - began, time.time()
        decided = self.interval.saved(step, time.monotonic() - began, self._write_s)
        if decided is not None:
            self._context.console.line(decided)
        self._run.reporter.pause_ended()

    def save_last(self, if_not: str = _KEPT) -> None:
        """Save this step, unless it is saved already, and wait for it."""
        # if_not: the consequence of a failure, for the message
        run = self._run
        began, step = time.monotonic(), run.state.progress.step
        self._finish()
        if self.saved_step != step:
            self._context.watchdog.beat(f"saving step {step}")
            report = run.checkpointer.save(step, *self._contents())
            self._note(report, time.monotonic() - began, if_not)
        run.reporter.pause_ended()

    def poll(self) -> None:
        """Report the outcome of the background save, if it has ended."""
        self.interval.step_begins()
        if self._background is not None:
            self._note_background(self._background.poll())

    def _finish(self) -> None:
        if self._background is not None and self._background.in_flight:
            self._context.watchdog.beat("waiting for a save in the background")
            self._note_background(self._background.wait())

    def close(self) -> None:
        """Wait for a save in progress, however the run ends."""
        if self._background is None or not self._background.in_flight:
            return
        self._closing = True
        self._context.watchdog.beat("waiting for a save in the background")
        try:
            self._note_background(self._background.wait(_PATIENCE_S if self.peer_is_lost else None))
        except Exception as error:  # the run ends with an error of its own
            self._context.console.line(f"warning: a save in the background has failed: {error}")

    def _note_background(self, report: SaveReport | None) -> None:
        if report is None:  # it has not ended
            return
        self._write_s = report.seconds
        if_not = _KEPT if self._closing else "training goes on"
        self._note(report, self._stall_s, if_not, background_s=report.seconds, time=self._stalled_until)

    def _note(self, report: SaveReport, stall_s: float, if_not: str, **more: float) -> None:
        run = self._run
        self.failed = not report.saved
        if report.saved:
            self.saved_step = report.step
            beside = f", {more['background_s']:.1f} s beside training" if more else ""
            self._context.console.line(f"saved step {report.step} in {stall_s:.{2 if more else 1}f} s{beside}")
            if self._closing:  # the run has ended: its final status must not be overwritten
                self._context.status.fields["saved_step"] = report.step
            else:
                self._context.status.write("running", step=run.state.progress.step, saved_step=report.step)
        else:
            self._context.console.line(f"warning: step {report.step} was not saved: {report.reason}; {if_not}")
        run.metrics.write("save", step=report.step, seconds=stall_s, saved=report.saved, **more)

    def _tensors(self) -> dict[str, GlobalTensor]:
        tensors = self._run.state.weights()
        if not self._context.config.checkpoint.no_save_optim:
            tensors.update(self._run.state.optimizer_tensors())
        return tensors

    def _contents(self) -> tuple[dict[str, GlobalTensor], dict[str, Any]]:
        # tensors and ``state.json`` of this step, if its weights are finite. Collective
        run = self._run
        require_finite_weights((unit.master for unit in run.state.units), self._context.groups, run.state.progress.step)
        state = run.state.to_json(
            self._context.config, run.plan.lr_schedule.state(), run.data.datasets.fingerprint, run.layout.record
        )  # fmt: skip
        interval = self.interval.state()
        return self._tensors(), state if interval is None else {**state, "save_interval": interval}


FIRST_STEPS = 10  # before the first save, when nothing has been measured
LONGEST_S = 3600.0
DEVICE_HOURS_PER_FAILURE = 50_000.0  # 419 unexpected interruptions in 54 days of 16,384 GPUs
_SPARE = 1.25  # factor on the time of a background save


def best_interval_s(stall_s: float, failure_s: float) -> float:
    """Return the optimal seconds between saves that cost ``stall_s``, with a failure in ``failure_s``."""
    ratio = stall_s / (2 * failure_s)
    if ratio >= 1:
        return failure_s
    return math.sqrt(2 * stall_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


class SaveInterval:
    """Schedule of saves, the same on every rank; ``stored`` is ``state()`` from the checkpoint."""

    def __init__(
        self, checkpoint: CheckpointConfig, world_size: int, group: Group, start: int, stored: Any = None
    ) -> None:
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
        return {"steps": self.steps, "failure_s": self._failure_s} if self.is_auto and self.steps is not None else None

    def step_begins(self) -> None:
        # record the beginning of a step: the time between two calls is the length of a step, pauses included
        now = time.monotonic()
        if self._step_began is not None:
            self._lengths.append(now - self._step_began)
        self._step_began = now

    def is_due(self, step: int) -> bool:
        if self.is_auto:
            return step - self._last >= (self.steps or FIRST_STEPS)
        return self.steps is not None and step % self.steps == 0

    def saved(self, step: int, stall_s: float, write_s: float) -> str | None:
        """Record a save and, with "auto", choose the next interval; return a line if it has changed noticeably."""
        # collective with "auto"
        self._last = step
        if not self.is_auto:
            return None
        measured = [stall_s, statistics.median(self._lengths) if self._lengths else 0.0, write_s]
        stall_s, step_s, write_s = (max(column) for column in zip(*gather_json(measured, self._group), strict=True))
        if step_s <= 0:
            return None
        best_s = best_interval_s(stall_s, self._failure_s)
        low, high = math.ceil(max(_SPARE * write_s / step_s, 1)), math.floor(max(LONGEST_S / step_s, 1))
        before, self.steps = self.steps, max(low, min(high, round(best_s / step_s)))
        if before is not None and 0.8 < self.steps / before < 1.25:
            return None
        bound = " (the longest that it may be)" if self.steps == high < best_s / step_s else ""
        if self.steps == low > best_s / step_s and write_s > 0:
            bound = " (or the next save would wait for the one before)"
        return (
            f"--save-interval auto: every {self.steps} steps{bound}: a save stops training for {stall_s:.2g} s, a step"
            f" takes {step_s:.2g} s, and one failure in {self._failure_s / 3600:,.4g} h is assumed"
            " (--mean-time-between-failures-hours)"
        )
