"""The objects of a run, built in the order in which errors are cheapest to find, and the checkpoint they start from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from torch import nn

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.comm.agree import all_ranks_agree
from megatron_sp.comm.groups import Launch, ParallelGroups
from megatron_sp.comm.objects import broadcast_json
from megatron_sp.comm.peers import Peers
from megatron_sp.config.rules import normalize, validate
from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.ops.attention import choose_kernel
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
from megatron_sp.parallel.heads import OverlapMode
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training.console import Console
from megatron_sp.training.environment import environment
from megatron_sp.training.memory_estimate import MemoryEstimate
from megatron_sp.training.metrics import MetricsLog
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.training.overlap import OverlapReport
from megatron_sp.training.probe import choice_from, choose_overlap
from megatron_sp.training.report import StepReporter
from megatron_sp.training.run_tokenizer import find_tokenizer, keep_for_run, require_same
from megatron_sp.training.sample_history import SampleHistory
from megatron_sp.training.saves import Saves
from megatron_sp.training.setup import RunStatus, dtype_of
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.signals import StopSignals
from megatron_sp.training.starting_point import starting_point
from megatron_sp.training.state import Progress, TrainingState, adopt_checkpoint_args, check_structure, is_ahead
from megatron_sp.training.step import Loss, StepOptions, StepParts, TrainStep
from megatron_sp.training.watchdog import Watchdog
from megatron_sp.utils.errors import EXIT_PEER, CheckpointError, ConfigError, DataError
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.format import format_count
from megatron_sp.utils.run_log import evaluated


@dataclass(frozen=True)
class Task:
    """A training task, as an entry script defines it.

    Attributes:
        name: name of the task; first part of the run folder's name if --save is not given.
        build_tokenizer: builds the tokenizer from the configuration; the model's vocabulary follows from it.
        build_datasets: (config, tokenizer, (train, valid, test) samples) -> data sets.
        build_model: (config, layout, on_unit) -> this rank's part of the model, on the CPU, with ``units()`` and ``unit_order()``; calls
            ``on_unit`` with the model and each unit as soon as the unit is built.
        loss: loss terms.
        new_parameters: prefixes of parameter names that may be missing in the checkpoint with --finetune; these are freshly initialized.
        finish: called with the run when it is complete, on every rank.
        torch_dropout: dropout draws from torch's generator, which must be the same on all ranks of a data-parallel replica.
    """

    name: str
    build_tokenizer: Callable[[Config], Tokenizer]
    build_datasets: Callable[[Config, Tokenizer, tuple[int, int, int]], Datasets]
    build_model: Callable[..., nn.Module]
    loss: Loss
    new_parameters: tuple[str, ...] = ()
    finish: Callable[[Run], None] | None = None
    torch_dropout: bool = False


class Run:
    """The objects of a run; ``prepare`` builds them, ``training/loop.py`` uses them."""

    def __init__(
        self,
        config: Config,
        task: Task,
        launch: Launch,
        groups: ParallelGroups,
        peers: Peers,
        run_dir: Path,
        signals: StopSignals,
        faults: FaultPlan,
        status: RunStatus,
    ) -> None:
        self.config, self.task, self.launch, self.groups, self.peers = config, task, launch, groups, peers
        self.run_dir, self.signals, self.faults, self.status = run_dir, signals, faults, status
        self.console = Console(launch.rank, progress_bar=not config.logging.no_progress_bar)
        self.started = time.monotonic()
        timeout_s = timedelta(minutes=config.parallel.distributed_timeout_minutes).total_seconds()
        self.watchdog = Watchdog(
            1.5 * timeout_s,
            run_dir / f"stacks-rank{launch.rank}.txt",
            launch.rank,
            lambda message: status.write("failed", EXIT_PEER, message),
        )
        self.loaders: list[BatchLoader] = []
        self.saves: Saves | None = None  # from ``prepare`` on

    def prepare(self) -> None:
        """Build everything and load the checkpoint, in the order in which errors are cheapest to find."""
        config = self.config
        for note in config.ignored_flags:
            self.console.line(f"ignored: {note}")
        self.checkpointer = Checkpointer(
            self.run_dir, rank=self.launch.rank, world_size=self.launch.world_size, group=self.groups.control,
            faults=self.faults, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every,
        )  # fmt: skip
        if config.checkpoint.save is not None:
            self.checkpointer.prepare()
        source = self._find_checkpoint()
        stored = self.checkpointer.read_state(source) if source is not None else None
        is_adopted = False
        if stored is not None and config.checkpoint.use_checkpoint_args:
            is_adopted = adopt_checkpoint_args(stored, config)
            validate(normalize(config), self.launch.world_size)
        self._build_tokenizer(source, stored, is_adopted)
        self.plan = BatchPlan.from_config(config.batch, self.groups.dp_size)
        # what a former part of the run consumed stays consumed, whatever the batch size was then
        self.start = _where_it_starts(stored if not self._finetunes else None, self.plan)
        self.train_iters = config.batch.train_iters or self.start.step + self.plan.steps_for(
            config.batch.train_samples or 0, self.start.consumed_samples
        )
        if self.train_iters == 0 and not config.batch.skip_train:
            raise ConfigError(
                f"train_samples ({config.batch.train_samples}) is less than one step takes ({self.plan.global_batch_size(0)}):"
                " raise --train-samples, or lower --global-batch-size"
            )
        self.schedule = LRSchedule.from_config(config.optimizer, config.batch, self.plan.samples_after)
        self._build_data()
        self._choose_layout(stored)
        self.foresight = MemoryEstimate(
            config, self.overlap_choice, self.launch.world_size, self.launch.local_world_size, self.groups.device
        )
        self.status.explain_memory = self.foresight.explain
        if not config.batch.skip_train:
            with all_ranks_agree(self.groups.control):
                warning = self.foresight.warning()
            for line in warning:
                self.console.line(line)
        self._build_model()
        if source is not None and stored is not None:
            self._load(source, stored)
        self._build_step()
        own = self.continues_own and not config.batch.skip_train
        # what was made of these weights already: a kill between a save and the end of the validation leaves that to be made up for
        done = evaluated(self.run_dir, self.state.progress.step) if own and self.launch.rank == 0 else []
        self.evaluated: list[str] = broadcast_json(done, self.groups.control)
        self._announce()
        if config.checkpoint.save is not None:
            self.saves = Saves(self, None if self._finetunes else stored)

    def _build_tokenizer(self, source: Path | None, stored: dict[str, Any] | None, is_adopted: bool) -> None:
        """Build the tokenizer, and keep a copy in the run folder with --save. On a resume it must be the checkpoint's."""
        config, tell = self.config, self.console.line
        resumed = None if self._finetunes or config.batch.skip_train else stored
        with all_ranks_agree(self.groups.control):
            if source is not None and stored is not None:
                find_tokenizer(config.data, stored, source, goes_on=resumed is not None, is_adopted=is_adopted, tell=tell)
            self.tokenizer = self.task.build_tokenizer(config)
            settle_vocab_size(config, self.tokenizer)
            if stored is not None:
                self._differences = check_structure(stored, config)
            if source is not None and resumed is not None:
                require_same(self.tokenizer, resumed, source, accept=config.checkpoint.accept_data_change, tell=tell)
        record = None
        with all_ranks_agree(self.groups.control):
            if config.checkpoint.save is not None and self.launch.rank == 0:
                record = keep_for_run(self.run_dir, config.data, self.tokenizer, tell)
        self.tokenizer_record: dict[str, Any] | None = broadcast_json(record, self.groups.control)

    def _find_checkpoint(self) -> Path | None:
        """Return the step folder to load; None for a fresh start, which is never a fallback."""
        point = starting_point(
            self.config, self.run_dir, has_checkpoint=self.checkpointer.has_checkpoint, is_vacant=self.checkpointer.is_vacant,
            attempt=self.launch.attempt,
        )  # fmt: skip
        self.goes_on, self.continues_own = point.goes_on, point.continues_own
        if point.note:
            self.console.line(point.note)
        if point.source is None:
            return None
        return self.checkpointer.find(point.source, point.ckpt_step, self.config.checkpoint.resume_fallback)

    @property
    def _finetunes(self) -> bool:
        """True if the run takes only the weights of the checkpoint and starts anew."""
        return self.config.checkpoint.finetune and not self.goes_on

    def _build_data(self) -> None:
        batch, full = self.config.batch, self.plan.full
        start = self.start
        train = self.plan.samples_after(max(self.train_iters - start.step, 0), start.consumed_samples)
        train = 0 if batch.skip_train else max(train, batch.train_samples or 0)  # a batch that is not full is dropped, but was asked for
        last_step = max(self.train_iters, start.step, 1)  # a checkpoint may be beyond the end of a run that was made shorter
        passes = 1 if batch.skip_train else last_step // (batch.eval_interval or last_step) + 1
        samples = (train, passes * batch.eval_iters * full, batch.eval_iters * full)
        with all_ranks_agree(self.groups.control):
            self.datasets = self.task.build_datasets(self.config, self.tokenizer, samples)
        for warning in self.datasets.warnings:
            self.console.line(f"warning: {warning}")
        self.train_loader = self._loader(self.datasets.train, self.config.data.num_workers)
        self.valid_loader = self._loader(self.datasets.valid, 0)
        self.test_loader = self._loader(self.datasets.test, 0)

    def _loader(self, dataset: Any, num_workers: int) -> BatchLoader | None:
        if dataset is None:
            return None
        loader = BatchLoader(
            dataset, micro_batch_size=self.config.batch.micro_batch_size, dp_rank=self.groups.dp_rank, dp_size=self.groups.dp_size,
            order=self.config.data.dataloader_type, seed=self.config.batch.seed, num_workers=num_workers,
            pin_memory=self.groups.device.type == "cuda", digests=dataset is self.datasets.train,
        )  # fmt: skip
        self.loaders.append(loader)
        return loader

    def _choose_layout(self, stored: dict[str, Any] | None) -> None:
        """Build the layers' parallel layout. --sp-overlap-mode auto is resolved here, as in the checkpoint if its layout is the same."""
        parallel, overlap = self.config.parallel, self.config.parallel.overlaps_exchanges
        chunks = parallel.sp_head_chunks or 2
        mode: str = parallel.overlap_mode
        if mode == "auto":
            before = (stored or {}).get("layout")
            if isinstance(before, dict) and {**before, "sp_overlap": None} == {**self.layout_record(), "sp_overlap": None}:
                mode, chunks = choice_from(before.get("sp_overlap"))
            if mode == "auto":
                mode, chunks, report = choose_overlap(self.config, self.groups, dtype_of(self.config))
                self.console.line(report)
        assert mode in ("none", "split-qkv", "chunked")
        self.overlap_choice = {"mode": mode, "chunks": chunks}
        overlap = overlap and mode != "none"
        steps = self.config.logging.report_overlap
        self.overlap = None if steps is None else OverlapReport(steps, self.groups, self.run_dir, self.console.line)
        self.layout = ParallelContext.of(
            self.groups, tp_seq=parallel.sequence_parallel, mode=cast("OverlapMode", mode), num_chunks=chunks, overlap=overlap,
            recorder=None if self.overlap is None else self.overlap.recorder,
        )  # fmt: skip

    def layout_record(self) -> dict[str, Any]:
        """Return the description of the layout that is stored in a checkpoint."""
        groups, parallel = self.groups, self.config.parallel
        return {
            "world_size": groups.world_size, "dp": groups.dp_size, "sp": groups.sp.size(), "tp": groups.tp.size(),
            "tp_seq": parallel.sequence_parallel, "sp_overlap": getattr(self, "overlap_choice", None),
        }  # fmt: skip

    def _build_model(self) -> None:
        config, device, precision = self.config, self.groups.device, self.config.precision
        sharded = build_sharded(self.task.build_model, config, self.layout, self.groups, device)
        sharded.fingerprint.require_equal(self.groups)
        self.model, self.units, self.weights, self.gradients = sharded.model, sharded.units, sharded.weights, sharded.gradients
        self.optimizer = FlatOptimizer(self.units, config.optimizer, tp=self.groups.tp, everybody=self.groups.world, host=sharded.host)
        self.scaler = LossScaler(
            enabled=precision.fp16, fixed=precision.loss_scale, initial=precision.initial_loss_scale, minimum=precision.min_loss_scale,
            window=precision.loss_scale_window, hysteresis=precision.hysteresis,
        )  # fmt: skip
        self.state = TrainingState(self.model, self.units, self.optimizer, self.scaler)
        self.state.tokenizer, self.state.evaluation_data = self.tokenizer_record, self.datasets.evaluation_fingerprints

    def _load(self, source: Path, stored: dict[str, Any]) -> None:
        checkpoint = self.config.checkpoint
        finetune = self._finetunes
        only_validates = self.config.batch.skip_train
        samples = SampleHistory() if finetune or only_validates else self._check_data(stored)
        weights_only = finetune or only_validates or (checkpoint.no_load_optim and not self.goes_on)
        with all_ranks_agree(self.groups.control):
            if not weights_only and not stored.get("has_optimizer"):
                raise CheckpointError(
                    f"{source} has no optimizer state (it was saved with --no-save-optim): add --no-load-optim to go on with a fresh"
                    " optimizer, or --finetune to start anew from its weights"
                )
            if not finetune and not only_validates:
                self._check_schedule(stored)
            shapes = self.checkpointer.tensor_shapes(source)
            wanted, unread = self.state.to_load(shapes, weights_only=weights_only)
            if finetune:
                wanted = {name: t for name, t in wanted.items() if name in shapes or not name.startswith(self.task.new_parameters)}
        self.checkpointer.load(source, wanted, partial=weights_only, unread=unread, cast=True)
        self.state.after_load(weights_only=weights_only)
        self.weights.refresh_all()
        if not finetune:
            self.state.load_json(stored, self.start, weights_only=weights_only)
        self.state.samples = samples
        verb = "finetuning from" if finetune else "resumed from"
        self.console.line(f"{verb} {source} (step {stored.get('step')}, {stored.get('consumed_samples')} samples)")
        if not finetune and is_ahead(stored) and not only_validates:
            self.console.line(
                "  an older version began this run, whose learning rate was that of one step later: it goes on like that"
                " (docs/how-to/megatron.md)"
            )
        for line in self._differences:
            self.console.line(f"  changed since: {line}")

    def _check_schedule(self, stored: dict[str, Any]) -> None:
        optimizer, old, new = self.config.optimizer, stored.get("schedule"), self.schedule.state()
        if optimizer.use_checkpoint_opt_param_scheduler and isinstance(old, dict):
            try:
                self.schedule = LRSchedule(**old)
            except TypeError:
                raise CheckpointError(
                    "state.json: the schedule of the checkpoint cannot be read; use --override-opt-param-scheduler"
                ) from None
            return
        if optimizer.override_opt_param_scheduler:
            return
        if isinstance(old, dict) and old.get("warmup") == round(new["warmup"]):  # older versions rounded --lr-warmup-fraction
            self.schedule = replace(self.schedule, warmup=old["warmup"])
            new = self.schedule.state()
        if old is not None and old != new:  # None: converted, it is not known
            old = old if isinstance(old, dict) else {}
            rows = "\n".join(f"  {k}: {old.get(k)} in the checkpoint, {v} here" for k, v in new.items() if old.get(k) != v)
            raise ConfigError(
                f"the learning-rate schedule is not the checkpoint's (lengths in samples):\n{rows}\n"
                "add --override-opt-param-scheduler to use this one from here on, or --use-checkpoint-opt-param-scheduler to keep the old"
            )

    def _check_data(self, stored: dict[str, Any]) -> SampleHistory:
        """Check that the training data are those of the checkpoint, by reading the samples of its last steps again. Collective.

        Returns:
            History of those samples; empty if the checkpoint has none, or the data differ and --accept-data-change is given.
        Raises:
            DataError: the data differ, without --accept-data-change.
        """
        then = stored.get("evaluation_data")
        for name, now in self.datasets.evaluation_fingerprints.items():
            if isinstance(then, dict) and then.get(name, now) != now:
                what = "validation" if name == "valid" else name
                self.console.line(f"note: the {what} data is not what it was, or is repeated otherwise: its losses are not those of before")
        old, new = stored.get("data_fingerprint"), self.datasets.fingerprint
        if old is None or self.datasets.train is None:  # converted, it is not known; or there is nothing to train on
            return SampleHistory()
        if "samples" not in stored:
            self.console.line(
                "the checkpoint is of an older version and has no digests of its samples: that the data are the same is known from their"
                " sizes and a few probes only"
            )
        history = SampleHistory.from_json(stored.get("samples", []))
        found = history.first_difference(self.datasets.train, self.config.data.dataloader_type, self.config.batch.seed, self.groups.control)
        if old == new and found is None:
            return history
        what = f"the {history.words()} were read again, and the first that differs is {found}" if found is not None else ""
        if found is not None and old == new and self.config.data.dataloader_type == "cyclic":
            what += (
                f" (if no file has changed, the order has: --dataloader-type cyclic draws it from the number of samples,"
                f" {len(self.datasets.train)} now, which for blends and synthetic data follows from the number of steps)"
            )
        if old != new:
            reason = (
                "data files, split, sequence length, seed, tokenizer or number of epochs differ, so samples would repeat or be left out"
            )
            what = f"(fingerprint {old}, now {new}) {reason}{'; ' * bool(what)}{what}"
        if not self.config.checkpoint.accept_data_change:
            raise DataError(
                f"the training data is not what the checkpoint was trained on: {what}. Restore it (`megatron-sp data verify PREFIX`"
                " compares files with their digests), or add --accept-data-change to go on with it as it is"
            )
        self.console.line(f"--accept-data-change: the training data is not what the checkpoint was trained on: {what}")
        return SampleHistory()

    def _build_step(self) -> None:
        model = self.config.model
        with all_ranks_agree(self.groups.control):
            try:
                self.kernel = choose_kernel(
                    self.config.kernels.attention_backend, self.groups.device.type, dtype_of(self.config), model.attention_dropout
                )
            except RuntimeError as error:
                raise ConfigError(str(error)) from None
        drops = max(model.attention_dropout, model.hidden_dropout) > 0
        self.train_step = TrainStep(
            StepParts(self.model, self.weights, self.gradients, self.optimizer, self.scaler), self.task.loss, self.groups,
            StepOptions(self.config.batch.seed, drops, self.kernel.name, self.task.torch_dropout), self.faults,
            None if self.overlap is None else self.overlap.recorder,
        )  # fmt: skip

    def _announce(self) -> None:
        groups, config, progress = self.groups, self.config, self.state.progress
        if config.parallel.offload_optimizer and groups.device.type == "cpu":
            self.console.line("--offload-optimizer: the model is in host memory already, so this costs memory and time, and saves nothing")
        if config.kernels.offload_activations and groups.device.type == "cpu":
            self.console.line("--offload-activations: they are in host memory already, so this costs memory and time, and saves nothing")
        self.metrics = MetricsLog(self.run_dir, config.logging, self.launch.rank, config.to_dict())
        self.status.lost = self.metrics.lost
        num_params = sum(math.prod(t.shape) for t in self.state.weights().values())
        self.reporter = StepReporter(config, groups, self.console, self.metrics, self.train_iters, self.foresight)
        self.console.line(
            f"{format_count(num_params)} parameters in {config.precision.params_dtype}, {groups.world_size} x {groups.device.type}"
            f" (dp {groups.dp_size}{self._layout_words()}), attention: {self.kernel.name} ({self.kernel.reason}), global batch"
            f" {self.plan.full} x {config.model.seq_length} tokens, steps {progress.step} to {self.train_iters}, run folder {self.run_dir}"
        )
        self.metrics.write(
            "start", step=progress.step, consumed_samples=progress.consumed_samples, attempt=self.launch.attempt,
            world_size=groups.world_size, num_params=num_params, launch_to_ready_s=time.monotonic() - self.started,
            train_iters=self.train_iters, config=config.to_dict(),
            environment=environment(groups.device, self.peers.hosts, self.layout_record(), self.kernel.name),
        )  # fmt: skip
        self.status.write(
            "running", step=progress.step, train_iters=self.train_iters, world_size=groups.world_size,
            hosts=self.peers.hosts, pids=self.peers.pids,
        )  # fmt: skip

    def _layout_words(self) -> str:
        parallel, words = self.config.parallel, ""
        if self.groups.sp.size() > 1:
            chunks = f" in {self.layout.num_chunks} chunks" if self.layout.mode == "chunked" else ""
            overlap = "overlapped" if self.layout.sp.overlap else "not overlapped"
            words += f", sp {self.groups.sp.size()}: {self.layout.mode}{chunks}, {overlap}"
        if self.groups.tp.size() > 1:
            words += f", tp {self.groups.tp.size()}{' with sequence parallel' if parallel.sequence_parallel else ''}"
        return words

    def close(self) -> None:
        """Stop threads and close files; safe to call at any time. Waits for a save in progress, only briefly if that was abandoned."""
        if self.saves is not None:
            self.saves.close()
        self.console.close()
        for loader in self.loaders:
            loader.close()
        if hasattr(self, "metrics"):
            self.metrics.close()
        self.watchdog.close()


def _where_it_starts(stored: dict[str, Any] | None, plan: BatchPlan) -> Progress:
    """Return the progress of the run before its first step.

    Raises:
        CheckpointError: a stored count is not a whole number >= 0.
    """
    progress = Progress()
    if stored is not None:
        progress.load(stored, plan.global_batch_size)
    return progress


def settle_vocab_size(config: Config, tokenizer: Tokenizer) -> None:
    """Set the model's vocabulary size to the tokenizer's, unless the command line gives it.

    Raises:
        ConfigError: the given size is less than the tokenizer's.
    """
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    elif config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size ({config.model.vocab_size}) must be at least the tokenizer's ({tokenizer.vocab_size}):"
            " leave --vocab-size out to take the tokenizer's"
        )
