"""A run and its parts: ``prepare`` builds them, ``training/loop.py`` takes the steps.

``prepare`` is the list of what is built, in the order in which errors are cheapest to find: paths and flags first, then
files, then what takes time and memory. Whatever may fail on one rank only fails on all of them (``comm/object_collectives.py``),
with an exit code of ``utils/errors.py``:

    open_checkpointer   6  the folder of --save cannot be written
    find_origin         3  the checkpoint is missing, damaged, or another run's        2  its shape does not fit the flags
    build_tokenizer     4  a file is missing, or is not the checkpoint's               3  the checkpoint is of another model
    plan_steps          2  --train-samples is less than one step                       3  the checkpoint's counts are invalid
    build_data          4  a data set is missing, damaged or too short    2  the order of its samples does not fit into memory
    settle_split        -  (--cp-comm-type auto measures here)
    choose_attention    2  the requested kernel does not run here    (--attention-backend auto measures here)
    choose_layout       -  (--sp-overlap-mode auto measures here)
    estimate_memory     2  the ranks of this host need more memory than it has, or one more than its GPU
    build_model         2  the ranks have different models; out of memory
    load_checkpoint     3  tensors are missing or damaged    4  the training data differ    2  the learning-rate schedule differs
    announce            -  (metrics.jsonl says ``start``, run_status.json says "running")

and everywhere 7 if another rank is lost. Resuming is checked in ``training/resume.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.comm.failed_ranks import Peers
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json
from megatron_sp.config.rules_batch import step_violation
from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets
from megatron_sp.data.dataset import Dataset
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.ops.fused_kernels import FusedKernels
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.optim.optimizer import LossScaler
from megatron_sp.parallel.heads import OverlapMode
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training import attention as attention_kernels
from megatron_sp.training.announcement import announce
from megatron_sp.training.attention import AttentionChoice
from megatron_sp.training.balance_rows import row_dealer, warning_about_documents
from megatron_sp.training.console import Console
from megatron_sp.training.fused import expects_triton, use_fused_kernels
from megatron_sp.training.memory_estimate import MemoryEstimate, require_order_fits
from megatron_sp.training.metrics import MetricsLog
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.training.report import StepReporter
from megatron_sp.training.run_tokenizer import find_tokenizer, keep_for_run, require_same
from megatron_sp.training.sample_history import SampleHistory
from megatron_sp.training.setup import RunStatus, dtype_of, expert_parallel, layout_groups
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.signals import KillSwitch, StopSignals
from megatron_sp.training.starting_point import starting_point
from megatron_sp.training.state import Progress, TrainingState, is_ahead
from megatron_sp.training.step import Loss, StepOptions, StepParts, TrainStep
from megatron_sp.training.watchdog import Watchdog
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.launch import Launch
from megatron_sp.utils.run_log import evaluated

if TYPE_CHECKING:
    from megatron_sp.config.curriculum import Curriculum
    from megatron_sp.parallel.row_dealing import RowDealer
    from megatron_sp.training.graphs import StepGraphs
    from megatron_sp.training.overlap import OverlapReport
    from megatron_sp.training.pipelined import Pipeline


@dataclass(frozen=True)
class Task:
    """A training task, as an entry script defines it.

    Attributes:
        name: name of the task; first part of the run folder's name if --save is not given.
        build_tokenizer: builds the tokenizer from the configuration; the model's vocabulary follows from it.
        build_datasets: (config, tokenizer, (train, valid, test) samples) -> data sets.
        build_model: (config, layout, on_unit) -> this rank's part of the model, on the CPU, with ``units()`` and
            ``unit_order()``; calls ``on_unit`` with the model and each unit as soon as the unit is built.
        loss: loss terms.
        new_parameters: prefixes of parameter names that may be missing in the checkpoint with --finetune; these are
            freshly initialized.
        finish: called with the run when it is complete, on every rank.
        torch_dropout: dropout draws from torch's generator, which must be the same on all ranks of a data-parallel
            replica.
        of_model: returns the task of a model that was not known when this one was made (--use-checkpoint-args).
        exactly: makes a context in which a model computes in fp64 what it otherwise casts to fp32, for comparisons.
    """

    name: str
    build_tokenizer: Callable[[Config], Tokenizer]
    build_datasets: Callable[[Config, Tokenizer, tuple[int, int, int]], Datasets]
    build_model: Callable[..., nn.Module]
    loss: Loss
    new_parameters: tuple[str, ...] = ()
    finish: Callable[[Run], None] | None = None
    torch_dropout: bool = False
    of_model: Callable[[Config], Task] | None = None
    exactly: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def is_own(self) -> bool:
        """False for a model from elsewhere."""
        return not self.torch_dropout


@dataclass(frozen=True)
class RunContext:
    """Everything that is known before anything is built: what to train, on which ranks, into which folder, and how to end it.

    Attributes:
        config: configuration; ``prepare`` still sets the vocabulary size, and with --use-checkpoint-args the model's
            shape.
        task: what is trained.
        launch, groups, peers: this process and the others.
        run_dir: the run's folder.
        status: ``run_status.json``.
        console: lines for the user, from rank 0.
        watchdog: ends this process if it makes no progress.
        signals: report that a signal asks for a stop.
        kill_switch: reports that a file asks for one.
        faults: injected faults.
        started: ``time.monotonic()`` of the start.
        sizes: how those of sp and cp came about.
    """

    config: Config
    task: Task
    launch: Launch
    groups: ParallelGroups
    peers: Peers
    run_dir: Path
    status: RunStatus
    console: Console
    watchdog: Watchdog
    signals: StopSignals
    kill_switch: KillSwitch
    faults: FaultPlan
    started: float = field(default_factory=time.monotonic)
    sizes: Literal["given", "timed"] = "given"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run starts from.

    Attributes:
        folder: its step folder.
        stored: its ``state.json``.
        goes_on: the run resumes from its own checkpoint, so all state is loaded, whatever the flags for --load say.
        continues_own: the records in the run folder are this run's own, too.
        finetunes: only the weights are loaded; the run starts anew.
        adopts_tokenizer: no flag names a tokenizer, so the checkpoint's is used.
    """

    folder: Path
    stored: dict[str, Any]
    goes_on: bool
    continues_own: bool
    finetunes: bool
    adopts_tokenizer: bool


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run: which ones, in which batches, at which learning rates.

    Attributes:
        batches: global batch size and number of micro-batches, as a function of consumed samples.
        start: progress before the first step of this process.
        train_iters: number of the run's last step.
        lr_schedule: learning rate and weight decay, as a function of progress.
        curriculum: length of the sequences, as a function of the step; None: whole samples.
    """

    batches: BatchPlan
    start: Progress
    train_iters: int
    lr_schedule: LRSchedule
    curriculum: Curriculum | None = None


@dataclass(frozen=True)
class RunData:
    """Data sets of a run, and a loader for each.

    Attributes:
        train_loader: None if there are no training data.
        evaluated: what an evaluation of "valid" or "test" goes through, with the names of the sets.
    """

    datasets: Datasets
    train_loader: BatchLoader | None
    evaluated: Mapping[str, tuple[tuple[str, BatchLoader], ...]]


@dataclass(frozen=True)
class RunLayout:
    """Division of the model among the ranks, as the layers see it and as a checkpoint records it.

    Attributes:
        parallel: what the layers are built with.
        overlap: resolved overlap mode of the sp exchanges: {"mode", "chunks"}.
        overlap_report: records the collectives of some steps (--report-overlap); None: no report.
        record: ``layout`` of ``state.json``.
        pipeline: stages and schedules; None: the model is not cut.
    """

    parallel: ParallelContext
    overlap: dict[str, Any]
    overlap_report: OverlapReport | None
    record: dict[str, Any]
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class Run:
    """A prepared run: what the training loop is handed. Of all this only ``state`` and the tensors in ``parts`` change with the steps.

    Attributes:
        context: what the run was started with.
        origin: checkpoint that was loaded; None: a fresh start.
        checkpointer: reads and writes the run's checkpoints.
        plan: the steps to take.
        data: data sets and loaders.
        layout: division of the model among the ranks.
        memory_estimate: predicted memory of this rank.
        parts: model, weights, gradients, optimizer and loss scaler.
        state: progress, and everything else that a checkpoint holds.
        attention: attention kernel, and what the candidates took.
        fused: kernels of AdamW, norms and elementwise operations.
        train_step: takes one step.
        evaluated: what former processes of this run have evaluated at the step it starts from: "valid", "test".
        metrics: writes ``metrics.jsonl``.
        reporter: turns the results of steps into lines and records.
    """

    context: RunContext
    origin: Origin | None
    checkpointer: Checkpointer
    plan: StepPlan
    data: RunData
    layout: RunLayout
    memory_estimate: MemoryEstimate
    parts: StepParts
    state: TrainingState
    attention: AttentionChoice
    fused: FusedKernels
    train_step: TrainStep
    evaluated: list[str]
    metrics: MetricsLog
    reporter: StepReporter

    @property
    def continues_own(self) -> bool:
        """True if the records in the run folder are this run's own."""
        return self.origin is not None and self.origin.continues_own


