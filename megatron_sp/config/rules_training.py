"""Rules of a run: batch sizes, length, learning rate, optimizer and number formats.

A batch is constant, grows by --rampup-batch-size, or in the steps of --step-batch-size-schedule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

from megatron_sp.config.fields import flag_name
from megatron_sp.config.schema import BatchConfig, Config, OptimizerConfig
from megatron_sp.utils.numbers import division

# a rule is a condition and a sentence
# fmt: off
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?)([KMBT]?)"
_ENTRY = re.compile(f"{_NUMBER}:{_NUMBER}", re.IGNORECASE)
_MOST_TOKENS, _LARGEST = 10**18, 2**31
_MAX_SEED = 2**32 - 1  # numpy's RandomState, which orders the samples, takes no more

# -------------------------------------------------------------------------------------------------------- batch sizes


def read_steps(entries: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return the (tokens, batch size) pairs of --step-batch-size-schedule, sorted by the tokens where a size begins.

    Raises:
        ValueError: an entry is not TOKENS:SIZE, none begins at 0, or two begin at the same number of tokens.
    """
    steps = []
    for entry in " ".join(entries).replace(",", " ").split():
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"expected TOKENS:SIZE such as 2.4B:320, got '{entry[:40]}'")
        tokens = int(float(match[1]) * _SUFFIXES[match[2].upper()])  # as Megatron rounds
        size = float(match[3]) * _SUFFIXES[match[4].upper()]
        if tokens > _MOST_TOKENS or not 1 <= round(size) <= _LARGEST or abs(size - round(size)) > 1e-6:
            rule = f"at most {_MOST_TOKENS:.0e} tokens, and a whole number from 1 to {_LARGEST} as size"
            raise ValueError(f"'{entry[:40]}': expected {rule}")
        steps.append((tokens, round(size)))
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise ValueError("the first size is that of 0 tokens: begin with 0:SIZE")
    for (tokens, _), (then, _) in pairwise(steps):
        if tokens == then:
            raise ValueError(f"two sizes begin at {tokens:,} tokens: give one")
    return tuple(steps)


