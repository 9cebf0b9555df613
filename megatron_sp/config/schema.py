"""Configuration of a run: plain dataclasses, one per group of flags; those of the model and the layout are next door.

Each field is one command-line flag with Megatron's name (``num_layers`` is ``--num-layers``): ``--help``, YAML files,
``docs/reference/flags.md`` and the configuration stored in checkpoints are all derived from here. None of these modules
imports torch or numpy: a mistyped flag is reported before either is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_sp.config.fields import STEPS, STEPS_FROM_0, When, field_kinds, flag, tokenizers
from megatron_sp.config.schema_model import ModelConfig
from megatron_sp.config.schema_parallel import KernelConfig, ParallelConfig
from megatron_sp.utils.errors import ConfigError

Given = dict[tuple[str, str], str]
"""Where fields were set, in the user's own spelling, by (group, name)."""
WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
"""Kinds of tokenizer that read --vocab-file."""
SENTENCEPIECE = ("SentencePieceTokenizer", "Llama2Tokenizer")
"""Kinds of tokenizer that read a SentencePiece model."""
PEAK_TFLOPS = {
    "a100-bf16": 312.0, "a100-fp16": 312.0, "h100-bf16": 989.0, "h100-pcie-bf16": 756.0, "h200-bf16": 989.0,
    "h800-bf16": 989.0, "b200-bf16": 2250.0, "l40s-bf16": 362.0, "a10-bf16": 125.0, "v100-fp16": 125.0,
    "rtx4090-bf16": 165.0, "mi300x-bf16": 1307.0,
}  # fmt: skip
"""Devices that --peak-tflops knows by name: dense (not sparse) peak of matrix products, by the vendors' data sheets."""


