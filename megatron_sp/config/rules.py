"""Rules between the fields of a configuration, and values that one field implies for another.

Nothing here needs torch, a file or a device, so every rank rejects an invalid command line at once, before the first
collective. A rule is a line ``yield "..."`` under its condition; the text has the values, the rule and a remedy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_sp.config.concessions import concede, is_read, settle_source
from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.config.peaks import PEAK_TFLOPS
from megatron_sp.config.rules_batch import (
    all_sizes,
    batch_violations,
    curriculum_violations,
    horizon_in_tokens,
    settle_batch_size,
    token_violations,
)
from megatron_sp.config.rules_context import context_violations, delay_violations, settle_comm_type
from megatron_sp.config.rules_data import data_violations
from megatron_sp.config.rules_experts import expert_violations, lifeless_router, settle_experts, shared_expert_violations
from megatron_sp.config.rules_graphs import graph_violations
from megatron_sp.config.rules_model import settle_gelu, settle_groups, variant_violations
from megatron_sp.config.rules_pipeline import pipeline_violations, settle_stages
from megatron_sp.config.schema import GROUPS, Config, ModelConfig, OptimizerConfig, raise_all
from megatron_sp.config.schema_data import default_type
from megatron_sp.utils.flag_field import MAX_COUNT, MAX_NUMBER
from megatron_sp.utils.numbers import division

_MAX_SEED = 2**32 - 1  # numpy's RandomState, which orders the samples, takes no more
_FLASH_HEAD_DIM = 256
_MAX_NAME, _MAX_PATH = 200, 3000  # bytes; systems allow 255 and 4,095, and files inside the folder need some of them


def normalize(config: Config) -> Config:
    """Expand shorthand flags and apply what flags imply; contradictions are left for ``violations``.

    Modifies ``config`` in place and returns it; idempotent.
    """
    model, kernels, data = config.model, config.kernels, config.data
    if config.parallel.use_distributed_optimizer and config.parallel.zero_stage == 0:
        config.parallel.zero_stage = 1
    if config.parallel.stage3_use_all_reduce_for_fetch_params:
        config.parallel.zero3_fetch = "all_reduce"
    if kernels.recompute_activations and kernels.recompute_granularity is None:
        kernels.recompute_granularity = "selective"
    if kernels.recompute_granularity == "full":
        kernels.recompute_method = kernels.recompute_method or "uniform"
        if kernels.recompute_method == "uniform" and kernels.recompute_num_layers is None:
            kernels.recompute_num_layers = 1
    if data.tokenizer_type is None:
        data.tokenizer_type = default_type(data, model.vocab_size)
    settle_batch_size(config.batch)
    settle_stages(config)
    lines = (*settle_source(config), *settle_comm_type(config.parallel), *settle_experts(config), *settle_groups(config))
    config.ignored_flags += lines
    config.ignored_flags += tuple(concede(config, lambda: _wrong_values(config)))
    if config.knows_model and is_read(config, "model", "gelu_approximate"):
        settle_gelu(model)
    return config


def _wrong_values(config: Config) -> list[str]:
    """Return what the rules about single values, and about values of one kind, reject."""
    return _range_texts(config) or [
        *variant_violations(config.model), *_learning_rate(config), *_optimizer(config), *_precision(config), *data_violations(config),
    ]  # fmt: skip


def validate(config: Config, world_size: int = 1) -> None:
    """Check every rule that needs no file and no device; call ``normalize()`` first.

    Raises:
        ConfigError: lists all violations, each with the values, the rule and a remedy.
    """
    raise_all(violations(config, world_size))


def violations(config: Config, world_size: int) -> list[str]:
    """Return a message for each violated rule; if single values are out of range only those, as the other rules depend on them.

    What is about a model that is still to be taken from a checkpoint is checked when it has been (``training/checkpoint_model.py``).
    """
    return _range_texts(config) or [
        *(_about_model(config, world_size) if config.knows_model else ()), *_layout(config, world_size),
        *batch_violations(config, world_size), *curriculum_violations(config), *_length(config), *_learning_rate(config),
        *_optimizer(config), *_precision(config), *data_violations(config), *_checkpoint(config),
        *_logging(config, world_size), *graph_violations(config),
    ]  # fmt: skip


def model_violations(config: Config) -> list[str]:
    """Return the violations of the model's rules only, for a shape that was not given by flags."""
    return _range_texts(config) or [*_model(config), *expert_violations(config, 1)]


