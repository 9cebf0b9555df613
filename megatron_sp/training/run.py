"""A run and its parts: ``prepare`` builds them, ``training/loop.py`` takes the steps.

``prepare`` is the list of what is built, in the order in which errors are cheapest to find: paths and flags first, then
files, then what takes time and memory. Whatever may fail on one rank only fails on all of them
(``comm/object_collectives.py``), with an exit code of ``utils/errors.py``:

    open_checkpointer   6  the folder of --save cannot be written
    find_origin         3  the checkpoint is missing, damaged, or another run's    2  its shape does not fit the flags
    build_tokenizer     4  a file is missing, or is not the checkpoint's           3  the checkpoint is of another model
    plan_steps          2  --train-samples is less than one step               3  the checkpoint's counts are invalid
    build_data          4  a data set is missing, damaged or too short         2  the samples' order exceeds the memory
    choose_split        -  (--cp-comm-type auto measures here)
    choose_attention    2  the requested kernel does not run here    (--attention-backend auto measures here)
    choose_layout       -  (--sp-overlap-mode auto measures here)
    estimate_memory     2  the ranks of this host need more memory than it has, or one more than its GPU
    build_model         2  the ranks have different models; out of memory
    load_checkpoint     3  tensors are missing or damaged    4  the training data differ    2  the schedule differs
    announce            -  (metrics.jsonl says ``start``, run_status.json says "running")

and everywhere 7 if another rank is lost. Resuming is checked in ``training/resume.py``.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json
from megatron_sp.config.rules_training import step_violation
from megatron_sp.config.schema import Config, default_type
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer, kept
from megatron_sp.ops.fused_kernels import FusedKernels
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.optim.optimizer import LossScaler
from megatron_sp.parallel.heads import OverlapMode
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training import kernel_selection
from megatron_sp.training.kernel_selection import AttentionChoice
from megatron_sp.training.memory_estimate import MemoryEstimate, require_order_fits
from megatron_sp.training.metrics import MetricsLog
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.training.parts import Origin, Run, RunContext, RunData, RunLayout, StepPlan
from megatron_sp.training.report import StepReporter, announce
from megatron_sp.training.resume_point import find_resume_point
from megatron_sp.training.setup import dtype_of, expert_parallel
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.step import StepOptions, StepParts, TrainStep
from megatron_sp.training.train_state import Progress, SampleHistory, TrainState, is_ahead
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError
from megatron_sp.utils.run_log import evaluated

if TYPE_CHECKING:
    from megatron_sp.training.graphs import StepGraphs


def prepare(context: RunContext, closing: ExitStack) -> Run:
    """Build the parts of a run and load its checkpoint. Collective.

    ``closing`` receives what must be closed, however the run ends.
    """
    config, console = context.config, context.console
    for line in config.remarks:
        console.line(line)
    checkpointer = open_checkpointer(context)
    origin = find_origin(context, checkpointer)
    if config.checkpoint.use_checkpoint_args and context.task.of_model is not None:
        context = replace(context, task=context.task.of_model(config))
    tokenizer, tokenizer_record, changes = build_tokenizer(context, origin)
    plan = plan_steps(context, origin)
    data = build_data(context, plan, tokenizer, closing)
    context = choose_split(context, origin)
    if config.parallel.pipeline_schedule == "auto":
        from megatron_sp.estimate.pipeline_choice import settle_schedule

        if line := settle_schedule(config, context.groups.world_size):
            console.line(line)
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
    step = state.progress.step
    graphs = use_graphs(context, origin, layout, train_step, step)
    # a kill between a save and the end of the validation after it leaves the validation to be made up for
    own_records = origin is not None and origin.continues_own and not config.batch.skip_train
    done = evaluated(context.run_dir, step) if own_records and context.launch.rank == 0 else []
    done = broadcast_json(done, context.groups.control)
    if context.groups.device.type == "cpu":
        useless = "in host memory already, so this costs memory and time, and saves nothing"
        if config.parallel.offload_optimizer:
            console.line(f"--offload-optimizer: the model is {useless}")
        if config.kernels.offload_activations:
            console.line(f"--offload-activations: they are {useless}")
    metrics = MetricsLog(context.run_dir, config.logging, context.launch.rank, config.to_dict())
    closing.callback(metrics.close)
    context.status.lost = metrics.lost  # what a full disk takes from the logs is in ``run_status.json``, too
    flops = getattr(parts.model, "flops_per_token", None)
    reporter = StepReporter(
        config, context.groups, console, metrics, plan.train_iters, memory_estimate, flops
    )  # fmt: skip
    if graphs is not None:
        reporter.graphs_bytes = lambda: graphs.num_bytes
    run = Run(
        context, origin, checkpointer, plan, data, layout, memory_estimate, parts, state, attention, fused, train_step,
        done, metrics, reporter,
    )  # fmt: skip
    announce(run)
    return run


def open_checkpointer(context: RunContext) -> Checkpointer:
    # the reader and writer of checkpoints; with --save it cleans up behind interrupted saves. Collective
    checkpoint, launch = context.config.checkpoint, context.launch
    checkpointer = Checkpointer(
        context.run_dir, rank=launch.rank, world_size=launch.world_size, group=context.groups.control,
        faults=context.faults, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every,
    )  # fmt: skip
    if checkpoint.save is not None:
        checkpointer.prepare()
    return checkpointer


def find_origin(context: RunContext, checkpointer: Checkpointer) -> Origin | None:
    """Return the verified checkpoint to start from; None for a fresh start. Collective."""
    config, checkpoint, tell = context.config, context.config.checkpoint, context.console.line
    point = find_resume_point(
        config, context.run_dir, has_checkpoint=checkpointer.has_checkpoint, is_vacant=checkpointer.is_vacant,
        attempt=context.launch.attempt,
    )  # fmt: skip
    if point.note:
        tell(point.note)
    if point.source is None and not checkpoint.use_checkpoint_args:
        return None
    from megatron_sp.training.resume import keep_gelu, keep_null_vocabulary, take_model

    folder = stored = None
    if point.source is not None:
        folder = checkpointer.find(point.source, point.ckpt_step, checkpoint.resume_fallback)
        stored = checkpointer.read_state(folder)
        for line in keep_null_vocabulary(stored, config):
            tell(line)
    adopts_tokenizer, known_remarks = False, config.remarks
    if checkpoint.use_checkpoint_args:
        adopts_tokenizer = take_model(stored, config, context.launch.world_size)
        for line in config.remarks:
            if line not in known_remarks:
                tell(line)
    if folder is None or stored is None:
        return None
    for line in keep_gelu(stored, config):
        tell(line)
    finetunes = checkpoint.finetune and not point.goes_on
    return Origin(folder, stored, point.goes_on, point.continues_own, finetunes, adopts_tokenizer)


def build_tokenizer(
    context: RunContext, origin: Origin | None
) -> tuple[Tokenizer, dict[str, Any] | None, list[str]]:  # fmt: skip
    """Build the tokenizer, which sets the vocabulary size, and check it against the checkpoint's. Collective."""
    # also returns its record for ``state.json``, and a line about each harmless change of a setting
    config, tell = context.config, context.console.line
    changes: list[str] = []
    resumes = origin is not None and not origin.finetunes and not config.batch.skip_train
    with all_ranks_agree(context.groups.control):
        if origin is not None:
            from megatron_sp.training.resume import check_model, find_tokenizer, require_same_tokenizer

            adopts = origin.adopts_tokenizer
            find_tokenizer(config.data, origin.stored, origin.folder, goes_on=resumes, is_adopted=adopts, tell=tell)
        tokenizer = context.task.build_tokenizer(config)
        set_vocab_size(config, tokenizer)
        if origin is not None:
            changes = check_model(origin.stored, config, finetunes=origin.finetunes)
            if resumes:
                accepts = config.checkpoint.accept_data_change
                require_same_tokenizer(tokenizer, origin.stored, origin.folder, accept=accepts, tell=tell)
    record: dict[str, Any] | None = None
    with all_ranks_agree(context.groups.control):
        if config.checkpoint.save is not None and context.launch.rank == 0:
            try:
                record = kept.keep(context.run_dir, config.data, tokenizer)._asdict()
            except OSError as error:  # a full disk is a warning
                tell(
                    f"warning: the tokenizer cannot be kept in {context.run_dir} ({error.strerror}): until a restart"
                    " keeps it, whatever uses this run needs the files that the flags name"
                )
                kind = config.data.tokenizer_type or default_type(config.data, tokenizer.vocab_size) or ""
                record = kept.Record(kind, tokenizer.fingerprint(), None, {})._asdict()
    record = broadcast_json(record, context.groups.control)
    return tokenizer, record, changes


