"""When a run saves, and what is said of it.

    --async-save       copy, go on; hashing, writing and the commit run in a thread (``checkpoint/background.py``)
    --no-async-save    training waits until the checkpoint stands

The outcome of a save in the background is told at the first step behind its end, on every rank; a failure counts as one that training has
waited for: older checkpoints stay, the next save tries again, and the exit code is 6 only if the last one fails. The last save of a run,
and that on a signal, is waited for in any case: there is nothing to go on with.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_sp.checkpoint.background import BackgroundSaves
from megatron_sp.checkpoint.checkpointer import SaveReport
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.comm.groups import background_group
from megatron_sp.estimate.memory_saves import copy_bytes
from megatron_sp.training.finite import require_finite_weights
from megatron_sp.training.save_interval import SaveInterval
from megatron_sp.utils.format import format_bytes

if TYPE_CHECKING:
    from megatron_sp.training.run import Run

_PATIENCE_S = 2.0  # for a commit that is nearly through, when a peer is lost
_KEPT = "older checkpoints are as they were"


class Saves:
    """The checkpoints that a run with --save writes. Collective, all but ``poll``, ``abandon`` and ``close``.

    Args:
        run: prepared.
        stored: state.json of the checkpoint that it goes on from.

    Attributes:
        saved_step: of the last checkpoint that stands, -1 without one.
        failed: whether the last save has failed.
    """

    def __init__(self, run: Run, stored: dict[str, Any] | None) -> None:
        self._run = run
        self._interval = SaveInterval(
            run.config.checkpoint, run.launch.world_size, run.groups.control, run.state.progress.step, (stored or {}).get("save_interval")
        )
        self._write_s = 0.0
        # what it goes on from stands already: a signal before the first step leaves nothing to be written
        self.saved_step, self.failed = run.state.progress.step if run.continues_own else -1, False
        self._stall_s, self._stalled_until = 0.0, 0.0
        self._lost = self._closing = False
        self._background: BackgroundSaves | None = None
        checkpoint = run.config.checkpoint
        is_complete = run.config.batch.skip_train or run.state.progress.step >= run.train_iters
        if checkpoint.async_save and checkpoint.save_interval and not is_complete:
            self._background = self._reserve()

    def _reserve(self) -> BackgroundSaves | None:
        run = self._run
        timeout = timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
        background = BackgroundSaves(run.checkpointer, background_group(run.launch.world_size, timeout))
        available = run.foresight.spare_host_bytes(copy_bytes(run.config, run.launch.world_size))
        problem = background.reserve(self._tensors(), available)
        if problem is not None:
            run.console.line(f"saving in the background is off: {problem}; training waits for each save, as with --no-async-save")
            return None
        run.console.line(
            f"saving in the background: {format_bytes(background.num_bytes)} of host memory on each rank are kept for the copy"
        )
        run.train_step.before_update = background.join
        return background

    def is_due(self) -> bool:
        """Whether --save-interval wants a save after the step that has just been taken."""
        return self._interval.is_due(self._run.state.progress.step)

    def save(self) -> None:
        """Save this step, in the background where that is on; waits for the save before it."""
        background, step = self._background, self._run.state.progress.step
        began = time.monotonic()
        if background is None:
            self._save_and_wait("training goes on")
        else:
            self._finish()
            self._run.watchdog.beat(f"copying step {step} for its save")
            self._require_finite()
            background.start(step, self._tensors(), self._state())
            self._stall_s, self._stalled_until = time.monotonic() - began, time.time()
        decided = self._interval.saved(step, time.monotonic() - began, self._write_s)
        if decided is not None:
            self._run.console.line(decided)
        self._run.reporter.pause_ended()

    def save_last(self) -> None:
        """Save this step, if that has not been done, and wait until the checkpoint stands."""
        self._save_and_wait(_KEPT)

    def _save_and_wait(self, if_not: str) -> None:
        run = self._run
        began, step = time.monotonic(), run.state.progress.step
        self._finish()
        if self.saved_step != step:
            run.watchdog.beat(f"saving step {step}")
            self._require_finite()
            report = run.checkpointer.save(step, self._tensors(), self._state())
            self._note(report, time.monotonic() - began, if_not)
        run.reporter.pause_ended()

    def poll(self) -> None:
        """A step begins: tell what has become of the save in the background, if it has ended."""
        self._interval.step_begins()
        report = self._background.poll() if self._background is not None else None
        if report is not None:
            self._note_background(report)

    def _finish(self) -> None:
        if self._background is not None and self._background.in_flight:
            self._run.watchdog.beat("waiting for a save in the background")
            report = self._background.wait()
            if report is not None:
                self._note_background(report)

    def abandon(self) -> None:
        """A peer is lost: a save that is under way cannot end well, so nobody need wait for it."""
        self._lost = True

    def close(self) -> None:
        """Wait for a save that is under way, however the run ends."""
        if self._background is None or not self._background.in_flight:
            return
        self._closing = True
        self._run.watchdog.beat("waiting for a save in the background")
        try:
            report = self._background.wait(_PATIENCE_S if self._lost else None)
            if report is not None:
                self._note_background(report)
        except Exception as error:  # the run ends with an error of its own
            self._run.console.line(f"warning: a save in the background has failed: {error}")

    def _note_background(self, report: SaveReport) -> None:
        self._write_s = report.seconds
        if_not = _KEPT if self._closing else "training goes on"
        self._note(report, self._stall_s, if_not, background_s=report.seconds, time=self._stalled_until)

    def _note(self, report: SaveReport, stall_s: float, if_not: str, **more: float) -> None:
        """Say what became of a save, for which training stood still for ``stall_s``; ``if_not``: what a failure means."""
        run = self._run
        self.failed = not report.saved
        if report.saved:
            self.saved_step = report.step
            beside = f", {more['background_s']:.1f} s beside training" if more else ""
            run.console.line(f"saved step {report.step} in {stall_s:.{2 if more else 1}f} s{beside}")
            if self._closing:  # what it says by then is to stay
                run.status.fields["saved_step"] = report.step
            else:
                run.status.write("running", step=run.state.progress.step, saved_step=report.step)
        else:
            run.console.line(f"warning: step {report.step} was not saved: {report.reason}; {if_not}")
        run.metrics.write("save", step=report.step, seconds=stall_s, saved=report.saved, **more)

    def _require_finite(self) -> None:
        """Weights that an update made infinite are no checkpoint. Collective."""
        run = self._run
        require_finite_weights((unit.master for unit in run.units), run.groups, run.state.progress.step)

    def _tensors(self) -> dict[str, GlobalTensor]:
        tensors = self._run.state.weights()
        if not self._run.config.checkpoint.no_save_optim:
            tensors.update(self._run.state.optimizer_tensors())
        return tensors

    def _state(self) -> dict[str, Any]:
        run = self._run
        state = run.state.to_json(run.config, run.schedule.state(), run.datasets.fingerprint, run.layout_record())
        interval = self._interval.state()
        return state if interval is None else {**state, "save_interval": interval}