@dataclass
class BatchConfig:
    """Batch size, length of the run, and when to stop."""

    # fmt: off
    micro_batch_size: int = flag(1,
        "sequences per forward pass and data-parallel rank", unit="sequences", low=1, high=2**20)
    global_batch_size: int | None = flag(None,
        "sequences per optimizer step (default: micro-batch-size * dp)", unit="sequences", low=1, high=2**31)
    rampup_batch_size: tuple[int, ...] | None = flag(None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES", unit="sequences")
    step_batch_size_schedule: tuple[str, ...] | None = flag(None, '"0:SIZE TOKENS:SIZE ...": the global batch size from'
        ' so many tokens on, 2.4B:320 for instance (K, M, B, T); alone')
    seq_length_curriculum: tuple[str, ...] | None = flag(None, "cut training sequences off, later ever less:"
        " fixed_linear SHORTEST LONGEST STEPS MULTIPLE, fixed_root (a DEGREE more), or fixed_discrete LENGTH:LAST_STEP"
        " ... LENGTH", unit="tokens")
    # length
    train_iters: int | None = flag(None, "optimizer steps of the whole run (this or --train-samples)", **STEPS)
    train_samples: int | None = flag(None,
        "sequences of the whole run (this or --train-iters)", unit="sequences", low=1)
    train_tokens: int | None = flag(None, "tokens of the whole run: turned into samples (or steps, with --train-iters),"
        " rounded up, where all have --seq-length tokens; else it ends with the step that reaches them, unless"
        " --train-iters or --train-samples end it before", unit="tokens", low=1, high=10**18)
    # validation
    eval_interval: int | None = flag(None,
        "validate every so many steps (default and 0: only at the end)", **STEPS_FROM_0, only=When.VALIDATES)
    eval_iters: int = flag(100,
        "global batches per validation and test pass; 0 or -1: none", unit="batches", low=-1, high=10**9)
    eval_global_batch_size: int | None = flag(None, "sequences per batch of validation and test (default: the global"
        " batch size, the last if it grows)", unit="sequences", low=1, high=2**31, only=When.VALIDATES)
    skip_train: bool = flag(False, "only validate and test what --load names")
    # end
    exit_interval: int | None = flag(None, "save and exit 0 when step % N == 0 (0: never)", **STEPS_FROM_0)
    exit_duration_in_mins: float | None = flag(None,
        "save and exit 0 after this long, agreed by all ranks", unit="minutes", low=0, high=1e9)
    kill_switch_path: str | None = flag(None, "save and exit 75, as on a signal, when a file of this name appears;"
        " while it is there nothing starts", aliases=("kill-switch-file",), path=True)
    no_exit_signal_handler: bool = flag(False, "die at once on SIGTERM instead of saving first (exit code 75)")
    seed: int = flag(1234, "of weights, dropout and sample order", low=0)
    # fmt: on


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    # fmt: off
    optimizer: Literal["adam", "sgd"] = flag("adam", "adam means AdamW")
    lr: float | None = flag(None, "peak learning rate (required to train)", low=0, high=math.inf)
    min_lr: float = flag(0.0, "floor of the schedule", low=0, only=When.DECAY)
    decoupled_lr: float | None = flag(None,
        "peak learning rate of the word embeddings and the output layer's weight (default: --lr)", low=0, high=math.inf)
    decoupled_min_lr: float | None = flag(None,
        "with --decoupled-lr: floor of their schedule (default: --min-lr)", low=0)
    # schedule
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear",
        "shape of the decay after warm-up")
    lr_decay_iters: int | None = flag(None,
        "horizon of the decay, warm-up included (default: the run)", **STEPS, only=When.HORIZON)
    lr_decay_samples: int | None = flag(None,
        "the same, with --train-samples", unit="sequences", low=1, only=When.HORIZON)
    lr_decay_tokens: int | None = flag(None, "the same in tokens, turned into samples or steps as --train-tokens is; if"
        " that cannot be, the rate goes by tokens consumed", unit="tokens", low=1, high=10**18)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay horizon, in [0, 1)", low=0)
    lr_warmup_iters: int = flag(0, "linear warm-up", **STEPS_FROM_0)
    lr_warmup_samples: int = flag(0, "the same, with --train-samples", unit="sequences", low=0)
    lr_warmup_tokens: int | None = flag(None,
        "the same in tokens, with --lr-decay-tokens", unit="tokens", low=0, high=10**18)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up", low=0, only=When.WARMUP)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = flag("exponential",
        "shape of WSD's final decay", only=When.WSD)
    lr_wsd_decay_iters: int | None = flag(None, "length of WSD's final decay", **STEPS, only=When.WSD)
    lr_wsd_decay_samples: int | None = flag(None,
        "the same, with --train-samples", unit="sequences", low=1, only=When.WSD)
    # weight decay and clipping
    weight_decay: float = flag(0.01,
        "decoupled decay of matrices; biases and norms are not decayed", low=0, only=When.ONE_DECAY)
    start_weight_decay: float | None = flag(None, "first value of a ramped weight decay", low=0)
    end_weight_decay: float | None = flag(None, "last value of a ramped weight decay", low=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", "ramp of the weight decay")
    clip_grad: float = flag(1.0, "global L2 norm to which gradients are clipped; 0: off", low=0)
    # the optimizers' own
    adam_beta1: float = flag(0.9, "Adam's first-moment decay", low=0, only=When.ADAM)
    adam_beta2: float = flag(0.999, "Adam's second-moment decay", low=0, only=When.ADAM)
    adam_eps: float = flag(1e-8, "Adam's epsilon", low=0, only=When.ADAM)
    sgd_momentum: float = flag(0.9, "SGD's momentum", low=0, only=When.SGD)
    override_opt_param_scheduler: bool = flag(False,
        "on resume take the schedule from the command line", aliases=("override-opt_param-scheduler",), only=When.LOADS)
    use_checkpoint_opt_param_scheduler: bool = flag(False, "on resume take the schedule from the checkpoint",
        aliases=("use-checkpoint-opt_param-scheduler",), only=When.LOADS)
    # fmt: on


@dataclass
class PrecisionConfig:
    """Number formats."""

    # fmt: off
    bf16: bool = flag(False, "bf16 parameters and activations, fp32 master weights and gradients")
    fp16: bool = flag(False, "fp16 parameters and activations, fp32 master weights and gradients, loss scaling")
    fp64: bool = flag(False, "everything in fp64: for proofs, not for speed")
    loss_scale: float | None = flag(None, "fixed loss scale (default: dynamic)", only=When.FP16)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", only=(When.FP16, When.DYNAMIC_SCALE))
    min_loss_scale: float = flag(1.0,
        "an overflow at this scale counts as a bad step", only=(When.FP16, When.DYNAMIC_SCALE))
    loss_scale_window: int = flag(1000,
        "good steps before the scale doubles", unit="steps", low=1, high=10**9, only=(When.FP16, When.DYNAMIC_SCALE))
    hysteresis: int = flag(2,
        "overflows before the scale halves", unit="steps", low=1, high=10**9, only=(When.FP16, When.DYNAMIC_SCALE))
    max_bad_steps: int = flag(10,
        "stop (exit code 5) after more than this many non-finite steps in a row", unit="steps", low=0, high=10**9)
    # fmt: on

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of parameters and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"


@dataclass
class DataConfig:
    """Data sets and tokenizer."""

    # fmt: off
    data_path: tuple[str, ...] = flag((),
        "prefix of a .bin/.idx pair, or WEIGHT PREFIX [WEIGHT PREFIX ...] for a blend", path=True)
    split: str = flag("969,30,1", "shares of --data-path for train, validation, test", only=When.SPLITS)
    train_data_path: tuple[str, ...] = flag((), "as --data-path, for training alone (replaces --split)", path=True)
    valid_data_path: tuple[str, ...] = flag((), "as --data-path, for validation alone", path=True)
    test_data_path: tuple[str, ...] = flag((), "as --data-path, for the test alone", path=True)
    train_weighted_split_paths: tuple[str, ...] = flag((),
        '"NAME: WEIGHT BEGIN:END PREFIX, ...": a blend of parts of data sets for training, instead of the others')
    valid_weighted_split_paths: tuple[str, ...] = flag((),
        "the same for validation; each of several groups is evaluated")
    test_weighted_split_paths: tuple[str, ...] = flag((), "the same for the test")
    multiple_validation_sets: bool = flag(False,
        "evaluate each set of --valid-data-path and --test-data-path by itself, not their blend")
    full_validation: bool = flag(False,
        "a validation goes through the whole of its data, however many batches --eval-iters says")
    data_cache_path: str | None = flag(None,
        "folder of the index cache (default: beside the data)", path=True, only=When.FILES)
    mock_data: bool = flag(False, "synthetic data, no files (needs --vocab-size or a tokenizer)")
    # tokenizer
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer",
        "BertWordPieceLowerCase", "BertWordPieceCase", "ByteTokenizer", "NullTokenizer",
    ] | None = flag(None, "kind of tokenizer (default: with --tokenizer-model HuggingFaceTokenizer if that ends in"
        " .json, else SentencePiece; GPT2BPETokenizer with --merge-file, BertWordPieceLowerCase with --vocab-file"
        " alone, else Null with --vocab-size)")
    tokenizer_model: str | None = flag(None, "SentencePiece model file (Llama2Tokenizer: one with BOS); of"
        " HuggingFaceTokenizer tokenizer.json, or the folder that holds it", path=True,
        only=tokenizers(*SENTENCEPIECE, "HuggingFaceTokenizer"))
    eod_id: int | None = flag(None, "the id that ends a document (default: the tokenizer's own; of NullTokenizer the"
        " last one)", aliases=("null-tokenizer-eod-id",), low=0)
    vocab_file: str | None = flag(None, "vocab.txt of BertWordPieceLowerCase and BertWordPieceCase, one piece per line;"
        " vocab.json of GPT2BPETokenizer", path=True, only=tokenizers("GPT2BPETokenizer", *WORDPIECE))
    merge_file: str | None = flag(None,
        "merges.txt of GPT2BPETokenizer", path=True, only=tokenizers("GPT2BPETokenizer"))
    # reading
    num_workers: int = flag(2,
        "0: read in the training thread; else read ahead in the background", unit="threads", low=0, high=1024)
    dataloader_type: Literal["single", "cyclic"] = flag("single",
        "single: in the data set's order; cyclic: reshuffled every epoch")
    # documents
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    reset_position_ids: bool = flag(False, "positions start again after each end-of-document token")
    reset_attention_mask: bool = flag(False, "tokens attend within their own document only")
    # BERT's samples
    mask_prob: float = flag(0.15, "BERT: share of the tokens that have to be guessed, in (0, 1)")
    short_seq_prob: float = flag(0.1, "BERT: share of samples that are shorter than there is room, in [0, 1]", low=0)
    bert_pack_sequences: bool = flag(False, "BERT: several samples in one row, as many as fit, each attending to itself"
        " alone (needs --bert-no-binary-head)")
    # fmt: on