def set_vocab_size(config: Config, tokenizer: Tokenizer) -> None:
    """Set the model's vocabulary size to the tokenizer's, unless a flag gives it. Raises ConfigError."""
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    elif config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size ({config.model.vocab_size}) must be at least the tokenizer's ({tokenizer.vocab_size}): leave"
            " --vocab-size out to take the tokenizer's"
        )


def plan_steps(context: RunContext, origin: Origin | None) -> StepPlan:
    """Return the steps to take, up to --train-iters, --train-samples or --train-tokens."""
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
    last_steps = [] if batch.train_iters is None else [batch.train_iters]
    if batch.train_samples is not None:
        last_steps.append(start.step + batches.steps_for(batch.train_samples, start.consumed_samples))
    if batch.train_tokens is not None:
        done = (start.step, start.consumed_samples, start.consumed_tokens)
        length_at = lambda step: length if curriculum is None else min(length, curriculum.length(step))
        last_steps.append(start.step + batches.steps_for_tokens(batch.train_tokens, length_at, done))
    train_iters = min(last_steps, default=start.step)
    if train_iters == 0 and not batch.skip_train:
        raise ConfigError(
            f"train_samples ({batch.train_samples}) is less than one step takes ({batches.global_batch_size(0)}): raise"
            " --train-samples, or lower --global-batch-size"
        )
    schedule = LRSchedule.from_config(context.config.optimizer, batch, batches.samples_after)
    return StepPlan(batches, start, train_iters, schedule, curriculum)