def steps_in_samples(batch: BatchConfig, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return the (samples, batch size) pairs of a valid --step-batch-size-schedule; none without the flag.

    A size holds from the first step that begins at or after its number of tokens, as full sequences count them, rounded
    down to whole samples, as in Megatron.
    """
    steps = read_steps(batch.step_batch_size_schedule) if batch.step_batch_size_schedule is not None else ()
    return tuple((tokens // seq_length, size) for tokens, size in steps)


def all_sizes(batch: BatchConfig) -> tuple[int, ...]:
    """Return the numbers of which every batch size of the run consists, of those that are given and can be read."""
    sizes = [batch.global_batch_size, batch.eval_global_batch_size, *(batch.rampup_batch_size or ())[:2]]
    with suppress(ValueError):
        sizes += [size for _, size in read_steps(batch.step_batch_size_schedule or ())]
    return tuple(filter(None, sizes))


def resolve_batch_size(batch: BatchConfig) -> None:
    """Make the last size of --step-batch-size-schedule the global batch size, unless that is given."""
    if batch.step_batch_size_schedule is None or batch.global_batch_size is not None:
        return
    with suppress(ValueError):  # ``batch_violations`` says what is wrong
        batch.global_batch_size = read_steps(batch.step_batch_size_schedule)[-1][1]


def batch_violations(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each violated rule of the batch sizes."""
    batch = config.batch
    dp_size = max(1, config.parallel.dp_size(max(1, world_size)))
    unit = batch.micro_batch_size * dp_size
    names = ["eval_global_batch_size", *([] if batch.step_batch_size_schedule is not None else ["global_batch_size"])]
    for name in names:
        size = getattr(batch, name)
        if size is not None and size % unit:
            near = f"{size // unit * unit} or {(size // unit + 1) * unit}" if size > unit else str(unit)
            yield f"{name} ({size}) must be {_multiple(batch, dp_size)}: {division(size, unit)}; use {near}"
    if batch.step_batch_size_schedule is not None:
        yield from _steps(config, dp_size)
    elif batch.rampup_batch_size is not None:
        yield from _ramp(batch, dp_size)


def _multiple(batch: BatchConfig, dp_size: int) -> str:
    unit = f"{batch.micro_batch_size} * {dp_size} = {batch.micro_batch_size * dp_size}"
    return f"a multiple of micro_batch_size * data-parallel size ({unit})"


def _steps(config: Config, dp_size: int) -> Iterator[str]:
    batch = config.batch
    if batch.rampup_batch_size is not None:
        yield "--rampup-batch-size and --step-batch-size-schedule are two ways for a batch to grow: give one"
    try:
        steps = read_steps(batch.step_batch_size_schedule or ())
    except ValueError as error:
        yield f"step_batch_size_schedule: {error}"
        return
    last = steps[-1][1]
    if batch.global_batch_size != last:
        yield (f"global_batch_size ({batch.global_batch_size}) is not the last size of --step-batch-size-schedule"
            f" ({last}), which says all sizes: leave --global-batch-size out")
    if length := config.model.seq_length:
        for (tokens, _), (then, _) in pairwise(steps):
            if tokens // length == then // length:
                yield (f"step_batch_size_schedule: {tokens:,} and {then:,} tokens are the same sample of {length}"
                    f" tokens ({tokens // length}): its thresholds are in tokens; move one, or leave it out")
    # on resume, others may be over
    due = steps[-1:] if config.checkpoint.load or config.checkpoint.auto_resume else steps
    yield from filter(None, (_uneven(batch, size, dp_size) for _, size in due))


def step_violation(batch: BatchConfig, seq_length: int, dp_size: int, consumed_samples: int) -> str | None:
    """Return what is wrong with the sizes of --step-batch-size-schedule from ``consumed_samples`` on; None: nothing."""
    steps = steps_in_samples(batch, seq_length)
    ahead = [size for i, (_, size) in enumerate(steps) if i + 1 == len(steps) or steps[i + 1][0] > consumed_samples]
    return next(filter(None, (_uneven(batch, size, dp_size) for size in ahead)), None)


def _uneven(batch: BatchConfig, size: int, dp_size: int) -> str | None:
    unit = batch.micro_batch_size * dp_size
    if size % unit == 0:
        return None
    rule = f"{size} must be {_multiple(batch, dp_size)}, as every batch size is"
    return f"step_batch_size_schedule: {rule}: {division(size, unit)}"


def _ramp(batch: BatchConfig, dp_size: int) -> Iterator[str]:
    ramp, size, unit = batch.rampup_batch_size or (), batch.global_batch_size, batch.micro_batch_size * dp_size
    if len(ramp) != 3:
        words = f"{len(ramp)}: {' '.join(map(str, ramp))}"
        yield f"rampup_batch_size takes three integers, START INCREMENT SAMPLES, got {words}"
        return
    start, step, samples = ramp
    if start < 1 or step < 1 or samples < 1:
        yield f"rampup_batch_size ({start} {step} {samples}): START, INCREMENT and SAMPLES must be at least 1"
    elif size is None:
        yield "rampup_batch_size needs --global-batch-size, the size to grow to"
    elif start >= size:
        yield f"rampup_batch_size starts at {start} and must start below global_batch_size ({size})"
    elif (size - start) % step:
        yield (f"rampup_batch_size must reach global_batch_size in whole increments: ({size} - {start}) / {step} ="
            f" {(size - start) / step:g}; change START or INCREMENT")
    elif start % unit or step % unit:
        name, value = ("START", start) if start % unit else ("INCREMENT", step)
        rule = f"must be {_multiple(batch, dp_size)}, as every batch size is"
        yield f"rampup_batch_size: {name} ({value}) {rule}: {division(value, unit)}"


# ------------------------------------------------------------------------------------------- length and learning rate


def length_violations(config: Config) -> Iterator[str]:
    """Check the length of the run."""
    batch = config.batch
    if batch.skip_train:
        if not config.checkpoint.load:
            yield "--skip-train validates a checkpoint and needs --load DIR"
        if batch.eval_iters == 0:
            yield "--skip-train with --eval-iters 0 leaves nothing to do: raise --eval-iters"
    elif batch.train_iters is None and batch.train_samples is None and batch.train_tokens is None:
        yield "the length of the run is missing: give --train-iters or --train-samples"
    if batch.train_iters is not None and batch.train_samples is not None:
        yield f"give --train-iters ({batch.train_iters}) or --train-samples ({batch.train_samples}), not both"
    if batch.seed > _MAX_SEED:
        yield f"seed ({batch.seed}) must be at most {_MAX_SEED} (32 bits)"
    if batch.exit_duration_in_mins == 0:
        yield "exit_duration_in_mins (0) must be above 0"


def _learning_rate(config: Config) -> Iterator[str]:
    opt, batch = config.optimizer, config.batch
    by_samples = batch.train_samples is not None
    kind, other, total_flag = "iters", "samples", "--train-iters"
    if by_samples:
        kind, other, total_flag = "samples", "iters", "--train-samples"
    names = [f"{name}_{other}" for name in ("lr_decay", "lr_warmup", "lr_wsd_decay")]
    mixed = ", ".join(flag_name(name) for name in names if getattr(opt, name))
    if mixed and (batch.train_iters is not None or by_samples):
        yield f"{mixed} cannot go with {total_flag}: the schedule counts what the run counts; use the -{kind} forms"
        return
    if opt.lr is None:
        if not batch.skip_train:
            yield "--lr is required to train (the peak learning rate, for example 3e-4)"
        return
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(opt, name) > opt.lr:
            yield f"{name} ({getattr(opt, name)}) must be at most lr ({opt.lr})"
    peak, floor = opt.decoupled_lr, opt.decoupled_min_lr
    if peak is None and floor is not None:
        yield f"--decoupled-min-lr {floor:g} is the floor of --decoupled-lr: give that, too, or leave it out"
    if peak is not None:
        name, floor = ("min_lr", opt.min_lr) if floor is None else ("decoupled_min_lr", floor)
        if floor > peak:
            yield f"{name} ({floor}) must be at most decoupled_lr ({peak}): give --decoupled-min-lr"
        if opt.lr_warmup_init > peak:
            yield f"lr_warmup_init ({opt.lr_warmup_init}) must be at most decoupled_lr ({peak}): both rates begin there"
    yield from _in_tokens(config)
    if horizon_in_tokens(opt, batch) is not None:
        return
    total = batch.train_samples if by_samples else batch.train_iters
    horizon = getattr(opt, f"lr_decay_{kind}") or total
    if total is not None and horizon is not None:
        yield from _horizon(opt, kind, horizon)


def _horizon(opt: OptimizerConfig, kind: str, horizon: int) -> Iterator[str]:
    # warm-up and WSD's final decay against the horizon of the decay, all in steps or all in samples (``kind``)
    warmup, fraction = getattr(opt, f"lr_warmup_{kind}"), opt.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            yield f"give --lr-warmup-fraction ({fraction}) or --lr-warmup-{kind} ({warmup}), not both"
        if fraction >= 1:
            yield f"lr_warmup_fraction ({fraction}) must be in [0, 1): it is a share of the decay horizon"
        warmup = 0 if fraction >= 1 else math.ceil(fraction * horizon)
    if warmup and warmup >= horizon and fraction is None:
        yield (f"lr_warmup_{kind} ({warmup}) must be below the decay horizon ({horizon}, from --lr-decay-{kind} or the"
            f" length of the run): shorten the warm-up or raise --lr-decay-{kind}")
    if opt.lr_decay_style != "WSD":
        return
    decay = getattr(opt, f"lr_wsd_decay_{kind}")
    if decay is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{kind} N, the length of its final decay"
    elif warmup < horizon < warmup + decay:
        yield ("WSD's warm-up and final decay must fit into the horizon:"
            f" {warmup} + {decay} = {warmup + decay} > {horizon} {kind}")


def horizon_in_tokens(optimizer: OptimizerConfig, batch: BatchConfig) -> int | None:
    """Return the horizon of the learning rate in tokens; None: it is in samples or steps."""
    if optimizer.lr_decay_tokens is not None or batch.train_iters or batch.train_samples:
        return optimizer.lr_decay_tokens
    return batch.train_tokens


def _in_tokens(config: Config) -> Iterator[str]:
    opt, horizon = config.optimizer, horizon_in_tokens(config.optimizer, config.batch)
    fraction, warmup = opt.lr_warmup_fraction, opt.lr_warmup_tokens
    if horizon is None:
        if warmup:
            why = "sequences of several lengths make no samples of it"
            yield f"--lr-warmup-tokens ({warmup}) needs --lr-decay-tokens: {why}"
        return
    others = [flag_name(name) for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(opt, name)]
    if others:
        yield f"{others[0]} cannot go with a learning rate that goes by tokens: use --lr-warmup-tokens"
    if opt.lr_decay_style == "WSD":
        yield ("--lr-decay-style WSD has its final decay in steps or samples, and here the learning rate goes by"
            " tokens: use another style")
    if fraction is not None and warmup:
        yield f"give --lr-warmup-fraction ({fraction}) or --lr-warmup-tokens ({warmup}), not both"
    elif (warmup or 0) >= horizon:
        rule = f"must be below the decay horizon ({horizon}, from --lr-decay-tokens or the run)"
        yield f"lr_warmup_tokens ({warmup}) {rule}"
    if opt.weight_decay_incr_style != "constant" and not (config.batch.train_iters or config.batch.train_samples):
        yield ("--weight-decay-incr-style changes the weight decay over --train-samples or --train-iters: give one"
            " beside --train-tokens")


# --------------------------------------------------------------------------------------- optimizer and number formats


def value_violations(config: Config) -> Iterator[str]:
    """Check the learning rate, the optimizer and number formats, which depend on nothing but a few values."""
    opt, precision = config.optimizer, config.precision
    yield from _learning_rate(config)
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if getattr(opt, name) >= 1:
            yield f"{name} ({getattr(opt, name)}) must be in [0, 1)"
    if opt.adam_eps == 0:
        yield "adam_eps (0) must be above 0: it keeps Adam's division finite"
    start, end, style = opt.start_weight_decay, opt.end_weight_decay, opt.weight_decay_incr_style
    if style != "constant" and (start is None or end is None):
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    if style == "constant" and start != end:
        yield (f"start_weight_decay ({start}) and end_weight_decay ({end}) differ, but --weight-decay-incr-style is"
            " constant: use linear or cosine, or give --weight-decay alone")
    if opt.override_opt_param_scheduler and opt.use_checkpoint_opt_param_scheduler:
        yield ("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: who decides"
            " on resume?")
    given = [f"--{name}" for name in ("bf16", "fp16", "fp64") if getattr(precision, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: give one, or none for fp32"
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(precision, name)
        if value is not None and value <= 0:
            yield f"{name} ({value}) must be above 0"
    first, lowest = precision.initial_loss_scale, precision.min_loss_scale
    if first < lowest:
        yield f"initial_loss_scale ({first:g}) must be at least min_loss_scale ({lowest:g})"
