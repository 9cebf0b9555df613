"""Rules of a run's length, learning rate, optimizer and number formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_sp.config.schema import BatchConfig, Config, OptimizerConfig

_MAX_SEED = 2**32 - 1  # numpy's RandomState, which orders the samples, takes no more


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


def learning_rate_violations(config: Config) -> Iterator[str]:
    """Check the schedule of the learning rate."""
    opt, batch = config.optimizer, config.batch
    by_samples = batch.train_samples is not None
    kind, other, total_flag = (
        ("samples", "iters", "--train-samples") if by_samples else ("iters", "samples", "--train-iters")
    )
    mixed = [
        f"--{name}-{other}".replace("_", "-")
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay")
        if getattr(opt, f"{name}_{other}")
    ]
    if mixed and (batch.train_iters is not None or by_samples):
        yield f"{', '.join(mixed)} cannot go with {total_flag}: the schedule counts what the run counts; use the -{kind} forms"
        return
    if opt.lr is None:
        if not batch.skip_train:
            yield "--lr is required to train (the peak learning rate, for example 3e-4)"
        return
    if opt.min_lr > opt.lr:
        yield f"min_lr ({opt.min_lr}) must be at most lr ({opt.lr})"
    if opt.lr_warmup_init > opt.lr:
        yield f"lr_warmup_init ({opt.lr_warmup_init}) must be at most lr ({opt.lr})"
    yield from _decoupled_rate(opt)
    yield from _in_tokens(config)
    if horizon_in_tokens(opt, batch) is not None:
        return
    total = batch.train_samples if by_samples else batch.train_iters
    horizon = getattr(opt, f"lr_decay_{kind}") or total
    if total is not None and horizon is not None:
        yield from _horizon(opt, kind, horizon)


def _decoupled_rate(opt: OptimizerConfig) -> Iterator[str]:
    peak, floor = opt.decoupled_lr, opt.decoupled_min_lr
    if peak is None:
        if floor is not None:
            yield f"--decoupled-min-lr {floor:g} is the floor of --decoupled-lr: give that, too, or leave it out"
        return
    if (opt.min_lr if floor is None else floor) > peak:
        name = "min_lr" if floor is None else "decoupled_min_lr"
        yield f"{name} ({opt.min_lr if floor is None else floor}) must be at most decoupled_lr ({peak}): give --decoupled-min-lr"
    if opt.lr_warmup_init > peak:
        yield f"lr_warmup_init ({opt.lr_warmup_init}) must be at most decoupled_lr ({peak}): both rates begin there"


def _horizon(opt: Any, kind: str, horizon: int) -> Iterator[str]:
    """Check warm-up and WSD's final decay against the ``horizon`` of the decay, all in steps or all in samples
    (``kind``).
    """
    warmup, fraction = getattr(opt, f"lr_warmup_{kind}"), opt.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            yield f"give --lr-warmup-fraction ({fraction}) or --lr-warmup-{kind} ({warmup}), not both"
        if fraction >= 1:
            yield f"lr_warmup_fraction ({fraction}) must be in [0, 1): it is a share of the decay horizon"
        warmup = 0 if fraction >= 1 else math.ceil(fraction * horizon)
    if warmup and warmup >= horizon and fraction is None:
        yield (
            f"lr_warmup_{kind} ({warmup}) must be below the decay horizon ({horizon}, from --lr-decay-{kind} or the"
            f" length of the run): shorten the warm-up or raise --lr-decay-{kind}"
        )
    if opt.lr_decay_style != "WSD":
        return
    decay = getattr(opt, f"lr_wsd_decay_{kind}")
    if decay is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{kind} N, the length of its final decay"
    elif warmup < horizon < warmup + decay:
        yield f"WSD's warm-up and final decay must fit into the horizon: {warmup} + {decay} = {warmup + decay} > {horizon} {kind}"


def horizon_in_tokens(optimizer: OptimizerConfig, batch: BatchConfig) -> int | None:
    """Return the horizon of the learning rate in tokens; None: it is in samples or steps."""
    if optimizer.lr_decay_tokens is not None or batch.train_iters or batch.train_samples:
        return optimizer.lr_decay_tokens
    return batch.train_tokens


def _in_tokens(config: Config) -> Iterator[str]:
    opt, horizon = config.optimizer, horizon_in_tokens(config.optimizer, config.batch)
    if horizon is None:
        if opt.lr_warmup_tokens:
            yield (
                f"--lr-warmup-tokens ({opt.lr_warmup_tokens}) needs --lr-decay-tokens: sequences of several lengths make no samples of it"
            )
        return
    others = [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(opt, name)]
    if others:
        yield f"--{others[0].replace('_', '-')} cannot go with a learning rate that goes by tokens: use --lr-warmup-tokens"
    if opt.lr_decay_style == "WSD":
        yield "--lr-decay-style WSD has its final decay in steps or samples, and here the learning rate goes by tokens: use another style"
    if opt.lr_warmup_fraction is not None and opt.lr_warmup_tokens:
        yield f"give --lr-warmup-fraction ({opt.lr_warmup_fraction}) or --lr-warmup-tokens ({opt.lr_warmup_tokens}), not both"
    elif (opt.lr_warmup_tokens or 0) >= horizon:
        yield f"lr_warmup_tokens ({opt.lr_warmup_tokens}) must be below the decay horizon ({horizon}, from --lr-decay-tokens or the run)"
    if opt.weight_decay_incr_style != "constant" and not (config.batch.train_iters or config.batch.train_samples):
        yield "--weight-decay-incr-style changes the weight decay over --train-samples or --train-iters: give one beside --train-tokens"


def optimizer_violations(config: Config) -> Iterator[str]:
    """Check the optimizer and its weight decay."""
    opt = config.optimizer
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if getattr(opt, name) >= 1:
            yield f"{name} ({getattr(opt, name)}) must be in [0, 1)"
    if opt.adam_eps == 0:
        yield "adam_eps (0) must be above 0: it keeps Adam's division finite"
    start, end = opt.start_weight_decay, opt.end_weight_decay
    if opt.weight_decay_incr_style != "constant" and (start is None or end is None):
        yield f"--weight-decay-incr-style {opt.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
    if opt.weight_decay_incr_style == "constant" and start != end:
        yield (
            f"start_weight_decay ({start}) and end_weight_decay ({end}) differ, but --weight-decay-incr-style is"
            " constant: use linear or cosine, or give --weight-decay alone"
        )
    if opt.override_opt_param_scheduler and opt.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: who decides on resume?"


def precision_violations(config: Config) -> Iterator[str]:
    """Check number formats and loss scales."""
    precision = config.precision
    given = [f"--{name}" for name in ("bf16", "fp16", "fp64") if getattr(precision, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: give one, or none for fp32"
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(precision, name)
        if value is not None and value <= 0:
            yield f"{name} ({value}) must be above 0"
    if precision.initial_loss_scale < precision.min_loss_scale:
        yield f"initial_loss_scale ({precision.initial_loss_scale:g}) must be at least min_loss_scale ({precision.min_loss_scale:g})"