def build_data(context: RunContext, plan: StepPlan, tokenizer: Tokenizer, closing: ExitStack) -> RunData:
    config, groups, tell = context.config, context.groups, context.console.line
    batch, start, eval_size = config.batch, plan.start, plan.batches.evaluation
    train = plan.batches.samples_after(max(plan.train_iters - start.step, 0), start.consumed_samples)
    # a batch that is not full is dropped, but was asked for
    train = 0 if batch.skip_train else max(train, batch.train_samples or 0)
    last_step = max(plan.train_iters, start.step, 1)  # the checkpoint may be beyond the end of a run made shorter
    passes = 1 if batch.skip_train else last_step // (batch.eval_interval or last_step) + 1
    samples = (train, passes * batch.eval_iters * eval_size, batch.eval_iters * eval_size)
    warning = deal_rows = None
    with all_ranks_agree(groups.control):
        require_order_fits(config, samples)
        datasets = context.task.build_datasets(config, tokenizer, samples)
        if config.parallel.balance_rows:
            from megatron_sp.training.microbatches import row_dealer, warning_about_documents

            warning = warning_about_documents(config, datasets.train)
            deal_rows = None if datasets.train is None else row_dealer(config, datasets.train, groups.dp_size)
    for line in (*datasets.warnings, *([warning] if warning else [])):
        tell(f"warning: {line}")
    for line in datasets.notes:
        tell(f"note: {line}")
    if config.data.full_validation:
        for name, dataset in datasets.evaluated("valid"):
            size = len(dataset)
            what = f"--full-validation: {name or 'the validation set'} has {size:,} samples of a sequence"
            if size < eval_size:
                raise DataError(
                    f"{what}, less than a batch of {eval_size}: lower --eval-global-batch-size to {size} or less, or"
                    " use more data"
                )
            left_out = f"; the last {size % eval_size} are left out" if size % eval_size else ""
            tell(f"{what}, which are {size // eval_size:,} batches of {eval_size}{left_out}")

    def open_loader(dataset: Any, **training: Any) -> BatchLoader:
        loader = BatchLoader(
            dataset, micro_batch_size=batch.micro_batch_size, dp_rank=groups.dp_rank, dp_size=groups.dp_size,
            order=config.data.dataloader_type, seed=batch.seed, pin_memory=groups.device.type == "cuda", **training,
        )  # fmt: skip
        return closing.enter_context(loader)

    train_loader = None
    if datasets.train is not None:
        workers = config.data.num_workers
        train_loader = open_loader(datasets.train, num_workers=workers, digests=True, deal_rows=deal_rows)
    loaders = {
        split: tuple((name, open_loader(dataset)) for name, dataset in datasets.evaluated(split))
        for split in ("valid", "test")
    }
    return RunData(datasets, train_loader, loaders)


