"""The training loop: a whole run, from top to bottom.

Entry scripts call ``pretrain(config, task)``. It joins the process group, opens the run folder, builds everything
(``training/run.py``), then repeats: take a step, log, save, validate, check whether to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from megatron_sp.comm.agree import all_ranks_agree
from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import Launch
from megatron_sp.comm.peers import Peers, is_peer_failure
from megatron_sp.config.schema import Config
from megatron_sp.data.loader import BatchLoader
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.training.finite import require_finite_loss, require_finite_weights, require_sound_end
from megatron_sp.training.report import dump_bad_step
from megatron_sp.training.run import Run, Task
from megatron_sp.training.setup import RunStatus, join, lock_run_dir, open_run_dir, run_main
from megatron_sp.training.signals import StopSignals
from megatron_sp.training.starting_point import require_kept_steps
from megatron_sp.training.step import StepResult, evaluate_batches, on_device
from megatron_sp.training.verify import verify_parallelism
from megatron_sp.utils.errors import EXIT_DISK, EXIT_OK, EXIT_PREEMPTED, NumericsError, PeerError, ReportedError
from megatron_sp.utils.faults import FaultPlan


def pretrain(config: Config, task: Task) -> NoReturn:
    """Train as configured and exit the process (exit codes: ``utils/errors.py``)."""
    launch = Launch.from_env()
    run_main(lambda status: _pretrain(config, task, launch, status), launch)


def _pretrain(config: Config, task: Task, launch: Launch, status: RunStatus) -> int:
    faults = FaultPlan.from_env(config.logging.enable_fault_injection, launch.rank, launch.attempt)
    signals = StopSignals(launched="TORCHELASTIC_RESTART_COUNT" in os.environ)
    if not config.batch.no_exit_signal_handler:
        signals.install()
    groups = join(config, launch)
    peers = Peers.create(groups.control, launch)
    launch = dataclasses.replace(launch, attempt=peers.attempt)
    if config.parallel.verify_parallelism:
        return verify_parallelism(config, task, launch, groups)
    with contextlib.ExitStack() as stack:
        run_dir = open_run_dir(config, task.name, groups)
        with all_ranks_agree(groups.control):
            if launch.rank == 0:
                stack.enter_context(contextlib.closing(lock_run_dir(run_dir)))
                require_kept_steps(run_dir)
                status.open(run_dir)
                status.write("running")
        status.open(run_dir)
        run = Run(config, task, launch, groups, peers, run_dir, signals, faults, status)
        stack.callback(run.close)
        try:
            run.prepare()
            code = train(run)
        except ReportedError as error:
            if isinstance(error, PeerError) and run.saves is not None:
                run.saves.abandon()
            raise
        except Exception as error:
            if is_peer_failure(error):
                if run.saves is not None:
                    run.saves.abandon()
                raise PeerError(peers.explain(error, run_dir)) from error
            raise
    signals.restore()  # after a failure they stay: the launcher's SIGTERM would end this rank before it has said why
    return code


def train(run: Run) -> int:
    """Take the remaining steps, validate, test; return the exit code."""
    config, progress = run.config, run.state.progress
    code = EXIT_OK
    if not config.batch.skip_train and progress.step < run.train_iters:
        assert run.train_loader is not None
        run.console.start_progress(run.train_iters, progress.step)
        reason = _steps(run)
        run.weights.settle()
        if run.saves is not None:
            run.saves.save_last()
        else:  # a save has looked
            require_finite_weights((unit.master for unit in run.units), run.groups, progress.step)
        run.console.line(f"stopped at step {progress.step}: {_STOP_REASONS[reason]}{_what_is_kept(run, reason)}")
        if reason == "signal":
            code = EXIT_PREEMPTED
    finished = progress.step >= run.train_iters or config.batch.skip_train
    if (
        code == EXIT_OK
        and finished
        and not (_evaluate_once(run, "valid", run.valid_loader) and _evaluate_once(run, "test", run.test_loader))
    ):
        code = EXIT_PREEMPTED
    if finished and not config.batch.skip_train:
        require_sound_end(progress.bad_steps, progress.step)
    if code == EXIT_OK and finished and run.task.finish is not None:
        run.watchdog.beat("finish")
        run.task.finish(run)
    if run.saves is not None and run.saves.failed:
        run.status.write("failed", EXIT_DISK, "the last checkpoint could not be written", step=progress.step)
        run.console.line(
            "error: the last checkpoint could not be written (see the warnings above): free some space and start again with --auto-resume"
        )
        return EXIT_DISK
    run.status.write("preempted" if code == EXIT_PREEMPTED else "done", code, step=progress.step)
    return code


def _steps(run: Run) -> str:
    """Run the loop; return the reason why it ended, a key of ``_STOP_REASONS``."""
    batch, progress = run.config.batch, run.state.progress
    made_up_for = not run.continues_own or not _is_validation_due(run) or _evaluate_once(run, "valid", run.valid_loader)
    if not made_up_for:
        return "signal"
    with _profiler(run) as profiler:
        while progress.step < run.train_iters:
            result = _one_step(run)
            profiler()
            if result.stop_requested:  # before anything that takes long: whoever sent the signal will not wait
                return "signal" if _any_signal(run) else "duration"
            last = progress.step >= run.train_iters or bool(batch.exit_interval and progress.step % batch.exit_interval == 0)
            if run.overlap is not None and run.overlap.is_due(last=last):
                run.watchdog.beat("overlap report")
                run.weights.settle()
                run.overlap.write()
                run.reporter.pause_ended()
            if progress.step >= run.train_iters:
                break
            if run.saves is not None and run.saves.is_due():
                run.saves.save()
                if _any_signal(run):
                    return "signal"
            if _is_validation_due(run) and not _evaluate(run, "valid", run.valid_loader, progress.step):
                return "signal"
            if batch.exit_interval and progress.step % batch.exit_interval == 0:
                return "interval"
    return "done"


def _is_validation_due(run: Run) -> bool:
    """Return whether a validation is due after the last step, by --eval-interval."""
    step, interval = run.state.progress.step, run.config.batch.eval_interval
    return bool(interval and step > 0 and step % interval == 0)


def _evaluate_once(run: Run, kind: str, loader: BatchLoader | None) -> bool:
    """Call ``_evaluate``, unless a previous process of this run has already evaluated these weights."""
    step = run.state.progress.step
    if step == run.start.step and kind in run.evaluated:
        run.console.line(f"{kind} at step {step}: done already, as metrics.jsonl says")
        return True
    return _evaluate(run, kind, loader, step)


def _one_step(run: Run) -> StepResult:
    assert run.train_loader is not None
    progress, plan = run.state.progress, run.plan
    size, count = plan.global_batch_size(progress.consumed_samples), plan.num_microbatches(progress.consumed_samples)
    step, end = progress.step + 1, progress.consumed_samples + size
    run.watchdog.beat(f"step {step}")
    if run.saves is not None:
        run.saves.poll()
    micro_batches = _next_micro_batches(run, run.train_loader, progress.consumed_samples, count)
    digests = [batch.pop("digests") for batch in micro_batches]
    lr, weight_decay = run.schedule.lr(progress.scheduled_samples), run.schedule.weight_decay(progress.scheduled_samples)
    result = run.train_step.run(micro_batches, step, lr=lr, weight_decay=weight_decay, stop=_wants_stop(run), digests=digests)
    result.sample_ids = run.train_loader.global_sample_ids(progress.consumed_samples, count).tolist()
    run.state.samples.add(step, progress.consumed_samples, result.sample_digests)
    progress.step, progress.consumed_samples = step, end
    progress.scheduled_samples += size if result.updated else 0
    progress.consumed_tokens += size * micro_batches[0]["tokens"].shape[1]
    _count_bad_steps(run, result)
    run.reporter.step(progress, result, lr=lr, loss_scale=run.scaler.scale, optimizer=run.optimizer, size=size)
    return result


def _next_micro_batches(run: Run, loader: BatchLoader, consumed_samples: int, count: int) -> list[MicroBatch]:
    try:
        micro_batches = loader.step(consumed_samples, count)
    except ReportedError as error:
        error.on_all_ranks = False  # the others are waiting in a collective already
        raise
    return [on_device(micro, run.groups.device) for micro in micro_batches]


def _count_bad_steps(run: Run, result: StepResult) -> None:
    progress, limit = run.state.progress, run.config.precision.max_bad_steps
    if result.updated:
        progress.bad_steps = 0
        return
    progress.skipped_steps += 1
    if result.overflow:
        return
    progress.bad_steps += 1
    report = dump_bad_step(run.run_dir, run.launch.rank, progress, result, run.optimizer)
    run.console.line(
        f"warning: step {progress.step} is not finite (loss {result.losses[0]}, grad norm {result.grad_norm}): skipped, the weights are"
        f" unchanged; {progress.bad_steps} in a row; samples and norms in {report}"
    )
    if progress.bad_steps > limit:
        raise NumericsError(
            f"{progress.bad_steps} non-finite steps in a row (--max-bad-steps {limit}): stopped at step {progress.step}. The weights are"
            f" those of the last finite step. The sample ids and the norm of every layer's gradient are in {report}."
            " Lower --lr, look at these samples, or resume an earlier checkpoint with --ckpt-step."
        )


def _wants_stop(run: Run) -> bool:
    limit = run.config.batch.exit_duration_in_mins
    return run.signals.requested or (limit is not None and time.monotonic() - run.started > 60 * limit)


def _any_signal(run: Run) -> bool:
    """Return whether any rank has received a signal; the same on every rank. Collective."""
    flag = torch.tensor([float(run.signals.requested)])
    return bool(all_reduce(flag, run.groups.control, "max") > 0)


def _evaluate(run: Run, kind: str, loader: BatchLoader | None, step: int) -> bool:
    """Log the mean loss over --eval-iters global batches; each validation takes the batches after those of the previous one.

    Returns:
        False if it was interrupted by a signal to any rank; nothing is logged then but that.
    """
    batch = run.config.batch
    if loader is None or batch.eval_iters == 0:
        return True
    run.model.eval()
    passes_before = 0 if kind == "test" or batch.skip_train or not batch.eval_interval else (step - 1) // batch.eval_interval
    start, full = passes_before * batch.eval_iters * run.plan.full, run.plan.full
    began = time.monotonic()
    names = (*run.task.loss.names, *run.task.loss.metrics)
    total = torch.zeros(2 * len(names), dtype=torch.float64, device=run.groups.device)
    for index in range(batch.eval_iters):
        run.watchdog.beat(f"{kind} batch {index}")
        run.faults.at(f"{kind}.batch", step)
        micro_batches = _next_micro_batches(run, loader, start + index * full, full // (run.plan.micro_batch_size * run.plan.dp_size))
        total += evaluate_batches(run.model, run.task.loss, micro_batches, run.kernel.name, run.groups, run.weights)
        if _any_signal(run):
            run.model.train()
            run.console.line(f"{kind} at step {step}: broken off by a signal")
            return False
    values = all_reduce(total, run.groups.world).tolist()
    run.model.train()
    means = [s / c if c > 0 else 0.0 for s, c in zip(values[: len(names)], values[len(names) :], strict=True)]
    loss, others = means[0], {name.replace(" ", "_"): value for name, value in zip(names[1:], means[1:], strict=True)}
    shown = [f"{name} {value:.4f}" for name, value in zip(names, means, strict=True)]
    if run.task.loss.of_tokens:
        others["perplexity"] = math.exp(min(loss, 700.0))
        shown.append(f"perplexity {others['perplexity']:.2f}")
    run.faults.at(f"{kind}.record", step)
    run.console.line(f"{kind} at step {step}: {', '.join(shown)}")
    require_finite_loss(kind, loss, step)
    run.metrics.write(kind, step=step, loss=loss, loss_hex=loss.hex(), seconds=time.monotonic() - began, **others)
    run.reporter.pause_ended()
    return True


@contextlib.contextmanager
def _profiler(run: Run) -> Iterator[Callable[[], None]]:
    """Profile the steps of --profile-step-start/-end with torch's profiler; yields a function to call after each step."""
    logging, rank = run.config.logging, run.launch.rank
    if not logging.profile or rank not in logging.profile_ranks or run.state.progress.step >= logging.profile_step_end:
        yield lambda: None
        return
    start, steps = max(logging.profile_step_start - run.state.progress.step, 0), logging.profile_step_end - logging.profile_step_start
    warmup = min(start, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # whoever asks for the very first step knows
        plan = torch.profiler.schedule(wait=start - warmup, warmup=warmup, active=max(steps, 1), repeat=1)
    path = run.run_dir / f"profile-rank{rank}.json"
    with torch.profiler.profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as profiler:
        yield profiler.step


def _what_is_kept(run: Run, reason: str) -> str:
    if run.saves is None or run.saves.saved_step != run.state.progress.step:
        return "; nothing was saved" + (", for there is no --save" if run.config.checkpoint.save is None else " at this step")
    return "; the same command with --auto-resume goes on from here" if reason == "signal" else ""


_STOP_REASONS = {
    "done": "the run is complete",
    "signal": "a signal asked for it",
    "duration": "--exit-duration-in-mins",
    "interval": "--exit-interval",
}