def prepare(context: RunContext, closing: ExitStack) -> Run:
    """Build the parts of a run and load its checkpoint. Collective.

    Args:
        context: what the run was started with.
        closing: receives what must be closed, however the run ends.
    """
    config, console = context.config, context.console
    for line in config.remarks:
        console.line(line)
    checkpointer = open_checkpointer(context)
    origin = find_origin(context, checkpointer)
    if config.checkpoint.use_checkpoint_args and context.task.of_model is not None:
        context = replace(context, task=context.task.of_model(config))
    tokenizer, changes = build_tokenizer(context, origin)
    tokenizer_record = keep_tokenizer(context, tokenizer)
    plan = plan_steps(context, origin)
    data = build_data(context, plan, tokenizer, closing)
    context = settle_split(context, origin)
    choose_pipeline_schedule(context)
    attention = choose_attention(context, origin)
    layout = choose_layout(context, origin, attention)
    memory_estimate = estimate_memory(context, layout, attention)
    parts, state, fused = build_model(context, layout)
    state.tokenizer, state.evaluation_data = tokenizer_record, data.datasets.evaluation_fingerprints
    if origin is not None:
        plan = load_checkpoint(context, checkpointer, origin, plan, data, parts, state)
        for line in changes:
            console.line(f"  changed since: {line}")
    train_step = build_step(context, layout, parts, attention)
    graphs = use_graphs(context, origin, layout, train_step, state.progress.step)
    done = find_evaluated(context, origin, state.progress.step)
    for line in _useless_offloads(config, context.groups.device.type):
        console.line(line)
    metrics = open_metrics(context, closing)
    reporter = StepReporter(
        config, context.groups, console, metrics, plan.train_iters, memory_estimate, getattr(parts.model, "flops_per_token", None)
    )
    if graphs is not None:
        reporter.graphs_bytes = lambda: graphs.num_bytes
    run = Run(
        context=context, origin=origin, checkpointer=checkpointer, plan=plan, data=data, layout=layout, memory_estimate=memory_estimate,
        parts=parts, state=state, attention=attention, fused=fused, train_step=train_step, evaluated=done,
        metrics=metrics, reporter=reporter,
    )  # fmt: skip
    announce(run)
    return run