def choose_split(context: RunContext, origin: Origin | None) -> RunContext:
    """Resolve --cp-comm-type auto, as in the checkpoint if the same ranks share a sequence there. Collective."""
    if not context.config.parallel.measures_split:
        return context
    from megatron_sp.training.probe import settle_split

    before = None if origin is None else origin.stored.get("layout")
    groups = settle_split(context.config, context.groups, before, _layout_record(context), context.console.line)
    return replace(context, groups=groups, sizes="timed")


def _layout_record(context: RunContext) -> dict[str, Any]:
    groups, parallel = context.groups, context.config.parallel
    return {
        "world_size": groups.world_size, "pp": groups.pp.size(), "dp": groups.dp_size, "cp": groups.cp.size(),
        "sp": groups.sp.size(), "tp": groups.tp.size(), "tp_seq": parallel.sequence_parallel,
        "ep": parallel.expert_model_parallel_size,
    }  # fmt: skip


def choose_attention(context: RunContext, origin: Origin | None) -> AttentionChoice:
    """Choose the attention kernel, as in the checkpoint if its layout is the same. Collective."""
    before = None if origin is None else origin.layout_like(_layout_record(context)).get("attention")
    measure = not context.task.torch_dropout  # a model of others has attention of its own
    return kernel_selection.choose_attention(context.config, context.groups, before, measure=measure)


def choose_layout(context: RunContext, origin: Origin | None, attention: AttentionChoice) -> RunLayout:
    """Resolve --sp-overlap-mode auto likewise, and build the layers' layout. Collective."""
    config, groups, parallel = context.config, context.groups, context.config.parallel
    record = _layout_record(context)
    chunks = parallel.sp_head_chunks or 2
    mode: str = parallel.overlap_mode
    if mode == "auto":
        from megatron_sp.training.probe import choice_from, choose_overlap

        before = {} if origin is None else origin.layout_like(record)
        if before:
            mode, chunks = choice_from(before.get("sp_overlap"))
        if mode == "auto":
            mode, chunks, report = choose_overlap(config, groups, dtype_of(config), attention.kernel.name)
            context.console.line(report)
    assert mode in ("none", "split-qkv", "chunked")
    pipeline = None
    if parallel.pipeline_model_parallel_size > 1:
        from megatron_sp.training.pipelined import build_pipeline

        pipeline = build_pipeline(config, groups)
        assert pipeline is not None
        context.watchdog.locate = pipeline.locate
        context.peers.parts[:] = pipeline.parts
    experts = expert_parallel(config, groups)
    steps, overlap_report = config.logging.report_overlap, None
    if steps is not None:
        from megatron_sp.training.overlap import OverlapReport

        tell = context.console.line
        overlap_report = OverlapReport(steps, groups, context.run_dir, tell, pipeline, experts.group)
    layers = ParallelContext.of(
        groups, tp_seq=parallel.sequence_parallel, mode=cast("OverlapMode", mode), num_chunks=chunks,
        overlap=parallel.overlaps_exchanges and mode != "none",
        recorder=None if overlap_report is None else overlap_report.recorder, cp_chunks=parallel.cp_chunks,
        cp_stages_ahead=parallel.num_stages_ahead, cp_keep_kv=parallel.cp_keep_kv,
        stages=() if pipeline is None else pipeline.own_stages, num_slices=parallel.num_pipeline_slices, ep=experts,
    )  # fmt: skip
    overlap = {"mode": mode, "chunks": chunks}
    record |= {"sp_overlap": overlap, "attention": attention.kernel.name, "sizes": context.sizes}
    return RunLayout(layers, overlap, overlap_report, record, pipeline)


def estimate_memory(context: RunContext, layout: RunLayout, attention: AttentionChoice) -> MemoryEstimate:
    # predict this rank's memory; refuse what cannot fit, warn of what may not. Collective, but for --skip-train
    launch, status, device = context.launch, context.status, context.groups.device
    estimate = MemoryEstimate(
        context.config, layout.overlap, launch.world_size, launch.local_world_size, device, attention.kernel.name,
        fused=kernel_selection.expects_triton(context.config, device), repeats_attention=bool(attention.repeated),
        is_own=context.task.is_own,
    )  # fmt: skip
    status.explain_memory = estimate.explain
    if not context.config.batch.skip_train:
        with all_ranks_agree(context.groups.control):
            warning = estimate.warning()
        for line in warning:
            context.console.line(line)
    return estimate


