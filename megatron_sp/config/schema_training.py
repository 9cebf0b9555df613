"""Flags of the training itself: batch and length of the run, optimizer and learning rate, number formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.conditions import (
    ADAM,
    DECAY,
    DYNAMIC_SCALE,
    FP16,
    HORIZON,
    LOADS,
    ONE_DECAY,
    SGD,
    VALIDATES,
    WARMUP,
    WSD,
)
from megatron_sp.utils.flag_field import flag


@dataclass
class BatchConfig:
    """Batch size, length of the run, and when to stop."""

    micro_batch_size: int = flag(
        1, "sequences per forward pass and data-parallel rank", unit="sequences", low=1, high=2**20
    )
    global_batch_size: int | None = flag(
        None, "sequences per optimizer step (default: micro-batch-size * dp)", unit="sequences", low=1, high=2**31
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES", unit="sequences"
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        '"0:SIZE TOKENS:SIZE ...": the global batch size from so many tokens on, 2.4B:320 for instance (K, M, B, T); alone',
    )
    seq_length_curriculum: tuple[str, ...] | None = flag(
        None,
        "cut training sequences off, later ever less: fixed_linear SHORTEST LONGEST STEPS MULTIPLE, fixed_root (a DEGREE more), or"
        " fixed_discrete LENGTH:LAST_STEP ... LENGTH", unit="tokens",
    )  # fmt: skip
    train_iters: int | None = flag(
        None, "optimizer steps of the whole run (this or --train-samples)", unit="steps", low=1, high=10**12
    )
    train_samples: int | None = flag(
        None, "sequences of the whole run (this or --train-iters)", unit="sequences", low=1
    )
    train_tokens: int | None = flag(
        None,
        "tokens of the whole run: turned into samples (or steps, with --train-iters), rounded up, where all have --seq-length tokens;"
        " else it ends with the step that reaches them, unless --train-iters or --train-samples end it before",
        unit="tokens", low=1,
        high=10**18,
    )  # fmt: skip
    eval_interval: int | None = flag(
        None,
        "validate every so many steps (default and 0: only at the end)",
        unit="steps",
        low=0,
        high=10**12,
        only=VALIDATES,
    )
    eval_iters: int = flag(
        100, "global batches per validation and test pass; 0 or -1: none", unit="batches", low=-1, high=10**9
    )
    eval_global_batch_size: int | None = flag(
        None, "sequences per batch of validation and test (default: the global batch size, the last if it grows)",
        unit="sequences",
        low=1, high=2**31, only=VALIDATES,
    )  # fmt: skip
    skip_train: bool = flag(False, "only validate and test what --load names")
    exit_interval: int | None = flag(
        None, "save and exit 0 when step % N == 0 (0: never)", unit="steps", low=0, high=10**12
    )
    exit_duration_in_mins: float | None = flag(
        None, "save and exit 0 after this long, agreed by all ranks", unit="minutes", low=0, high=1e9
    )
    kill_switch_path: str | None = flag(
        None, "save and exit 75, as on a signal, when a file of this name appears; while it is there nothing starts",
        path=True,
        aliases=("kill-switch-file",),
    )  # fmt: skip
    no_exit_signal_handler: bool = flag(False, "die at once on SIGTERM instead of saving first (exit code 75)")
    seed: int = flag(1234, "of weights, dropout and sample order", low=0)


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "adam means AdamW")
    lr: float | None = flag(None, "peak learning rate (required to train)", low=0, high=math.inf)
    min_lr: float = flag(0.0, "floor of the schedule", low=0, only=DECAY)
    decoupled_lr: float | None = flag(
        None,
        "peak learning rate of the word embeddings and the output layer's weight (default: --lr)",
        low=0,
        high=math.inf,
    )
    decoupled_min_lr: float | None = flag(
        None, "with --decoupled-lr: floor of their schedule (default: --min-lr)", low=0
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay after warm-up"
    )
    lr_decay_iters: int | None = flag(
        None,
        "horizon of the decay, warm-up included (default: the run)",
        unit="steps",
        low=1,
        high=10**12,
        only=HORIZON,
    )
    lr_decay_samples: int | None = flag(None, "the same, with --train-samples", unit="sequences", low=1, only=HORIZON)
    lr_decay_tokens: int | None = flag(
        None,
        "the same in tokens, turned into samples or steps as --train-tokens is; if that cannot be, the rate goes by tokens consumed",
        unit="tokens", low=1, high=10**18,
    )  # fmt: skip
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay horizon, in [0, 1)", low=0)
    lr_warmup_iters: int = flag(0, "linear warm-up", unit="steps", low=0, high=10**12)
    lr_warmup_samples: int = flag(0, "the same, with --train-samples", unit="sequences", low=0)
    lr_warmup_tokens: int | None = flag(
        None, "the same in tokens, with --lr-decay-tokens", unit="tokens", low=0, high=10**18
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up", low=0, only=WARMUP)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = flag(
        "exponential", "shape of WSD's final decay", only=WSD
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "length of WSD's final decay", unit="steps", low=1, high=10**12, only=WSD
    )
    lr_wsd_decay_samples: int | None = flag(None, "the same, with --train-samples", unit="sequences", low=1, only=WSD)
    weight_decay: float = flag(
        0.01, "decoupled decay of matrices; biases and norms are not decayed", low=0, only=ONE_DECAY
    )
    start_weight_decay: float | None = flag(None, "first value of a ramped weight decay", low=0)
    end_weight_decay: float | None = flag(None, "last value of a ramped weight decay", low=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", "ramp of the weight decay")
    clip_grad: float = flag(1.0, "global L2 norm to which gradients are clipped; 0: off", low=0)
    adam_beta1: float = flag(0.9, "Adam's first-moment decay", low=0, only=ADAM)
    adam_beta2: float = flag(0.999, "Adam's second-moment decay", low=0, only=ADAM)
    adam_eps: float = flag(1e-8, "Adam's epsilon", low=0, only=ADAM)
    sgd_momentum: float = flag(0.9, "SGD's momentum", low=0, only=SGD)
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume take the schedule from the command line",
        aliases=("override-opt_param-scheduler",),
        only=LOADS,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume take the schedule from the checkpoint",
        aliases=("use-checkpoint-opt_param-scheduler",),
        only=LOADS,
    )


@dataclass
class PrecisionConfig:
    """Number formats."""

    bf16: bool = flag(False, "bf16 parameters and activations, fp32 master weights and gradients")
    fp16: bool = flag(False, "fp16 parameters and activations, fp32 master weights and gradients, loss scaling")
    fp64: bool = flag(False, "everything in fp64: for proofs, not for speed")
    loss_scale: float | None = flag(None, "fixed loss scale (default: dynamic)", only=FP16)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", only=(FP16, DYNAMIC_SCALE))
    min_loss_scale: float = flag(1.0, "an overflow at this scale counts as a bad step", only=(FP16, DYNAMIC_SCALE))
    loss_scale_window: int = flag(
        1000, "good steps before the scale doubles", unit="steps", low=1, high=10**9, only=(FP16, DYNAMIC_SCALE)
    )
    hysteresis: int = flag(
        2, "overflows before the scale halves", unit="steps", low=1, high=10**9, only=(FP16, DYNAMIC_SCALE)
    )
    max_bad_steps: int = flag(
        10, "stop (exit code 5) after more than this many non-finite steps in a row", unit="steps", low=0, high=10**9
    )

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of parameters and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"