@dataclass
class CheckpointConfig:
    """Checkpoints."""

    # fmt: off
    save: str | None = flag(None, "run folder: checkpoints, metrics.jsonl, run_status.json (default: runs/NAME-TIME,"
        " without checkpoints)", path=True)
    load: str | None = flag(None, "a run, its checkpoints folder, or one step folder; absent is an error, except in a"
        " first run whose --save is the same folder: that starts afresh", path=True)
    exit_on_missing_checkpoint: bool = flag(False,
        "nothing to load is an error in that first run, too (exit code 3)", only=When.LOADS)
    auto_resume: bool = flag(False,
        "go on from the newest verified checkpoint under --save, or start afresh if there is none")
    save_interval: int | Literal["auto"] | None = flag(None, "save every so many steps, and always at the end (0: only"
        " then); auto: as often as loses least, by what a save is measured to cost", **STEPS_FROM_0, only=When.SAVES)
    mean_time_between_failures_hours: float | None = flag(None, "of the whole run, for --save-interval auto (default:"
        " 50,000 hours of one process, divided by their number)", unit="hours", low=0.001)
    async_save: bool = flag(True, "copy what is saved to host memory, which is kept for it, and write while training"
        " goes on (--no-async-save: training waits)", only=When.SAVES)
    ckpt_step: int | None = flag(None, "load this step instead of the newest", unit="steps", low=0)
    resume_fallback: bool = flag(False, "if the newest checkpoint is damaged, take the newest sound one before it")
    finetune: bool = flag(False, "load weights only and start at step 0; rotary positions and window may be others than"
        " before, for a longer context")
    no_load_optim: bool = flag(False, "do not load the optimizer's state", only=(When.LOADS, When.WITH_STATE))
    no_save_optim: bool = flag(False, "save weights only (such a checkpoint cannot resume exactly)", only=When.SAVES)
    use_checkpoint_args: bool = flag(False, "take the model from the checkpoint, and its tokenizer where no flag names"
        " one; a flag that says another model is an error, what belongs to training (dropout, coefficients) counts"
        " where it is given")
    keep_last: int = flag(2,
        "verified checkpoints to keep, at least 2", unit="checkpoints", low=2, high=10**9, only=When.SAVES)
    keep_every: int | None = flag(None, "also keep every checkpoint whose step is a multiple of this",
        aliases=("save-retain-interval",), unit="steps", low=1, only=When.SAVES)
    accept_data_change: bool = flag(False,
        "resume although data, tokenizer, split, sequence length or seed changed", only=When.LOADS)
    # fmt: on