def build_model(context: RunContext, layout: RunLayout) -> tuple[StepParts, TrainState, FusedKernels]:
    """Build this rank's part of the model, with initial weights, and what updates it. Collective."""
    config, groups, precision = context.config, context.groups, context.config.precision
    sharded = build_sharded(context.task.build_model, config, layout.parallel, groups, groups.device)
    sharded.fingerprint.require_equal(groups, layout.parallel.ep.rank)
    fused = kernel_selection.use_fused_kernels(config, sharded.model, groups)
    if config.model.has_experts and groups.device.type == "cuda":
        from megatron_sp.ops.expert_mlp import runs_grouped

        runs_grouped(groups.device)
    by_apex = fused.adamw is not None and fused.adamw.name == "apex"
    optimizer = sharded.optimizer(config, groups, "apex" if by_apex else "torch")
    scaler = LossScaler(
        enabled=precision.fp16, fixed=precision.loss_scale, initial=precision.initial_loss_scale,
        minimum=precision.min_loss_scale, window=precision.loss_scale_window, hysteresis=precision.hysteresis,
    )  # fmt: skip
    parts = StepParts(sharded.model, sharded.weights, sharded.gradients, optimizer, scaler, layout.pipeline)
    return parts, TrainState(sharded.model, sharded.units, optimizer, scaler), fused


def load_checkpoint(
    context: RunContext, checkpointer: Checkpointer, origin: Origin, plan: StepPlan, data: RunData, parts: StepParts,
    state: TrainState,
) -> StepPlan:  # fmt: skip
    """Load what the run goes on from; return the plan with its learning-rate schedule. Collective."""
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
                f"{origin.folder} has no optimizer state (it was saved with --no-save-optim): add --no-load-optim to go"
                " on with a fresh optimizer, or --finetune to start anew from its weights"
            )
        if (require_same_model := getattr(parts.model, "require_same", None)) is not None:
            require_same_model(stored.get("foreign_model"), finetunes=origin.finetunes)
        if not takes_weights:
            plan = replace(plan, lr_schedule=resume_schedule(stored, config.optimizer, plan.lr_schedule))
        shapes = checkpointer.tensor_shapes(origin.folder)
        wanted, unread = state.to_load(shapes, weights_only=weights_only)
        if origin.finetunes:
            may_be_new = context.task.new_parameters
            wanted = {name: t for name, t in wanted.items() if name in shapes or not name.startswith(may_be_new)}
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
    config, task, kernel = context.config, context.task, attention.kernel.name
    drops = max(config.model.attention_dropout, config.model.hidden_dropout) > 0
    repeats = bool(attention.repeated)
    options = StepOptions(config.batch.seed, drops, kernel, task.torch_dropout, repeats_attention=repeats)
    recorder = None if layout.overlap_report is None else layout.overlap_report.recorder
    return TrainStep(parts, task.loss, context.groups, options, context.faults, recorder)


def use_graphs(
    context: RunContext, origin: Origin | None, layout: RunLayout, step: TrainStep, begun: int
) -> StepGraphs | None:  # fmt: skip
    """Let steps be captured where they can be (--cuda-graphs), as in the checkpoint if its layout is the same."""
    config, device, record = context.config, context.groups.device, layout.record
    mode = config.kernels.cuda_graphs
    if mode == "off" or config.batch.skip_train or device.type != "cuda":  # on a CPU nobody expects a graph
        return None
    from megatron_sp.ops.cuda_graphs import CudaGraphs
    from megatron_sp.training.graphs import StepGraphs, is_profiled, why_not_captured

    obstacles = why_not_captured(config, device.type, is_own=context.task.is_own)
    for obstacle in obstacles:
        context.console.line(f"captured steps: not used, {obstacle.reason}")
    if obstacles:
        return None
    kept = None if origin is None else origin.layout_like(_layout_record(context)).get("cuda_graphs")
    step.graphs = graphs = StepGraphs(
        step, lambda: CudaGraphs(device), mode=mode, warmup=config.kernels.cuda_graph_warmup_steps,
        is_eager=lambda number: is_profiled(config.logging, begun, number), tell=context.console.line,
        kept=kept if isinstance(kept, bool) else None, decided=lambda used: record.update(cuda_graphs=used),
    )  # fmt: skip
    return graphs