def open_checkpointer(context: RunContext) -> Checkpointer:
    """Return the reader and writer of checkpoints; with --save, after cleaning up behind interrupted saves. Collective."""
    checkpoint = context.config.checkpoint
    checkpointer = Checkpointer(
        context.run_dir, rank=context.launch.rank, world_size=context.launch.world_size, group=context.groups.control,
        faults=context.faults, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every,
    )  # fmt: skip
    if checkpoint.save is not None:
        checkpointer.prepare()
    return checkpointer


def find_origin(context: RunContext, checkpointer: Checkpointer) -> Origin | None:
    """Return the verified checkpoint to start from; None for a fresh start, which is never a fallback. Collective.

    With --use-checkpoint-args the configuration takes the model's shape from it.
    """
    config, checkpoint = context.config, context.config.checkpoint
    point = starting_point(
        config, context.run_dir, has_checkpoint=checkpointer.has_checkpoint, is_vacant=checkpointer.is_vacant,
        attempt=context.launch.attempt,
    )  # fmt: skip
    if point.note:
        context.console.line(point.note)
    folder = stored = None
    if point.source is not None:
        from megatron_sp.training.checkpoint_model import keep_null_vocabulary

        folder = checkpointer.find(point.source, point.ckpt_step, checkpoint.resume_fallback)
        stored = checkpointer.read_state(folder)
        for line in keep_null_vocabulary(stored, config):
            context.console.line(line)
    adopts_tokenizer, told = False, config.remarks
    if checkpoint.use_checkpoint_args:
        from megatron_sp.training.checkpoint_model import take_model

        adopts_tokenizer = take_model(stored, config, context.launch.world_size)
        for line in config.remarks:
            if line not in told:
                context.console.line(line)
    if folder is None or stored is None:
        return None
    from megatron_sp.training.checkpoint_model import keep_gelu

    for line in keep_gelu(stored, config):
        context.console.line(line)
    return Origin(folder, stored, point.goes_on, point.continues_own, checkpoint.finetune and not point.goes_on, adopts_tokenizer)