@dataclass
class LoggingConfig:
    """Logs, metrics and profiling."""

    # fmt: off
    log_interval: int = flag(100, "one line and one metrics.jsonl record every so many steps", **STEPS)
    no_progress_bar: bool = flag(False, "plain lines even on a terminal")
    peak_tflops: str | None = flag(None,
        "peak for MFU: a number in TFLOP/s or a name such as h100-bf16 (default: by the GPU's name; measured on CPU)")
    log_params_norm: bool = flag(False, "add the L2 norm of the parameters to each record")
    log_num_zeros_in_grad: bool = flag(False, "add the number of zeros in the gradients to each record")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events there (needs the extra 'log')", path=True)
    tensorboard_queue_size: int = flag(1000,
        "events kept in memory before a write", low=1, high=10**6, only=When.TENSORBOARD)
    wandb_project: str | None = flag(None, "log to this Weights & Biases project (needs the extra 'log')")
    wandb_exp_name: str | None = flag(None, "name of the W&B run", only=When.WANDB)
    profile: bool = flag(False, "write a torch profiler trace into the run folder")
    profile_step_start: int = flag(10, "first profiled step", **STEPS_FROM_0, only=When.PROFILES)
    profile_step_end: int = flag(12, "step before which profiling stops", **STEPS_FROM_0, only=When.PROFILES)
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that write a trace", only=When.PROFILES)
    report_overlap: int | None = flag(None, "after N steps (10 if no number is given) print how much of each layer's"
        " exchanges ran under computation, and draw the time line; of a pipeline print and draw the schedule, planned"
        " and measured", unit="steps", low=1, high=10_000, alone=10)
    enable_fault_injection: bool = flag(False, "honour the variable MEGATRON_SP_FAULT (tests only)")
    # fmt: on