def _range_texts(config: Config) -> list[str]:
    return [text for texts in out_of_range(config).values() for text in texts]


def out_of_range(config: Config) -> dict[tuple[str, str], list[str]]:
    """Return what is wrong with single fields, by (group, name): too small or large values, unusable texts and paths."""
    found: dict[tuple[str, str], list[str]] = {}
    for group, cls in GROUPS.items():
        for name, kind in field_kinds(cls).items():
            value, flag = getattr(getattr(config, group), name), f"--{name.replace('_', '-')}"
            about = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if kind.base in ("int", "float"):
                numbers = (each for each in values if not isinstance(each, str))  # --save-interval auto
                texts = [text for each in numbers if (text := _out_of_bounds(flag, each, about, kind.base))]
            elif kind.base == "str":
                texts = [text for each in values if (text := _unusable_text(flag, each, about["path"]))]
            else:
                continue
            if texts:
                found[group, name] = texts
    return found


def _out_of_bounds(flag: str, value: float, about: Mapping[str, Any], base: str) -> str | None:
    low, high = about["low"], about["high"]
    if low is not None and value < low:
        return f"{flag} ({_show(value)}) must be at least {_show(low)}"
    if high is None:
        high = MAX_COUNT if base == "int" else MAX_NUMBER
    return f"{flag} ({_show(value)}) must be at most {_show(high)}" if abs(value) > high else None


def _unusable_text(flag: str, text: str, is_path: bool) -> str | None:
    if "\0" in text:
        return f"{flag}: a text with a zero byte in it cannot be a name"
    if not is_path:
        return None
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > _MAX_NAME or len(os.fsencode(text)) > _MAX_PATH:
        what = f"a name of {longest} bytes, and the longest have {_MAX_NAME}"
        if longest <= _MAX_NAME:
            what = f"{len(os.fsencode(text))} bytes, and paths have at most {_MAX_PATH}"
        return f"{flag} ({text[:40]}...) has {what}"
    return None


