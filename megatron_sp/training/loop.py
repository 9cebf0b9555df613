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
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.failed_ranks import Peers, is_peer_failure
from megatron_sp.comm.object_collectives import all_ranks_agree
from megatron_sp.config.schema import Config
from megatron_sp.data.loader import BatchLoader
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.training import nan_checks
from megatron_sp.training.metrics import Console
from megatron_sp.training.parts import Run, RunContext, Task
from megatron_sp.training.report import NO_LOSS_TOKENS, about_no_loss_tokens, profiler
from megatron_sp.training.resume_point import require_kept_steps, require_own_checkpoint
from megatron_sp.training.run import prepare
from megatron_sp.training.setup import RunStatus, join, lock_run_dir, open_run_dir, run_main
from megatron_sp.training.signals import KillSwitch, StopSignals, Watchdog
from megatron_sp.training.step import evaluate_batches, on_device
from megatron_sp.utils import errors
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.launch import Launch

if TYPE_CHECKING:
    from megatron_sp.training.saves import Saves

Split = Literal["valid", "test"]

_PREEMPTIONS = {"signal": "a signal", "kill switch": "the kill switch"}
_STOP_REASONS = {
    "done": "the run is complete", "signal": "a signal asked for it", "interval": "--exit-interval",
    "kill switch": "the file of --kill-switch-path is there", "duration": "--exit-duration-in-mins",
}  # fmt: skip


def pretrain(config: Config, task: Task) -> NoReturn:
    """Train as configured and exit the process (exit codes: ``utils/errors.py``)."""
    launch = Launch.from_env()
    run_main(partial(_pretrain, config, task, launch), launch)