@dataclass
class Config:
    """Configuration of a whole run; every instance that reaches training has been checked by ``validate()``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    # flags of the command line that have no meaning here, with the reason; the training loop lists them once
    ignored_flags: tuple[str, ...] = field(default=(), compare=False)
    # what flags were taken to mean where their words do not say it, one line each
    understood: tuple[str, ...] = field(default=(), compare=False)
    preset: str | None = field(default=None, compare=False)  # the model's defaults came from it
    # fields of ``model`` that have the preset's values, because nothing else was said of them
    preset_fields: frozenset[str] = field(default=frozenset(), compare=False)
    # fields that the command line, --config or DeepSpeed's JSON set, and where each was set
    given: Given = field(default_factory=dict, compare=False)
    # the checkpoint of --use-checkpoint-args has been read
    model_is_settled: bool = field(default=False, compare=False)

    @property
    def knows_model(self) -> bool:
        """False while the model is still to be taken from a checkpoint: what flags say of it is only a part then."""
        return self.model_is_settled or not self.checkpoint.use_checkpoint_args

    @property
    def adds_null_end(self) -> bool:
        """True if --vocab-size counts the integers of a NullTokenizer that the command line names, and the end of
        documents is one more.
        """
        typed = [self.given.get(key, "") for key in (("data", "tokenizer_type"), ("model", "vocab_size"))]
        is_typed = all(where.startswith("--") for where in typed)
        return self.data.tokenizer_type == "NullTokenizer" and self.data.eod_id is None and is_typed

    def get(self, group: str, name: str) -> Any:
        """Return the value of a field that is named by its group and name."""
        return getattr(getattr(self, group), name)

    def set(self, group: str, name: str, value: Any, where: str = "") -> None:
        """Set such a field; ``where`` is recorded as the place that did it."""
        setattr(getattr(self, group), name, value)
        if where:
            self.given[group, name] = where

    def says(self, group: str, name: str, value: Any = None) -> bool:
        """Return whether a field was set; in a configuration that nobody typed, whether it is not at its default."""
        if self.given:
            return (group, name) in self.given
        value = self.get(group, name) if value is None else value
        return bool(value != FIELDS[group, name].default)

    @property
    def remarks(self) -> list[str]:
        """Lines for the user about the flags: those that are ignored, and what others were taken to mean."""
        return [*(f"note: {line}" for line in self.understood), *(f"ignored: {line}" for line in self.ignored_flags)]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return a plain nested dict (tuples as lists), as stored in state.json and printed by --print-config."""
        groups = {group: dataclasses.asdict(getattr(self, group)) for group in GROUPS}
        for values in groups.values():
            values.update({name: list(value) for name, value in values.items() if isinstance(value, tuple)})
        return groups

    @classmethod
    def from_dict(cls, data: Any) -> tuple[Config, list[str]]:
        """Restore what ``to_dict`` has written, possibly in another version of this package; untrusted.

        Returns the configuration, neither normalised nor validated, and a warning for every unknown entry.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"a stored configuration must be an object of groups, got {type(data).__name__}")
        config, unknown = cls(), []
        for group, entries in data.items():
            if group not in GROUPS or not isinstance(entries, dict):
                unknown.append(f"the group '{group}'")
                continue
            kinds = field_kinds(GROUPS[group])
            for name, value in entries.items():
                if name not in kinds:
                    unknown.append(f"'{group}.{name}'")
                    continue
                try:
                    config.set(group, name, kinds[name].coerce(value))
                except ValueError as error:
                    raise ConfigError(f"'{group}.{name}' of the stored configuration: {error}") from None
        left_out = "of the stored configuration is unknown to this version and left out"
        return config, [f"{entry} {left_out}" for entry in unknown]


_FACTORIES: dict[str, Any] = {item.name: item.default_factory for item in dataclasses.fields(Config)}
GROUPS: dict[str, Any] = {name: make for name, make in _FACTORIES.items() if dataclasses.is_dataclass(make)}
"""The groups of flags: name of the field in ``Config`` and its dataclass."""
FIELDS = {(group, item.name): item for group, cls in GROUPS.items() for item in dataclasses.fields(cls)}
"""The field behind every flag, by (group, name), in the order in which they are defined."""


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the differences, as ``{"group.field": (old value, new value)}`` in the order of the fields."""
    values = {f"{group}.{name}": (old.get(group, name), new.get(group, name)) for group, name in FIELDS}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def default_type(data: DataConfig, vocab_size: int | None) -> Any:
    """Return the --tokenizer-type that other flags imply."""
    if data.tokenizer_model:
        return "HuggingFaceTokenizer" if data.tokenizer_model.endswith(".json") else "SentencePieceTokenizer"
    if data.merge_file:
        return "GPT2BPETokenizer"
    return "BertWordPieceLowerCase" if data.vocab_file else "NullTokenizer" if vocab_size else None


def raise_all(errors: list[str]) -> None:
    """Raise one ConfigError that lists all of ``errors``, if there are any."""
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        listed = "\n".join(f"  {i}. {error}" for i, error in enumerate(errors, 1))
        raise ConfigError(f"{len(errors)} things are wrong:\n{listed}")
