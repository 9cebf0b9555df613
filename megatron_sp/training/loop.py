"""The training loop: a whole run, from top to bottom.

Entry scripts call ``pretrain(config, task)``. It joins the process group, opens the run folder, builds everything
(``training/run.py``), then repeats: take a step, log, save, validate, check whether to stop. The process ends with an
exit code of ``utils/errors.py``: 0 done, 75 stopped by a signal with everything saved, else what went wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.failed_ranks import Peers, is_peer_failure
from megatron_sp.comm.object_collectives import all_ranks_agree
from megatron_sp.config.schema import Config
from megatron_sp.data.loader import BatchLoader
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.training.console import Console
from megatron_sp.training.finite import require_finite_loss, require_finite_weights, require_sound_end
from megatron_sp.training.report import NO_LOSS_TOKENS, about_no_loss_tokens, dump_bad_step
from megatron_sp.training.run import Run, RunContext, Task, prepare
from megatron_sp.training.saves import Saves
from megatron_sp.training.setup import RunStatus, join, lock_run_dir, open_run_dir, run_main
from megatron_sp.training.signals import KillSwitch, StopSignals
from megatron_sp.training.starting_point import require_kept_steps, require_own_checkpoint
from megatron_sp.training.step import StepResult, evaluate_batches, on_device
from megatron_sp.training.watchdog import Watchdog
from megatron_sp.utils.errors import EXIT_DISK, EXIT_OK, EXIT_PEER, EXIT_PREEMPTED, ConfigError, NumericsError, PeerError, ReportedError
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.launch import Launch

Split = Literal["valid", "test"]


def pretrain(config: Config, task: Task) -> NoReturn:
    """Train as configured and exit the process (exit codes: ``utils/errors.py``)."""
    launch = Launch.from_env()
    run_main(lambda status: _pretrain(config, task, launch, status), launch)


def _pretrain(config: Config, task: Task, launch: Launch, status: RunStatus) -> int:
    if config.parallel.pipeline_model_parallel_size > 1 and task.loss.hidden is None:
        raise ConfigError(
            f"{task.name} cannot be cut into the {config.parallel.pipeline_model_parallel_size} stages of --pipeline-model-parallel-size:"
            " pretraining of GPT and BERT can; leave it out"
        )
    if config.kernels.cuda_graphs == "on":
        from megatron_sp.training.graphs import require_captured

        require_captured(config, is_own=task.is_own)
    require_own_checkpoint(config)
    faults = FaultPlan.from_env(config.logging.enable_fault_injection, launch.rank, launch.attempt)
    signals = StopSignals(launched=bool(launch.launcher), speaks=launch.rank == 0 or not sys.stderr.isatty())
    if not config.batch.no_exit_signal_handler:
        signals.install()
    groups = join(config, launch)
    peers = Peers.create(groups.control, launch)
    launch = dataclasses.replace(launch, attempt=peers.attempt)
    if config.parallel.verify_parallelism:
        from megatron_sp.training.verify import verify_parallelism

        return verify_parallelism(config, task, launch, groups)
    # one process of each host looks for the file
    kill_switch = KillSwitch(config.batch.kill_switch_path if launch.local_rank == 0 else None)
    with all_ranks_agree(groups.control):
        kill_switch.require_unthrown()
    with contextlib.ExitStack() as closing:
        run_dir = open_run_dir(config, task.name, groups)
        status.is_made_up = config.checkpoint.save is None
        with all_ranks_agree(groups.control):
            if launch.rank == 0:
                closing.enter_context(contextlib.closing(lock_run_dir(run_dir)))
                require_kept_steps(run_dir)
                status.open(run_dir)
                status.write("running")
        status.open(run_dir)
        context = RunContext(
            config=config, task=task, launch=launch, groups=groups, peers=peers, run_dir=run_dir, status=status,
            console=Console(launch.rank, progress_bar=not config.logging.no_progress_bar),
            watchdog=_start_watchdog(config, launch, run_dir, status), signals=signals,
            kill_switch=kill_switch, faults=faults,
        )  # fmt: skip
        closing.callback(context.watchdog.close)
        saves: Saves | None = None
        try:
            run = prepare(context, closing)
            closing.callback(context.console.close)  # before the logs are closed: a bar would hide their warnings
            if config.checkpoint.save is not None:
                saves = Saves(run)
                closing.callback(saves.close)
            code = train(run, saves)
        except ReportedError as error:
            if isinstance(error, PeerError):
                signals.hush()
                if saves is not None:
                    saves.abandon()
            raise
        except Exception as error:
            if is_peer_failure(error):
                signals.hush()  # the launcher's SIGTERM is about the same
                if saves is not None:
                    saves.abandon()
                raise PeerError(peers.explain(error, run_dir, context.watchdog.place)) from error
            raise
    signals.restore()  # after a failure they stay: the launcher's SIGTERM would end this rank before it has reported why
    return code


def _start_watchdog(config: Config, launch: Launch, run_dir: Path, status: RunStatus) -> Watchdog:
    """Start the watchdog; it waits half as long again as the collectives, whose timeout ends the ranks that wait for another."""
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return Watchdog(
        1.5 * timeout.total_seconds(), run_dir / f"stacks-rank{launch.rank}.txt", launch.rank,
        lambda message: status.write("failed", EXIT_PEER, message),
    )  # fmt: skip


def train(run: Run, saves: Saves | None = None) -> int:
    """Take the remaining steps, validate, test; return the exit code.

    Args:
        run: the prepared run.
        saves: saves its checkpoints; None without --save.
    """
    context, progress, train_iters = run.context, run.state.progress, run.plan.train_iters
    code = EXIT_OK
    if not context.config.batch.skip_train and progress.step < train_iters:
        context.console.start_progress(train_iters, progress.step)
        reason = _steps(run, saves)
        run.parts.weights.settle()
        if saves is not None:
            context.signals.saving = True
            saves.save_last()
            context.signals.saving = False
        else:  # a save checks them, too
            require_finite_weights((unit.master for unit in run.state.units), context.groups, progress.step)
        context.console.line(f"stopped at step {progress.step}: {_STOP_REASONS[reason]}{_what_is_kept(run, saves, reason)}")
        if reason in _PREEMPTIONS:
            code = EXIT_PREEMPTED
    elif run.continues_own and not context.config.batch.skip_train:
        context.console.line(f"the run is complete: step {progress.step} of {train_iters}; for more steps, raise --train-iters")
    finished = progress.step >= train_iters or context.config.batch.skip_train
    if code == EXIT_OK and finished and not (_evaluate_once(run, "valid") and _evaluate_once(run, "test")):
        code = EXIT_PREEMPTED
    if finished and not context.config.batch.skip_train:
        require_sound_end(progress.bad_steps, progress.step)
    if code == EXIT_OK and finished and context.task.finish is not None:
        context.watchdog.beat("finish")
        context.task.finish(run)
    if saves is not None and saves.failed:
        context.status.write("failed", EXIT_DISK, "the last checkpoint could not be written", step=progress.step)
        context.console.line(
            "error: the last checkpoint could not be written (see the warnings above): free some space and start again with --auto-resume"
        )
        return EXIT_DISK
    context.status.write("preempted" if code == EXIT_PREEMPTED else "done", code, step=progress.step)
    return code


def _steps(run: Run, saves: Saves | None) -> str:
    """Take steps until the run ends or is stopped; return the reason, a key of ``_STOP_REASONS``.

    After each step, in this order: stop if any rank was asked to, write the overlap report, save, validate, stop at
    --exit-interval. Not after the last step: ``train`` saves however the loop ends, and evaluates what is finished.
    """
    context, progress, train_iters = run.context, run.state.progress, run.plan.train_iters
    exit_interval, overlap_report = context.config.batch.exit_interval, run.layout.overlap_report
    # a former process may have ended between the save of this step and its validation
    if run.continues_own and _is_validation_due(run) and not _evaluate_once(run, "valid"):
        return _who_stops(run) or "signal"
    with _profiler(run) as after_step:
        while progress.step < train_iters:
            result = _one_step(run, saves)
            after_step()
            if result.stop_requested:  # before anything slow: the sender of a signal does not wait for long
                return _who_stops(run) or "duration"
            is_last, exits = progress.step >= train_iters, bool(exit_interval and progress.step % exit_interval == 0)
            if overlap_report is not None and overlap_report.is_due(last=is_last or exits):
                context.watchdog.beat("overlap report")
                run.parts.weights.settle()
                overlap_report.write()
                run.reporter.pause_ended()
            if is_last:
                break
            if saves is not None and saves.is_due():
                saves.save()
                if preempted := _who_stops(run):
                    return preempted
            if _is_validation_due(run) and not _evaluate(run, "valid"):
                return _who_stops(run) or "signal"
            if exits:
                return "interval"
    return "done"


def _is_validation_due(run: Run) -> bool:
    """Return whether a validation is due after the last step, by --eval-interval."""
    step, interval = run.state.progress.step, run.context.config.batch.eval_interval
    return bool(interval and step > 0 and step % interval == 0)


def _one_step(run: Run, saves: Saves | None) -> StepResult:
    """Take one step: read its batch, train on it, count it, report it. Collective."""
    progress, plan, loader = run.state.progress, run.plan, run.data.train_loader
    assert loader is not None
    consumed = progress.consumed_samples
    size, count = plan.batches.global_batch_size(consumed), plan.batches.num_microbatches(consumed)
    step = progress.step + 1
    run.context.watchdog.beat(f"step {step}")
    if saves is not None:
        saves.poll()
    longest = None if plan.curriculum is None else plan.curriculum.length(step)
    micro_batches = _next_micro_batches(run, loader, consumed, count, longest)
    digests, places = ([batch.pop(name) for batch in micro_batches] for name in ("digests", "places"))
    schedule = plan.lr_schedule
    done = progress.consumed_tokens if schedule.unit == "tokens" else progress.scheduled_samples
    lr, weight_decay = schedule.lr(done), schedule.weight_decay(progress.scheduled_samples)
    result = run.train_step.run(
        micro_batches, step, lr=lr, weight_decay=weight_decay, stop=_wants_stop(run), digests=digests, places=places,
        decoupled_lr=schedule.decoupled_lr(done),
    )  # fmt: skip
    result.sample_ids = loader.global_sample_ids(consumed, count).tolist()
    run.state.samples.add(step, consumed, result.sample_digests)
    progress.step, progress.consumed_samples = step, consumed + size
    progress.scheduled_samples += size if result.updated else 0
    length = micro_batches[0]["tokens"].shape[1]
    progress.consumed_tokens += size * length
    _count_bad_steps(run, result)
    parts = run.parts
    run.reporter.step(progress, result, lr=lr, loss_scale=parts.scaler.scale, optimizer=parts.optimizer, size=size, length=length)
    return result


def _next_micro_batches(
    run: Run, loader: BatchLoader, consumed_samples: int, count: int, longest: int | None = None
) -> list[MicroBatch]:  # fmt: skip
    """Return this rank's next ``count`` micro-batches, on its device, their sequences cut off after ``longest`` tokens."""
    try:
        micro_batches = loader.step(consumed_samples, count)
    except ReportedError as error:
        error.on_all_ranks = False  # the others are waiting in a collective already
        raise
    return [on_device(_cut(micro, longest), run.context.groups.device) for micro in micro_batches]