def _model(config: Config) -> Iterator[str]:
    model = config.model
    shape = {"num_layers": model.num_layers, "hidden_size": model.hidden_size, "num_attention_heads": model.num_attention_heads}
    missing = [name for name, value in {**shape, "seq_length": model.seq_length}.items() if value is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        yield f"{flags} {'is' if len(missing) == 1 else 'are'} required: give the shape of the model, or --load DIR --use-checkpoint-args"
    if model.hidden_size and model.num_attention_heads and not model.kv_channels and model.hidden_size % model.num_attention_heads:
        yield (
            f"hidden_size ({model.hidden_size}) must be a multiple of num_attention_heads ({model.num_attention_heads}):"
            f" {division(model.hidden_size, model.num_attention_heads)}; change one of them, or give --kv-channels (width of a head)"
        )
    if model.hidden_size and model.ffn_hidden_size is None and model.ffn_size == 0:
        yield (
            f"the MLP would have no width: with --{'swiglu' if model.swiglu else 'geglu'} it is 8/3 * hidden_size ({model.hidden_size}),"
            " rounded down to a multiple of 64, and that is 0; give --ffn-hidden-size"
        )
    yield from _heads(config)
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(model, name) >= 1:
            yield f"{name} ({getattr(model, name)}) must be in [0, 1): it is the share that is dropped"
    if model.norm_epsilon <= 0:
        yield f"norm_epsilon ({model.norm_epsilon}) must be above 0: it keeps the division by the standard deviation finite"
    if model.seq_length and model.max_position_embeddings and model.max_position_embeddings < model.seq_length:
        yield (
            f"max_position_embeddings ({model.max_position_embeddings}) must be at least seq_length ({model.seq_length}):"
            f" raise --max-position-embeddings to {model.seq_length} or leave it out"
        )
    yield from variant_violations(model)


def _heads(config: Config) -> Iterator[str]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads and groups and heads % groups:
        tp = config.parallel.tensor_model_parallel_size
        legal = [str(n) for n in range(1, min(heads, 256) + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
        rule = f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups})"
        yield f"{rule}: {division(heads, groups)}; use {', '.join(legal)}"
    if model.position_embedding_type != "rope":
        return
    if not 0 < model.rotary_percent <= 1:
        yield f"rotary_percent ({model.rotary_percent}) must be in (0, 1]: it is the share of each head that is rotated"
    elif _head_dim_known(model) and (model.rotary_dim < 2 or model.rotary_dim % 2):
        yield (
            f"the rotated width must be even and at least 2, for channels turn in pairs: int(head_dim {model.head_dim} * rotary_percent"
            f" {model.rotary_percent}) = {model.rotary_dim}; change --rotary-percent or --kv-channels"
        )


def _head_dim_known(model: ModelConfig) -> bool:
    return bool(
        model.kv_channels or (model.hidden_size and model.num_attention_heads and not model.hidden_size % model.num_attention_heads)
    )


def _about_model(config: Config, world_size: int) -> Iterator[str]:
    yield from _model(config)
    yield from pipeline_violations(config)
    yield from _split_heads(config, world_size)
    yield from _exchanges(config, world_size)
    yield from context_violations(config)
    yield from delay_violations(config)
    yield from expert_violations(config, world_size)
    yield from shared_expert_violations(config)
    yield from lifeless_router(config)
    yield from _kernels(config)


def _layout(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    yield from _whole_replicas(config, world_size)
    yield from _zero(config)
    if parallel.distributed_timeout_minutes <= 0:
        yield f"distributed_timeout_minutes ({parallel.distributed_timeout_minutes}) must be above 0"
    if world_size < 1:
        yield f"the number of processes ({world_size}) must be at least 1"


def _whole_replicas(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    more = {"context_parallel_size": "cp", "pipeline_model_parallel_size": "pp"}
    also = {name: key for name, key in more.items() if getattr(parallel, name) > 1}
    names = ["tensor_model_parallel_size", "sequence_parallel_size", *also]
    product = parallel.replica_size
    if world_size > 0 and world_size % product:
        ways = _ways_out(config, world_size, {"processes"}, "processes", "tp", "sp", *also.values())
        factors = " * ".join(str(getattr(parallel, name)) for name in names)
        yield (
            f"the number of processes ({world_size}) must be a multiple of {' * '.join(names)} ({factors} = {product}):"
            f" {division(world_size, product)}{ways}"
        )


def inference_violations(config: Config, world_size: int) -> list[str]:
    """Return the violations of using an existing model in a layout; the rules of training do not apply."""
    of_heads = _split_heads(config, world_size, ("tp", "sp"))
    return [*of_heads, *shared_expert_violations(config), *_whole_replicas(config, world_size)]


def _zero(config: Config) -> Iterator[str]:
    parallel = config.parallel
    stage = parallel.zero_stage
    if stage > 3:
        yield f"zero_stage ({stage}) must be 0, 1, 2 or 3"
    only_3 = {
        "--zero3-keep-units": parallel.zero3_keep_units > 0, "--zero3-gather-once": parallel.zero3_gather_once,
        "--zero3-fetch all_reduce": parallel.zero3_fetch != "all_gather",
    }  # fmt: skip
    for name, given in only_3.items():
        if given and stage != 3:
            yield f"{name} is about gathering blocks and needs --zero-stage 3 (now {stage}); give that, or leave it out"
    if parallel.zero3_gather_once and parallel.zero3_keep_units > 0:
        yield "--zero3-gather-once keeps every block: leave --zero3-keep-units out"


def _split_heads(config: Config, world_size: int, sizes: tuple[str, ...] = ("tp", "sp", "heads", "groups", "ffn")) -> Iterator[str]:
    """Check that heads and widths can be split over tp and sp; ``sizes``: those that the remedies may change."""
    model, tp, sp = config.model, config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel_size
    heads = model.num_attention_heads
    if not heads or (tp == 1 and sp == 1):
        return

    def ways(mend: set[str], *names: str) -> str:
        return _ways_out(config, world_size, mend, *(name for name in names if name in sizes))

    if heads % tp:
        yield (
            f"num_attention_heads ({heads}) must be a multiple of tensor_model_parallel_size ({tp}): {division(heads, tp)}"
            f"{ways({'heads over tp'}, 'tp', 'heads')}"
        )
    if heads < tp * sp:
        yield (
            f"each tensor-parallel rank's query heads ({heads} / {tp} = {heads / tp:g}) are dealt out to the sequence-parallel ranks"
            f" (sequence_parallel_size {sp}), and each needs one{ways({'heads over sp'}, 'sp', 'tp', 'heads')}"
        )
    groups = model.num_query_groups
    if groups and groups % tp and tp % groups:
        yield (
            f"num_query_groups ({groups}) must be a multiple of tensor_model_parallel_size ({tp}), or divide it (then key/value heads are"
            f" held by several ranks): {division(groups, tp)}{ways({'groups over tp'}, 'tp', 'groups')}"
        )
    if _ffn_known(model) and model.ffn_size % tp:
        yield (
            f"the width of the MLP ({model.ffn_size}) must be a multiple of tensor_model_parallel_size ({tp}):"
            f" {division(model.ffn_size, tp)}{ways({'ffn'}, 'tp', 'ffn')}"
        )


def _ffn_known(model: ModelConfig) -> bool:
    return bool(model.ffn_hidden_size or model.hidden_size)


@dataclass(frozen=True)
class _Sizes:
    """Sizes that must fit together in a layout; used to try out a value before it is recommended."""

    processes: int
    tp: int
    sp: int
    cp: int
    pp: int
    heads: int
    groups: int | None
    ffn: int | None
    hidden: int | None  # None: a head's width does not depend on it
    rotary: float | None
    batches: tuple[int, ...]  # every global batch size of the run, or the numbers that determine them
    micro_batch: int

    @classmethod
    def of(cls, config: Config, world_size: int) -> _Sizes:
        model, parallel, batch = config.model, config.parallel, config.batch
        return cls(
            world_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel_size, parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size, model.num_attention_heads or 0, model.num_query_groups,
            model.ffn_size if _ffn_known(model) else None,
            None if model.kv_channels else model.hidden_size, model.rotary_percent if model.position_embedding_type == "rope" else None,
            all_sizes(batch), batch.micro_batch_size,
        )  # fmt: skip

    @property
    def replica(self) -> int:
        """Number of ranks that work on the same sequences."""
        return self.tp * self.sp * self.cp * self.pp

    def broken(self) -> set[str]:
        """Return the names of the rules that these sizes violate."""
        groups, width = self.groups or self.heads, (self.hidden or 0) // self.heads if self.heads else 0
        unit = self.micro_batch * max(1, self.processes // self.replica)
        rules = {
            "processes": self.processes % self.replica != 0,
            "batch": any(size % unit for size in self.batches),
            "ffn": bool(self.ffn and self.ffn % self.tp),
        }
        if self.heads:
            rules |= {
                "heads over tp": self.heads % self.tp != 0,
                "heads over sp": self.heads < self.tp * self.sp,
                "groups over tp": bool(self.groups and self.groups % self.tp and self.tp % self.groups),
                "heads over groups": self.heads % groups != 0,
                "width of a head": bool(self.hidden and self.hidden % self.heads),
                "rotary": bool(self.hidden and self.rotary and (int(width * self.rotary) < 2 or int(width * self.rotary) % 2)),
            }
        return {name for name, is_broken in rules.items() if is_broken}


_WAYS = {
    "processes": ("{} processes", "processes"), "tp": ("--tp-size {}", "tp"), "sp": ("--sp-size {}", "sp"), "cp": ("--cp-size {}", "cp"),
    "pp": ("--pp-size {}", "pp"),
    "heads": ("--num-attention-heads {}", "heads"), "groups": ("--num-query-groups {}", "groups"), "ffn": ("--ffn-hidden-size {}", "ffn"),
}  # fmt: skip
_MOST_TRIED = 1 << 12


def _ways_out(config: Config, world_size: int, mend: set[str], *names: str, more_than: int = 0) -> str:
    """Return single changes that repair the rules ``mend`` and violate no others, as text: "; use --tp-size 1 or 2, or ...".

    Args:
        mend: names of rules, as in ``_Sizes.broken``.
        names: sizes to change, keys of ``_WAYS``; the nearest valid values of each are given.
        more_than: values must be above this.
    """
    sizes = _Sizes.of(config, world_size)
    before, said = sizes.broken(), []
    for name in names:
        text, key = _WAYS[name]
        value = getattr(sizes, key)
        found = []
        for distance in range(1, min(2 * max(value, sizes.processes, sizes.replica) + 2, _MOST_TRIED)):
            found += [
                near for near in (value - distance, value + distance)
                if near > more_than and replace(sizes, **{key: near}).broken() <= before - mend
            ]  # fmt: skip
            if len(found) >= 3:
                break
        if found:
            *first, last = [str(near) for near in sorted(found[:3])]
            said.append(text.format(f"{', '.join(first)} or {last}" if first else last))
    return f"; use {', or '.join(said)}" if said else ""


def _exchanges(config: Config, world_size: int) -> Iterator[str]:
    """Check the flags of the Ulysses exchanges, which apply only with sp > 1 and must not contradict each other."""
    parallel = config.parallel
    given = [
        flag for flag, on in (
            ("--sp-overlap-comm", parallel.sp_overlap_comm), ("--split-qkv-linear", parallel.split_qkv_linear),
            ("--sp-head-chunks", parallel.sp_head_chunks is not None),
            (f"--sp-overlap-mode {parallel.sp_overlap_mode}", parallel.sp_overlap_mode not in (None, "none")),
        ) if on
    ]  # fmt: skip
    if given and parallel.sequence_parallel_size == 1 and not parallel.measures_split:
        yield (
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} about the exchanges of Ulysses, and with sequence_parallel_size 1"
            f" there are none{_ways_out(config, world_size, set(), 'sp', more_than=1)}; or leave the flag out"
        )
    heads, tp, sp = config.model.num_attention_heads, parallel.tensor_model_parallel_size, parallel.sequence_parallel_size
    most = -(-heads // (tp * sp)) if heads else None
    if most and sp > 1 and (parallel.sp_head_chunks or 0) > most:
        yield (
            f"sp_head_chunks ({parallel.sp_head_chunks}) must be at most the query heads of a rank ({heads} / ({tp} * {sp}), rounded up,"
            f" = {most}): use --sp-head-chunks {most} or less"
        )
    mode = parallel.sp_overlap_mode
    if mode is None:
        if parallel.split_qkv_linear and parallel.sp_head_chunks is not None:
            yield "--split-qkv-linear and --sp-head-chunks are two ways to cut the exchanges: give one"
        return
    if mode == "none" and parallel.sp_overlap_comm:
        yield "--sp-overlap-mode none and --sp-overlap-comm contradict each other: give one"
    if mode not in ("split-qkv",) and parallel.split_qkv_linear:
        yield f"--sp-overlap-mode {mode} and --split-qkv-linear contradict each other: give --sp-overlap-mode split-qkv, or one of them"
    if mode not in ("chunked", "auto") and parallel.sp_head_chunks is not None:
        yield f"--sp-overlap-mode {mode} and --sp-head-chunks contradict each other: give --sp-overlap-mode chunked, or one of them"


def _kernels(config: Config) -> Iterator[str]:
    kernels, model = config.kernels, config.model
    backend = kernels.attention_backend
    if backend in ("flash", "flash2", "flash3", "flash4", "cudnn"):
        whose = "cuDNN" if backend == "cudnn" else "flash-attn"
        if kernels.device == "cpu":
            yield f"--attention-backend {backend} needs a GPU, but --device cpu was given: use auto or fused"
        if not (config.precision.bf16 or config.precision.fp16):
            yield f"{whose} computes in bf16 and fp16 only, not {config.precision.params_dtype}: add --bf16, or drop the flash flag"
        if _head_dim_known(model) and model.head_dim > _FLASH_HEAD_DIM:
            yield f"{whose} takes heads up to {_FLASH_HEAD_DIM} wide, not {model.head_dim}: use --attention-backend auto"
    if backend in ("flash3", "flash4") and model.attention_dropout > 0:
        yield (
            f"FlashAttention {backend[-1]} has no attention dropout, and attention_dropout is {model.attention_dropout}: add"
            " --attention-dropout 0, or use --attention-backend flash2 or auto"
        )
    if backend == "cudnn" and kernels.deterministic_mode:
        yield "--attention-backend cudnn and --deterministic-mode exclude each other: torch refuses cuDNN's backward there; use auto"
    if backend == "cudnn" and (model.window_size is not None or config.data.reset_attention_mask):
        what = "--window-size" if model.window_size is not None else "--reset-attention-mask"
        yield f"--attention-backend cudnn and {what} exclude each other: torch's SDPA passes no such mask to cuDNN; use auto"
    if (fused := kernels.fused_kernels) in ("apex", "triton"):
        if kernels.device == "cpu":
            yield f"--fused-kernels {fused} needs a GPU, but --device cpu was given: use auto or torch"
        if config.precision.fp64:
            yield f"--fused-kernels {fused} computes in fp32, bf16 and fp16 only, not float64: use auto, or another precision"
        if fused == "apex" and config.parallel.offload_optimizer and config.optimizer.optimizer == "adam":
            yield "--fused-kernels apex updates on the GPU, --offload-optimizer on the host: use --fused-kernels auto, or drop the latter"
    granularity, method, layers = kernels.recompute_granularity, kernels.recompute_method, kernels.recompute_num_layers
    if kernels.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, but full was given: drop one"
    if granularity == "selective" and method:
        yield "--recompute-method chooses whole blocks and needs --recompute-granularity full (given: selective): change one of them"
    if granularity == "full" and method == "block" and layers is None:
        yield "--recompute-method block needs --recompute-num-layers N (how many blocks to recompute)"
    if kernels.recompute_attention != "none" and granularity != "full":
        yield (
            f"--recompute-attention {kernels.recompute_attention} is about recomputed blocks and needs --recompute-granularity full (given:"
            f" {granularity or 'nothing'}): change one of them"
        )
    if kernels.recompute_qkv and granularity == "selective":
        yield "--recompute-qkv keeps attention's output, and --recompute-granularity selective computes it again: drop one of them"
    parallel = config.parallel
    ulysses = parallel.sequence_parallel_size * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
    parts = ulysses * parallel.context_parallel_size
    positions = -(-(model.seq_length or 0) // parts)
    if model.seq_length and kernels.mlp_chunks > positions:
        yield (
            f"mlp_chunks ({kernels.mlp_chunks}) must be at most the positions of a rank ({model.seq_length} / {parts}, rounded up, ="
            f" {positions}): use --mlp-chunks {positions} or less"
        )
    if layers and model.num_layers and layers > model.num_layers:
        yield f"recompute_num_layers ({layers}) must be at most num_layers ({model.num_layers})"


def _length(config: Config) -> Iterator[str]:
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
    kind, other, total_flag = ("samples", "iters", "--train-samples") if by_samples else ("iters", "samples", "--train-iters")
    mixed = [f"--{name}-{other}".replace("_", "-") for name in ("lr_decay", "lr_warmup", "lr_wsd_decay") if getattr(opt, f"{name}_{other}")]
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
    yield from token_violations(config)
    if horizon_in_tokens(opt, batch) is not None:
        return
    total = batch.train_samples if by_samples else batch.train_iters
    horizon = getattr(opt, f"lr_decay_{kind}") or total
    if total is not None and horizon is not None:
        yield from _horizon(opt, kind, horizon)


def _decoupled_rate(opt: OptimizerConfig) -> Iterator[str]:
    """Check the schedule of embeddings and output layer, which has the same shape between other rates."""
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
    """Check warm-up and WSD's final decay against the ``horizon`` of the decay, all in steps or all in samples (``kind``)."""
    warmup, fraction = getattr(opt, f"lr_warmup_{kind}"), opt.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            yield f"give --lr-warmup-fraction ({fraction}) or --lr-warmup-{kind} ({warmup}), not both"
        if fraction >= 1:
            yield f"lr_warmup_fraction ({fraction}) must be in [0, 1): it is a share of the decay horizon"
        warmup = 0 if fraction >= 1 else math.ceil(fraction * horizon)
    if warmup and warmup >= horizon and fraction is None:
        yield (
            f"lr_warmup_{kind} ({warmup}) must be below the decay horizon ({horizon}, from --lr-decay-{kind} or the length of the run):"
            f" shorten the warm-up or raise --lr-decay-{kind}"
        )
    if opt.lr_decay_style != "WSD":
        return
    decay = getattr(opt, f"lr_wsd_decay_{kind}")
    if decay is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{kind} N, the length of its final decay"
    elif warmup < horizon < warmup + decay:
        yield f"WSD's warm-up and final decay must fit into the horizon: {warmup} + {decay} = {warmup + decay} > {horizon} {kind}"


def _optimizer(config: Config) -> Iterator[str]:
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
            f"start_weight_decay ({start}) and end_weight_decay ({end}) differ, but --weight-decay-incr-style is constant:"
            " use linear or cosine, or give --weight-decay alone"
        )
    if opt.override_opt_param_scheduler and opt.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: who decides on resume?"


def _precision(config: Config) -> Iterator[str]:
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


def _checkpoint(config: Config) -> Iterator[str]:
    ckpt = config.checkpoint
    source = ckpt.load or ckpt.auto_resume
    needs = (
        ("--mean-time-between-failures-hours", ckpt.mean_time_between_failures_hours, "--save-interval auto", ckpt.save_interval == "auto"),
        ("--auto-resume", ckpt.auto_resume, "--save DIR", ckpt.save),
        ("--ckpt-step", ckpt.ckpt_step is not None, "--load DIR or --auto-resume", source),
        ("--resume-fallback", ckpt.resume_fallback, "--load DIR or --auto-resume", source),
        ("--finetune", ckpt.finetune, "--load DIR", ckpt.load),
        ("--use-checkpoint-args", ckpt.use_checkpoint_args, "--load DIR or --auto-resume", source),
    )
    for flag, given, needed, present in needs:
        if given and not present:
            yield f"{flag} needs {needed}"
    if ckpt.auto_resume and ckpt.no_save_optim:
        yield "--auto-resume cannot go on from checkpoints without optimizer state: drop --no-save-optim"


def _logging(config: Config, world_size: int) -> Iterator[str]:
    log = config.logging
    if log.profile and log.profile_step_end <= log.profile_step_start:
        yield f"profile_step_end ({log.profile_step_end}) must be above profile_step_start ({log.profile_step_start})"
    absent = [rank for rank in log.profile_ranks if not 0 <= rank < world_size]
    if log.profile and absent:
        yield f"profile_ranks names rank {absent[0]}, but the ranks are 0 to {world_size - 1}"
    parallel = config.parallel
    if log.report_overlap is not None and parallel.replica_size == parallel.expert_model_parallel_size == 1:
        yield (
            "--report-overlap is about the exchanges of sequence-, context-, tensor- and pipeline-parallel ranks, and with"
            " sequence_parallel_size 1, context_parallel_size 1, tensor_model_parallel_size 1 and pipeline_model_parallel_size 1 there"
            " are none to report: add --sequence-parallel-size N, --context-parallel-size N, --tensor-model-parallel-size N or"
            " --pipeline-model-parallel-size N, or leave it out"
        )
    if log.report_overlap is not None and config.batch.skip_train:
        yield "--report-overlap measures training steps, and --skip-train takes none: give one of them"
    if log.report_overlap is not None and parallel.verify_parallelism:
        yield "--report-overlap measures training steps, and --verify-parallelism compares one step and ends: give one of them"
    if log.peak_tflops is None or log.peak_tflops in PEAK_TFLOPS:
        return
    try:
        if not 0 < float(log.peak_tflops) < math.inf:
            yield f"peak_tflops ({log.peak_tflops}) must be above 0"
    except ValueError:
        yield f"peak_tflops ({log.peak_tflops}) must be a number of TFLOP/s above 0, or one of {', '.join(PEAK_TFLOPS)}"


def _show(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