def _pretrain(config: Config, task: Task, launch: Launch, status: RunStatus) -> int:
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    if pp_size > 1 and task.loss.hidden is None:
        raise errors.ConfigError(
            f"{task.name} cannot be cut into the {pp_size} stages of --pipeline-model-parallel-size: pretraining of GPT"
            " and BERT can; leave it out"
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
    if parallel.verify_parallelism:
        from megatron_sp.training.verify import verify_parallelism

        return verify_parallelism(config, task, launch, groups)
    # one process of each host looks for the file
    kill_switch = KillSwitch(config.batch.kill_switch_path if launch.local_rank == 0 else None)
    with all_ranks_agree(groups.control):
        if kill_switch.is_thrown():
            raise errors.ConfigError(
                f"--kill-switch-path {config.batch.kill_switch_path}: the file is there, so nothing starts: remove it,"
                " or leave the flag out"
            )
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
        # half as long again as the collectives, whose timeout ends the ranks that wait for another
        patience_s = 1.5 * timedelta(minutes=parallel.distributed_timeout_minutes).total_seconds()
        watchdog = Watchdog(
            patience_s, run_dir / f"stacks-rank{launch.rank}.txt", launch.rank,
            on_end=lambda message: status.write("failed", errors.EXIT_PEER, message),
        )  # fmt: skip
        closing.callback(watchdog.close)
        context = RunContext(
            config=config, task=task, launch=launch, groups=groups, peers=peers, run_dir=run_dir, status=status,
            console=Console(launch.rank, progress_bar=not config.logging.no_progress_bar), watchdog=watchdog,
            signals=signals, kill_switch=kill_switch, faults=faults,
        )  # fmt: skip
        saves: Saves | None = None
        try:
            run = prepare(context, closing)
            closing.callback(context.console.close)  # before the logs are closed: a bar would hide their warnings
            if config.checkpoint.save is not None:
                from megatron_sp.training.saves import Saves

                saves = Saves(run)
                closing.callback(saves.close)
            code = train(run, saves)
        except Exception as error:
            is_lost = isinstance(error, errors.PeerError)
            if not is_lost and (isinstance(error, errors.ReportedError) or not is_peer_failure(error)):
                raise
            signals.speaks = False  # the launcher's SIGTERM is about the same
            if saves is not None:
                saves.peer_is_lost = True
            if is_lost:
                raise
            raise errors.PeerError(peers.explain(error, run_dir, watchdog.place)) from error
    # after a failure they stay: the launcher's SIGTERM would end this rank before it has reported why
    signals.restore()
    return code


def train(run: Run, saves: Saves | None = None) -> int:
    """Take the remaining steps, validate, test; return the exit code. ``saves``: None without --save."""
    context, progress, train_iters = run.context, run.state.progress, run.plan.train_iters
    code, skips_training = errors.EXIT_OK, context.config.batch.skip_train
    if not skips_training and progress.step < train_iters:
        context.console.start_progress(train_iters, progress.step)
        reason = _take_steps(run, saves)
        run.parts.weights.settle()
        if saves is not None:
            context.signals.saving = True
            saves.save_last()
            context.signals.saving = False
        else:  # a save checks them, too
            weights = (unit.master for unit in run.state.units)
            nan_checks.require_finite_weights(weights, context.groups, progress.step)
        kept = _what_is_kept(run, saves, reason)
        context.console.line(f"stopped at step {progress.step}: {_STOP_REASONS[reason]}{kept}")
        if reason in _PREEMPTIONS:
            code = errors.EXIT_PREEMPTED
    elif run.continues_own and not skips_training:
        done = f"the run is complete: step {progress.step} of {train_iters}"
        context.console.line(f"{done}; for more steps, raise --train-iters")
    finished = progress.step >= train_iters or skips_training
    if code == errors.EXIT_OK and finished and not (_evaluate_once(run, "valid") and _evaluate_once(run, "test")):
        code = errors.EXIT_PREEMPTED
    if finished and not skips_training and progress.bad_steps > 1:  # a single one can be the fault of a sample
        raise errors.NumericsError(
            f"the run ends at step {progress.step} with {progress.bad_steps} non-finite steps in a row, all skipped."
            f" {nan_checks.WAY_OUT}."
        )
    if code == errors.EXIT_OK and finished and context.task.finish is not None:
        context.watchdog.beat("finish")
        context.task.finish(run)
    if saves is not None and saves.failed:
        what = "the last checkpoint could not be written"
        context.status.write("failed", errors.EXIT_DISK, what, step=progress.step)
        way_out = "free some space and start again with --auto-resume"
        context.console.line(f"error: {what} (see the warnings above): {way_out}")
        return errors.EXIT_DISK
    context.status.write("preempted" if code == errors.EXIT_PREEMPTED else "done", code, step=progress.step)
    return code


def _take_steps(run: Run, saves: Saves | None) -> str:
    """Take steps until the run ends or is stopped; return the reason, a key of ``_STOP_REASONS``.

    After each step, in this order: stop if any rank was asked to, write the overlap report, save, validate, stop at
    --exit-interval. Not after the last step: ``train`` saves however the loop ends, and evaluates what is finished.
    """
    context, progress, plan, parts = run.context, run.state.progress, run.plan, run.parts
    exit_interval, eval_interval = context.config.batch.exit_interval, context.config.batch.eval_interval
    validates = lambda: bool(eval_interval and progress.step > 0 and progress.step % eval_interval == 0)
    loader, schedule, overlap_report = run.data.train_loader, plan.lr_schedule, run.layout.overlap_report
    assert loader is not None
    # a former process may have ended between the save of this step and its validation
    if run.continues_own and validates() and not _evaluate_once(run, "valid"):
        return _who_stops(run) or "signal"
    with profiler(run) as profiler_step:
        while progress.step < plan.train_iters:
            # read the batch
            step, consumed = progress.step + 1, progress.consumed_samples
            size, count = plan.batches.global_batch_size(consumed), plan.batches.num_microbatches(consumed)
            context.watchdog.beat(f"step {step}")
            if saves is not None:
                saves.poll()
            longest = None if plan.curriculum is None else plan.curriculum.length(step)
            micro_batches = _next_micro_batches(run, loader, consumed, count, longest)
            digests = [batch.pop("digests") for batch in micro_batches]
            places = [batch.pop("places") for batch in micro_batches]

            # train on it
            done = progress.consumed_tokens if schedule.unit == "tokens" else progress.scheduled_samples
            lr = schedule.lr(done)
            result = run.train_step.run(
                micro_batches, step, lr=lr, weight_decay=schedule.weight_decay(progress.scheduled_samples),
                stop=_wants_stop(run), digests=digests, places=places, decoupled_lr=schedule.decoupled_lr(done),
            )  # fmt: skip

            # count and report it
            result.sample_ids = loader.global_sample_ids(consumed, count).tolist()
            run.state.samples.add(step, consumed, result.sample_digests)
            progress.step, progress.consumed_samples = step, consumed + size
            progress.scheduled_samples += size if result.updated else 0
            length = micro_batches[0]["tokens"].shape[1]
            progress.consumed_tokens += size * length
            nan_checks.count_bad_step(run, result)
            scale = parts.scaler.scale
            run.reporter.step(
                progress, result, lr=lr, loss_scale=scale, optimizer=parts.optimizer, size=size, length=length
            )
            profiler_step()

            # what comes between two steps
            if result.stop_requested:  # before anything slow: the sender of a signal does not wait for long
                return _who_stops(run) or "duration"
            is_last, exits = step >= plan.train_iters, bool(exit_interval and step % exit_interval == 0)
            if overlap_report is not None and overlap_report.is_due(last=is_last or exits):
                context.watchdog.beat("overlap report")
                parts.weights.settle()
                overlap_report.write()
                run.reporter.pause_ended()
            if is_last:
                break
            if saves is not None and saves.interval.is_due(step):
                saves.save()
                if preempted := _who_stops(run):
                    return preempted
            if validates() and not _evaluate(run, "valid"):
                return _who_stops(run) or "signal"
            if exits:
                return "interval"
    return "done"


def _next_micro_batches(
    run: Run, loader: BatchLoader, consumed_samples: int, count: int, longest: int | None = None
) -> list[MicroBatch]:  # fmt: skip
    # this rank's next micro-batches, on its device, their sequences cut off after ``longest`` tokens
    try:
        micro_batches = loader.step(consumed_samples, count)
    except errors.ReportedError as error:
        error.on_all_ranks = False  # the others are waiting in a collective already
        raise
    if longest is not None and longest < micro_batches[0]["tokens"].shape[1]:
        by_position = ("tokens", "labels", "loss_mask", "positions", "documents")  # [b, s] each
        micro_batches = [
            {name: t[:, :longest].contiguous() if name in by_position else t for name, t in batch.items()}
            for batch in micro_batches
        ]
    return [on_device(batch, run.context.groups.device) for batch in micro_batches]


def _wants_stop(run: Run) -> bool:
    # whether this rank wants to stop: by a signal, the kill switch, or --exit-duration-in-mins
    context = run.context
    limit = context.config.batch.exit_duration_in_mins
    is_over = limit is not None and time.monotonic() - context.started > 60 * limit
    return is_over or context.signals.requested or context.kill_switch.is_thrown()


def _who_stops(run: Run) -> str | None:
    # what preempts the run on any rank, a key of ``_PREEMPTIONS``; the same on every rank. Collective
    context = run.context
    number = 2 if context.kill_switch.is_thrown() else int(context.signals.requested)
    largest = int(all_reduce(torch.tensor([float(number)]), context.groups.control, "max"))
    return (None, *_PREEMPTIONS)[largest]


def _evaluate_once(run: Run, kind: Split) -> bool:
    # call ``_evaluate``, unless a former process of this run has already evaluated these weights
    step = run.state.progress.step
    if step == run.plan.start.step and kind in run.evaluated:
        run.context.console.line(f"{kind} at step {step}: done already, as metrics.jsonl says")
        return True
    return _evaluate(run, kind)


def _evaluate(run: Run, kind: Split) -> bool:
    """Log the mean losses of each data set over --eval-iters batches, in a validation those after the previous one's.

    With --full-validation a validation goes through whole data sets. Collective.

    Returns:
        False if a signal to any rank, or the kill switch, interrupted it; nothing is logged then but that.
    """
    context, step, sets = run.context, run.state.progress.step, run.data.evaluated[kind]
    if not sets or context.config.batch.eval_iters == 0:
        return True
    began, means_of_sets = time.monotonic(), []
    run.parts.model.eval()
    try:
        for _, loader in sets:
            means = _mean_losses(run, kind, loader)
            if means is None:
                return False
            means_of_sets.append(means)
    finally:
        run.parts.model.train()
    context.faults.at(f"{kind}.record", step)
    terms, record = context.task.loss, dict[str, Any]()
    for (name, _), means in zip(sets, means_of_sets, strict=True):
        named = list(zip(terms.reported, means, strict=True))
        shown = [f"{term}: {NO_LOSS_TOKENS}" if mean is None else f"{term} {mean:.4f}" for term, mean in named]
        loss, values = means[0], {term.replace(" ", "_"): mean for term, mean in named[1:]}
        if terms.of_tokens:
            values["perplexity"] = perplexity = None if loss is None else math.exp(min(loss, 700.0))
            shown += [] if perplexity is None else [f"perplexity {perplexity:.2f}"]
        context.console.line(f"{kind} {f'of {name} ' if name else ''}at step {step}: {', '.join(shown)}")
        if loss is None:
            context.console.line(f"warning: {about_no_loss_tokens(context.config)}")
        elif not math.isfinite(loss):
            what = f"{kind} at step {step}: the mean loss is {loss}. Either the weights or a sample are unusable"
            raise errors.NumericsError(f"{what}. {nan_checks.WAY_OUT}.")
        if not record:  # of several sets the first is what reports and curves go by
            record = {"loss": loss, "loss_hex": None if loss is None else loss.hex(), **values}
        if name:
            record |= {f"{key}/{name}": value for key, value in {"loss": loss, **values}.items()}
    run.metrics.write(kind, step=step, seconds=time.monotonic() - began, **record)
    run.reporter.pause_ended()
    return True


def _mean_losses(run: Run, kind: Split, loader: BatchLoader) -> list[float | None] | None:
    """Return the mean losses and metrics over the batches of one evaluation; None if it was interrupted. Collective.

    The mean of nothing is None: documents may be masked wholly.
    """
    context, step, batches = run.context, run.state.progress.step, run.plan.batches
    batch, terms, size = context.config.batch, context.task.loss, run.plan.batches.evaluation
    passes_before = 0
    if kind == "valid" and batch.eval_interval and not batch.skip_train:
        passes_before = (step - 1) // batch.eval_interval
    num_batches, first_sample = batch.eval_iters, passes_before * batch.eval_iters * size
    if kind == "valid" and context.config.data.full_validation:
        num_batches, first_sample = len(loader.dataset) // size, 0
    count = size // (batches.micro_batch_size * batches.dp_size)
    total = torch.zeros(2 * len(terms.reported), dtype=torch.float64, device=context.groups.device)
    parts, kernel = run.parts, run.attention.kernel.name
    for index in range(num_batches):
        context.watchdog.beat(f"{kind} batch {index}")
        context.faults.at(f"{kind}.batch", step)
        micro_batches = _next_micro_batches(run, loader, first_sample + index * size, count)
        total += evaluate_batches(
            parts.model, terms, micro_batches, kernel, context.groups, parts.weights, parts.pipeline
        )
        if preempted := _who_stops(run):
            context.console.line(f"{kind} at step {step}: interrupted by {_PREEMPTIONS[preempted]}")
            return None
    sums, counts = all_reduce(total, context.groups.world).view(2, -1).tolist()
    return [s / c if c > 0 else None for s, c in zip(sums, counts, strict=True)]


def _what_is_kept(run: Run, saves: Saves | None, reason: str) -> str:
    # the end of the last message: what there is to go on from
    if saves is None or saves.saved_step != run.state.progress.step:
        no_save = run.context.config.checkpoint.save is None
        return "; nothing was saved" + (", for there is no --save" if no_save else " at this step")
    if reason == "kill switch":
        return "; when the file is removed, the same command with --auto-resume goes on from here"
    return "; the same command with --auto-resume goes on from here" if reason in _PREEMPTIONS else ""