def _cut(batch: MicroBatch, longest: int | None) -> MicroBatch:
    """Cut what a micro-batch of GPT has of each position, [b, s], off after ``longest`` of them."""
    if longest is None or longest >= batch["tokens"].shape[1]:
        return batch
    of_positions = ("tokens", "labels", "loss_mask", "positions", "documents")
    return {name: t[:, :longest].contiguous() if name in of_positions else t for name, t in batch.items()}


def _count_bad_steps(run: Run, result: StepResult) -> None:
    """Count a step that was not finite, and dump it, unless it is an ordinary fp16 overflow. Collective.

    Raises:
        NumericsError: there were more than --max-bad-steps in a row.
    """
    context, progress = run.context, run.state.progress
    limit = context.config.precision.max_bad_steps
    if result.updated:
        progress.bad_steps = 0
        return
    progress.skipped_steps += 1
    if result.overflow:
        return
    progress.bad_steps += 1
    report = dump_bad_step(context.run_dir, context.groups, progress, result, run.parts.optimizer)
    context.console.line(
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
    """Return whether this rank wants to stop after the step: by a signal, the kill switch, or since --exit-duration-in-mins is over."""
    context = run.context
    limit = context.config.batch.exit_duration_in_mins
    over = limit is not None and time.monotonic() - context.started > 60 * limit
    return over or context.signals.requested or context.kill_switch.is_thrown()


def _who_stops(run: Run) -> str | None:
    """Return what preempts the run on any rank, a key of ``_PREEMPTIONS``; the same on every rank. Collective."""
    context = run.context
    number = 2 if context.kill_switch.is_thrown() else int(context.signals.requested)
    found = int(all_reduce(torch.tensor([float(number)]), context.groups.control, "max"))
    return (None, *_PREEMPTIONS)[found]


def _evaluate_once(run: Run, kind: Split) -> bool:
    """Call ``_evaluate``, unless a former process of this run has already evaluated these weights."""
    step = run.state.progress.step
    if step == run.plan.start.step and kind in run.evaluated:
        run.context.console.line(f"{kind} at step {step}: done already, as metrics.jsonl says")
        return True
    return _evaluate(run, kind)


def _evaluate(run: Run, kind: Split) -> bool:
    """Log the mean losses of each data set over --eval-iters batches, in a validation those after the previous one's. Collective.

    With --full-validation a validation goes through whole data sets.

    Returns:
        False if a signal to any rank, or the kill switch, interrupted it; nothing is logged then but that.
    """
    context, step, sets = run.context, run.state.progress.step, run.data.evaluated[kind]
    if not sets or context.config.batch.eval_iters == 0:
        return True
    began, found = time.monotonic(), []
    run.parts.model.eval()
    try:
        for _, loader in sets:
            means = _mean_losses(run, kind, loader)
            if means is None:
                return False
            found.append(means)
    finally:
        run.parts.model.train()
    context.faults.at(f"{kind}.record", step)
    loss_of, record = context.task.loss, dict[str, Any]()
    for (name, _), means in zip(sets, found, strict=True):
        loss, others = means[0], {each.replace(" ", "_"): value for each, value in zip(loss_of.reported[1:], means[1:], strict=True)}
        shown = [
            f"{each}: {NO_LOSS_TOKENS}" if value is None else f"{each} {value:.4f}"
            for each, value in zip(loss_of.reported, means, strict=True)
        ]
        if loss_of.of_tokens:
            others["perplexity"] = None if loss is None else math.exp(min(loss, 700.0))
            shown += [] if loss is None else [f"perplexity {others['perplexity']:.2f}"]
        context.console.line(f"{kind} {f'of {name} ' if name else ''}at step {step}: {', '.join(shown)}")
        if loss is None:
            context.console.line(f"warning: {about_no_loss_tokens(context.config)}")
        else:
            require_finite_loss(kind, loss, step)
        if not record:  # of several sets the first is what reports and curves go by
            record = {"loss": loss, "loss_hex": None if loss is None else loss.hex(), **others}
        if name:
            record |= {f"{key}/{name}": value for key, value in {"loss": loss, **others}.items()}
    run.metrics.write(kind, step=step, seconds=time.monotonic() - began, **record)
    run.reporter.pause_ended()
    return True


def _mean_losses(run: Run, kind: Split, loader: BatchLoader) -> list[float | None] | None:
    """Return the mean losses and metrics over the batches of one evaluation; None if it was interrupted. Collective.

    The mean of nothing is None: documents may be masked wholly.
    """
    context, step, batches = run.context, run.state.progress.step, run.plan.batches
    batch, loss_of, size = context.config.batch, context.task.loss, run.plan.batches.evaluation
    passes_before = 0 if kind == "test" or batch.skip_train or not batch.eval_interval else (step - 1) // batch.eval_interval
    num_batches, first_sample = batch.eval_iters, passes_before * batch.eval_iters * size
    if kind == "valid" and context.config.data.full_validation:
        num_batches, first_sample = len(loader.dataset) // size, 0
    count = size // (batches.micro_batch_size * batches.dp_size)
    total = torch.zeros(2 * len(loss_of.reported), dtype=torch.float64, device=context.groups.device)
    for index in range(num_batches):
        context.watchdog.beat(f"{kind} batch {index}")
        context.faults.at(f"{kind}.batch", step)
        micro_batches = _next_micro_batches(run, loader, first_sample + index * size, count)
        total += evaluate_batches(
            run.parts.model, loss_of, micro_batches, run.attention.kernel.name, context.groups, run.parts.weights, run.parts.pipeline
        )
        if preempted := _who_stops(run):
            context.console.line(f"{kind} at step {step}: interrupted by {_PREEMPTIONS[preempted]}")
            return None
    sums, counts = all_reduce(total, context.groups.world).view(2, -1).tolist()
    return [s / c if c > 0 else None for s, c in zip(sums, counts, strict=True)]


@contextlib.contextmanager
def _profiler(run: Run) -> Iterator[Callable[[], None]]:
    """Profile the steps of --profile-step-start/-end with torch's profiler; yields a function to call after each step."""
    logging, rank, done = run.context.config.logging, run.context.launch.rank, run.state.progress.step
    if not logging.profile or rank not in logging.profile_ranks or done >= logging.profile_step_end:
        yield lambda: None
        return
    start, steps = max(logging.profile_step_start - done, 0), logging.profile_step_end - logging.profile_step_start
    warmup = min(start, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # to profile the very first step is what was asked for
        plan = torch.profiler.schedule(wait=start - warmup, warmup=warmup, active=max(steps, 1), repeat=1)
    path = run.context.run_dir / f"profile-rank{rank}.json"
    with torch.profiler.profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as profiler:
        yield profiler.step


def _what_is_kept(run: Run, saves: Saves | None, reason: str) -> str:
    """Return the end of the last message: what there is to go on from."""
    if saves is None or saves.saved_step != run.state.progress.step:
        return "; nothing was saved" + (", for there is no --save" if run.context.config.checkpoint.save is None else " at this step")
    if reason == "kill switch":
        return "; when the file is removed, the same command with --auto-resume goes on from here"
    return "; the same command with --auto-resume goes on from here" if reason in _PREEMPTIONS else ""


_PREEMPTIONS = {"signal": "a signal", "kill switch": "the kill switch"}
_STOP_REASONS = {
    "done": "the run is complete",
    "signal": "a signal asked for it",
    "kill switch": "the file of --kill-switch-path is there",
    "duration": "--exit-duration-in-mins",
    "interval": "--exit-interval",
}