def build_tokenizer(context: RunContext, origin: Origin | None) -> tuple[Tokenizer, list[str]]:
    """Build the tokenizer, which sets the vocabulary size, and check tokenizer and model against the checkpoint's. Collective.

    Returns:
        The tokenizer, and a line about each harmless change of a setting since the checkpoint.
    """
    config, tell = context.config, context.console.line
    changes: list[str] = []
    resumes = origin is not None and not origin.finetunes and not config.batch.skip_train
    with all_ranks_agree(context.groups.control):
        if origin is not None:
            find_tokenizer(
                config.data, origin.stored, origin.folder, goes_on=resumes, is_adopted=origin.adopts_tokenizer, tell=tell
            )  # fmt: skip
        tokenizer = context.task.build_tokenizer(config)
        settle_vocab_size(config, tokenizer)
        if origin is not None:
            from megatron_sp.training.checkpoint_model import check_model

            changes = check_model(origin.stored, config, finetunes=origin.finetunes)
        if origin is not None and resumes:
            require_same(tokenizer, origin.stored, origin.folder, accept=config.checkpoint.accept_data_change, tell=tell)
    return tokenizer, changes


def keep_tokenizer(context: RunContext, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Copy the tokenizer into the run's folder with --save; return its record for ``state.json``, the same on every rank. Collective."""
    record: dict[str, Any] | None = None
    with all_ranks_agree(context.groups.control):
        if context.config.checkpoint.save is not None and context.launch.rank == 0:
            record = keep_for_run(context.run_dir, context.config.data, tokenizer, context.console.line)
    record = broadcast_json(record, context.groups.control)
    return record


def plan_steps(context: RunContext, origin: Origin | None) -> StepPlan:
    """Return the steps to take: from the checkpoint's to --train-iters, or until --train-samples or --train-tokens are consumed.

    Raises:
        CheckpointError: a stored count is not a whole number >= 0.
        ConfigError: --train-samples is less than one step; a size of --step-batch-size-schedule that is still to come is not whole on
            these ranks.
    """
    batch, length = context.config.batch, context.config.model.seq_length or 1
    batches, start = BatchPlan.from_config(batch, context.groups.dp_size, length), Progress()
    if origin is not None and not origin.finetunes:  # what is consumed stays consumed, whatever the batch size was then
        start.load(origin.stored, batches.global_batch_size)
    if problem := step_violation(batch, length, context.groups.dp_size, start.consumed_samples):
        raise ConfigError(problem)
    curriculum = None
    if batch.seq_length_curriculum is not None:
        from megatron_sp.config.curriculum import read_curriculum

        curriculum = read_curriculum(batch.seq_length_curriculum)
    lasts = [] if batch.train_iters is None else [batch.train_iters]
    if batch.train_samples is not None:
        lasts.append(start.step + batches.steps_for(batch.train_samples, start.consumed_samples))
    if batch.train_tokens is not None:
        done = (start.step, start.consumed_samples, start.consumed_tokens)
        of_step = lambda step: length if curriculum is None else min(length, curriculum.length(step))
        lasts.append(start.step + batches.steps_for_tokens(batch.train_tokens, of_step, done))
    train_iters = min(lasts, default=start.step)
    if train_iters == 0 and not batch.skip_train:
        raise ConfigError(
            f"train_samples ({batch.train_samples}) is less than one step takes ({batches.global_batch_size(0)}):"
            " raise --train-samples, or lower --global-batch-size"
        )
    schedule = LRSchedule.from_config(context.config.optimizer, batch, batches.samples_after)
    return StepPlan(batches, start, train_iters, schedule, curriculum)


def build_data(context: RunContext, plan: StepPlan, tokenizer: Tokenizer, closing: ExitStack) -> RunData:
    """Build data sets with as many samples as the run will read, and their loaders. Collective."""
    batch, start, each = context.config.batch, plan.start, plan.batches.evaluation
    train = plan.batches.samples_after(max(plan.train_iters - start.step, 0), start.consumed_samples)
    train = 0 if batch.skip_train else max(train, batch.train_samples or 0)  # a batch that is not full is dropped, but was asked for
    last_step = max(plan.train_iters, start.step, 1)  # a checkpoint may be beyond the end of a run that was made shorter
    passes = 1 if batch.skip_train else last_step // (batch.eval_interval or last_step) + 1
    samples = (train, passes * batch.eval_iters * each, batch.eval_iters * each)
    with all_ranks_agree(context.groups.control):
        require_order_fits(context.config, samples)
        datasets = context.task.build_datasets(context.config, tokenizer, samples)
        about_documents = warning_about_documents(context.config, datasets.train)
        deal_rows = None if datasets.train is None else row_dealer(context.config, datasets.train, context.groups.dp_size)
    for warning in (*datasets.warnings, *([about_documents] if about_documents else [])):
        context.console.line(f"warning: {warning}")
    for note in datasets.notes:
        context.console.line(f"note: {note}")
    if context.config.data.full_validation:
        for name, dataset in datasets.evaluated("valid"):
            context.console.line(_about_whole_set(name, len(dataset), each))
    workers, training = context.config.data.num_workers, datasets.train
    return RunData(
        datasets,
        None if training is None else _open_loader(context, training, closing, num_workers=workers, digests=True, deal_rows=deal_rows),
        {
            split: tuple((name, _open_loader(context, dataset, closing)) for name, dataset in datasets.evaluated(split))
            for split in ("valid", "test")
        },
    )


def _about_whole_set(name: str, samples: int, batch: int) -> str:
    """Return a line about what a validation of a whole data set reads.

    Raises:
        DataError: it is less than a batch.
    """
    what = f"--full-validation: {name or 'the validation set'} has {samples:,} samples of a sequence"
    if samples < batch:
        raise DataError(f"{what}, less than a batch of {batch}: lower --eval-global-batch-size to {samples} or less, or use more data")
    left_out = f"; the last {samples % batch} are left out" if samples % batch else ""
    return f"{what}, which are {samples // batch:,} batches of {batch}{left_out}"


def _open_loader(
    context: RunContext, dataset: Dataset, closing: ExitStack, *, num_workers: int = 0, digests: bool = False,
    deal_rows: RowDealer | None = None,
) -> BatchLoader:  # fmt: skip
    config, groups = context.config, context.groups
    loader = BatchLoader(
        dataset, micro_batch_size=config.batch.micro_batch_size, dp_rank=groups.dp_rank, dp_size=groups.dp_size,
        order=config.data.dataloader_type, seed=config.batch.seed, num_workers=num_workers,
        pin_memory=groups.device.type == "cuda", digests=digests, deal_rows=deal_rows,
    )  # fmt: skip
    return closing.enter_context(loader)


def settle_split(context: RunContext, origin: Origin | None) -> RunContext:
    """Resolve --cp-comm-type auto, as in the checkpoint if the same ranks share a sequence there. Collective.

    Returns:
        The run with the groups of the sizes chosen, which the configuration has then, too.
    """
    config, groups = context.config, context.groups
    if not config.parallel.measures_split:
        return context
    from megatron_sp.config.rules_context import with_split
    from megatron_sp.training.probe import choose_split, split_from, words_for_split

    ranks = config.parallel.context_parallel_size
    before = None if origin is None else origin.stored.get("layout")
    others = {key: value for key, value in _layout_record(context).items() if key not in ("sp", "cp")}
    kept = split_from(before, ranks) if isinstance(before, dict) and others.items() <= before.items() else None
    if kept is not None:
        sp, cp = kept
        context.console.line(f"--cp-comm-type auto: {words_for_split(kept)}, as before the resume")
    else:
        sp, cp, report = choose_split(config, groups, dtype_of(config))
        context.console.line(report)
    config.parallel = with_split(config, sp, cp).parallel
    if (sp, cp) != (1, ranks):
        groups.destroy()
        groups = layout_groups(config, groups.device, check=config.parallel.check_collectives, control=groups.control)
    return replace(context, groups=groups, sizes="timed")


def choose_pipeline_schedule(context: RunContext) -> None:
    """Resolve --pipeline-schedule auto."""
    if context.config.parallel.pipeline_schedule == "auto":
        from megatron_sp.estimate.pipeline_choice import settle_schedule

        if line := settle_schedule(context.config, context.groups.world_size):
            context.console.line(line)


def choose_attention(context: RunContext, origin: Origin | None) -> AttentionChoice:
    """Choose the attention kernel, as in the checkpoint if its layout is the same. Collective.

    Raises:
        ConfigError: the requested one does not run on some rank.
    """
    before = None if origin is None else origin.stored.get("layout")
    alike = isinstance(before, dict) and _is_same_layout(before, _layout_record(context))
    kept = before.get("attention") if alike and isinstance(before, dict) else None
    # a model of others has attention of its own
    return attention_kernels.choose_attention(context.config, context.groups, kept, measure=not context.task.torch_dropout)


def _layout_record(context: RunContext) -> dict[str, Any]:
    groups = context.groups
    return {
        "world_size": groups.world_size, "pp": groups.pp.size(), "dp": groups.dp_size, "cp": groups.cp.size(), "sp": groups.sp.size(),
        "tp": groups.tp.size(),
        "tp_seq": context.config.parallel.sequence_parallel, "ep": context.config.parallel.expert_model_parallel_size,
    }  # fmt: skip


def _is_same_layout(stored: dict[str, Any], record: dict[str, Any]) -> bool:
    known = {key: value for key, value in stored.items() if key not in ("sp_overlap", "attention", "sizes", "cuda_graphs")}
    return {"cp": 1, "pp": 1, "ep": 1, **known} == record  # older checkpoints do not name these


def choose_layout(context: RunContext, origin: Origin | None, attention: AttentionChoice) -> RunLayout:
    """Resolve --sp-overlap-mode auto, as in the checkpoint if its layout is the same, and build the layers' layout. Collective."""
    config, groups, parallel = context.config, context.groups, context.config.parallel
    record = _layout_record(context)
    chunks = parallel.sp_head_chunks or 2
    mode: str = parallel.overlap_mode
    if mode == "auto":
        from megatron_sp.training.probe import choice_from, choose_overlap

        before = None if origin is None else origin.stored.get("layout")
        if isinstance(before, dict) and _is_same_layout(before, record):
            mode, chunks = choice_from(before.get("sp_overlap"))
        if mode == "auto":
            mode, chunks, report = choose_overlap(config, groups, dtype_of(config), attention.kernel.name)
            context.console.line(report)
    assert mode in ("none", "split-qkv", "chunked")
    steps = config.logging.report_overlap
    pipeline = None
    if parallel.pipeline_model_parallel_size > 1:
        from megatron_sp.training.pipelined import build_pipeline

        pipeline = build_pipeline(config, groups)
        assert pipeline is not None
        context.watchdog.locate = pipeline.locate
        context.peers.parts[:] = pipeline.parts
    experts = expert_parallel(config, groups)
    overlap_report: OverlapReport | None = None
    if steps is not None:
        from megatron_sp.training.overlap import OverlapReport

        overlap_report = OverlapReport(steps, groups, context.run_dir, context.console.line, pipeline, experts.group)
    layers = ParallelContext.of(
        groups, tp_seq=parallel.sequence_parallel, mode=cast("OverlapMode", mode), num_chunks=chunks,
        overlap=parallel.overlaps_exchanges and mode != "none",
        recorder=None if overlap_report is None else overlap_report.recorder,
        cp_chunks=parallel.cp_chunks, cp_stages_ahead=parallel.num_stages_ahead, cp_keep_kv=parallel.cp_keep_kv,
        stages=() if pipeline is None else pipeline.own_stages, num_slices=parallel.num_pipeline_slices,
        ep=experts,
    )  # fmt: skip
    overlap = {"mode": mode, "chunks": chunks}
    found = {**record, "sp_overlap": overlap, "attention": attention.kernel.name, "sizes": context.sizes}
    return RunLayout(layers, overlap, overlap_report, found, pipeline)


def estimate_memory(context: RunContext, layout: RunLayout, attention: AttentionChoice) -> MemoryEstimate:
    """Predict the memory of this rank; refuse what cannot do, and warn of what may not. Collective, unless --skip-train is given."""
    launch, status = context.launch, context.status
    estimate = MemoryEstimate(
        context.config, layout.overlap, launch.world_size, launch.local_world_size, context.groups.device, attention.kernel.name,
        fused=expects_triton(context.config, context.groups.device), repeats_attention=bool(attention.repeated),
        is_own=context.task.is_own,
    )  # fmt: skip
    status.explain_memory = estimate.explain
    if not context.config.batch.skip_train:
        with all_ranks_agree(context.groups.control):
            warning = estimate.warning()
        for line in warning:
            context.console.line(line)
    return estimate


def build_model(context: RunContext, layout: RunLayout) -> tuple[StepParts, TrainingState, FusedKernels]:
    """Build this rank's part of the model, with initial weights, and what updates it. Collective."""
    config, groups, precision = context.config, context.groups, context.config.precision
    sharded = build_sharded(context.task.build_model, config, layout.parallel, groups, groups.device)
    sharded.fingerprint.require_equal(groups, layout.parallel.ep.rank)
    fused = use_fused_kernels(config, sharded.model, groups)
    if config.model.has_experts and groups.device.type == "cuda":
        from megatron_sp.ops.expert_mlp import runs_grouped

        runs_grouped(groups.device)
    optimizer = sharded.optimizer(config, groups, "apex" if fused.adamw is not None and fused.adamw.name == "apex" else "torch")
    scaler = LossScaler(
        enabled=precision.fp16, fixed=precision.loss_scale, initial=precision.initial_loss_scale, minimum=precision.min_loss_scale,
        window=precision.loss_scale_window, hysteresis=precision.hysteresis,
    )  # fmt: skip
    parts = StepParts(sharded.model, sharded.weights, sharded.gradients, optimizer, scaler, layout.pipeline)
    return parts, TrainingState(sharded.model, sharded.units, optimizer, scaler), fused


def load_checkpoint(
    context: RunContext, checkpointer: Checkpointer, origin: Origin, plan: StepPlan, data: RunData, parts: StepParts, state: TrainingState
) -> StepPlan:  # fmt: skip
    """Load weights, and unless they are finetuned or evaluated only, everything else that the run goes on from. Collective.

    Returns:
        The plan, with the learning-rate schedule that the run goes on with.
    """
    from megatron_sp.training.resume import resume_samples, resume_schedule

    config, console, stored = context.config, context.console, origin.stored
    takes_weights = origin.finetunes or config.batch.skip_train  # and nothing else: there is no training to go on with
    weights_only = takes_weights or (config.checkpoint.no_load_optim and not origin.goes_on)
    samples = SampleHistory()
    if not takes_weights:
        samples = resume_samples(stored, data.datasets, config, context.groups.control, console.line)
    with all_ranks_agree(context.groups.control):
        if not weights_only and not stored.get("has_optimizer"):
            raise CheckpointError(
                f"{origin.folder} has no optimizer state (it was saved with --no-save-optim): add --no-load-optim to go on with a fresh"
                " optimizer, or --finetune to start anew from its weights"
            )
        if (require_same := getattr(parts.model, "require_same", None)) is not None:
            require_same(stored.get("foreign_model"), finetunes=origin.finetunes)
        if not takes_weights:
            plan = replace(plan, lr_schedule=resume_schedule(stored, config.optimizer, plan.lr_schedule))
        shapes = checkpointer.tensor_shapes(origin.folder)
        wanted, unread = state.to_load(shapes, weights_only=weights_only)
        if origin.finetunes:
            wanted = {name: t for name, t in wanted.items() if name in shapes or not name.startswith(context.task.new_parameters)}
    checkpointer.load(origin.folder, wanted, partial=weights_only, unread=unread, cast=True)
    state.after_load(weights_only=weights_only)
    parts.weights.refresh_all()
    if not origin.finetunes:
        state.load_json(stored, plan.start, weights_only=weights_only)
    state.samples = samples
    verb = "finetuning from" if origin.finetunes else "resumed from"
    console.line(f"{verb} {origin.folder} (step {stored.get('step')}, {stored.get('consumed_samples')} samples)")
    if not takes_weights and is_ahead(stored):
        console.line(
            "  an older version began this run, whose learning rate was that of one step later: it goes on like that"
            " (docs/how-to/megatron.md)"
        )
    return plan


def build_step(context: RunContext, layout: RunLayout, parts: StepParts, attention: AttentionChoice) -> TrainStep:
    """Return what takes a step with these parts."""
    config, task = context.config, context.task
    drops = max(config.model.attention_dropout, config.model.hidden_dropout) > 0
    options = StepOptions(config.batch.seed, drops, attention.kernel.name, task.torch_dropout, repeats_attention=bool(attention.repeated))
    recorder = None if layout.overlap_report is None else layout.overlap_report.recorder
    return TrainStep(parts, task.loss, context.groups, options, context.faults, recorder)


def use_graphs(
    context: RunContext, origin: Origin | None, layout: RunLayout, step: TrainStep, begun: int
) -> StepGraphs | None:  # fmt: skip
    """Let steps be captured where they can be (--cuda-graphs), by the choice of the checkpoint if its layout is the same.

    Returns:
        What captures them; None where they cannot be.
    """
    config, device, record = context.config, context.groups.device, layout.record
    mode = config.kernels.cuda_graphs
    if mode == "off" or config.batch.skip_train or device.type != "cuda":  # on a CPU nobody expects a graph
        return None
    from megatron_sp.ops.cuda_graphs import CudaGraphs
    from megatron_sp.training.graphs import StepGraphs, is_profiled, why_not_captured

    lacks = why_not_captured(config, device.type, is_own=context.task.is_own)
    for obstacle in lacks:
        context.console.line(f"captured steps: not used, {obstacle.reason}")
    if lacks:
        return None
    before = None if origin is None else origin.stored.get("layout")
    kept = before.get("cuda_graphs") if isinstance(before, dict) and _is_same_layout(before, _layout_record(context)) else None
    step.graphs = graphs = StepGraphs(
        step, lambda: CudaGraphs(device), mode=mode, warmup=config.kernels.cuda_graph_warmup_steps,
        is_eager=lambda number: is_profiled(config.logging, begun, number), tell=context.console.line,
        kept=kept if isinstance(kept, bool) else None, decided=lambda used: record.update(cuda_graphs=used),
    )  # fmt: skip
    return graphs


def find_evaluated(context: RunContext, origin: Origin | None, step: int) -> list[str]:
    """Return what ``metrics.jsonl`` says was evaluated at this step, the same on every rank. Collective.

    A kill between a save and the end of the validation after it leaves the validation to be made up for.
    """
    own = origin is not None and origin.continues_own and not context.config.batch.skip_train
    done = evaluated(context.run_dir, step) if own and context.launch.rank == 0 else []
    found: list[str] = broadcast_json(done, context.groups.control)
    return found


def open_metrics(context: RunContext, closing: ExitStack) -> MetricsLog:
    """Open the logs; what they lose to a full disk is reported in ``run_status.json``, too."""
    config = context.config
    metrics = MetricsLog(context.run_dir, config.logging, context.launch.rank, config.to_dict())
    closing.callback(metrics.close)
    context.status.lost = metrics.lost
    return metrics


def _useless_offloads(config: Config, device_type: str) -> Iterator[str]:
    """Yield a line about each offload to host memory that gains nothing, since the model is there already."""
    if device_type != "cpu":
        return
    if config.parallel.offload_optimizer:
        yield "--offload-optimizer: the model is in host memory already, so this costs memory and time, and saves nothing"
    if config.kernels.offload_activations:
        yield "--offload-activations: they are in host memory already, so this costs memory and time, and saves nothing"


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
