"""A checkpoint in our own terms, between readers and writers; the options; the interface of a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from megatron_sp.config.fields import field_kinds
from megatron_sp.config.rules import model_violations
from megatron_sp.config.schema import Config, KernelConfig, ModelConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert.archive.dist_folder import MAX_METADATA_BYTES
from megatron_sp.convert.copies import Correspondence, Shape, TensorInfo, TensorStore
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import CheckpointError, ConfigError

# of dynamic loss scaling, as our checkpoints have it: dynamic, scale, good_steps, hysteresis_left
LossScale = dict[str, float | int | bool]
Progress = Callable[[int], None]  # told how many bytes have been written since the last call
OPTIMIZER = "optimizer."
KINDS = ("master", "exp_avg", "exp_avg_sq")  # of tensors of the optimizer: optimizer.{kind}.{name of the parameter}
_MAX_LAYERS = 1 << 10
_MAX_NUMEL = 1 << 58  # torch counts bytes in 64 bits
_MAX_COMPARED = 500  # names; each takes some 0.1 ms
_SHOWN, _MAX_NAME = 12, 200  # problems that are listed, and characters of a name


class Fate(NamedTuple):
    """Fate of a tensor of the source."""

    name: str
    went: str  # our tensor that it became part of; empty if it was dropped
    why: str  # why it was dropped, or another remark


@dataclass
class Model:
    """A checkpoint in our own terms."""

    config: ModelConfig  # shape of the model; ``vocab_size`` is set
    store: TensorStore  # its tensors by our names: all weights, and possibly the optimizer's tensors
    step: int = 0  # number of training steps; 0: unknown
    consumed_samples: int = 0  # number of training samples; 0: unknown
    num_classes: int = 0  # number of classes of a classifier; 0: no classifier
    fates: list[Fate] = field(default_factory=list)  # one for every tensor of the source
    tokenizer: dict[str, Path] = field(default_factory=dict)  # its files, by their original names
    tokenizer_type: str | None = None  # value of the flag; None: determined by the files
    eod_id: int | None = None  # id that ends documents, where it is not the tokenizer's own
    # settings of the source without a field here, as JSON values, for converting back
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_updates: int | None = None  # updates of the optimizer, fewer than steps where some were skipped; None: unknown
    loss_scale: LossScale | None = None  # state of fp16 loss scaling; None: no dynamic loss scaling, or unknown
    # those that advance the learning rate schedule, without skipped steps; None: unknown
    scheduled_samples: int | None = None

    @property
    def scheduled(self) -> int:
        return self.consumed_samples if self.scheduled_samples is None else self.scheduled_samples

    @property
    def updates(self) -> int:
        return self.step if self.num_updates is None else self.num_updates

    def weights(self) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.store.tensors().items() if not name.startswith(OPTIMIZER)}

    def kinds(self) -> set[str]:
        """Return the ``KINDS`` of the optimizer's tensors; empty without them."""
        return {name.split(".")[1] for name in self.store.tensors() if name.startswith(OPTIMIZER)}

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the parameters, without the biases of routers, which are always in fp32."""
        return {info.dtype for name, info in self.weights().items() if not is_expert_bias(name)}


def parse_settings(words: Iterable[str]) -> dict[str, Any]:
    """Return the settings that --set gives."""
    settings, kinds = dict[str, Any](), field_kinds(ModelConfig)
    for word in words:
        name, _, text = word.partition("=")
        field_name = name.strip().lstrip("-").replace("-", "_")
        if field_name not in kinds or not text:
            raise ConfigError(f"--set {word[:100]}: it must be NAME=VALUE with a setting of the"
                              f" model{nearest(field_name, kinds)}")  # fmt: skip
        try:
            settings[field_name] = kinds[field_name].parse(text.split())
        except ValueError as error:
            raise ConfigError(f"--set {word[:100]}: {error}") from None
    return settings


@dataclass
class Options:
    """Options of a conversion, named like the flags."""

    step: int | None = None  # step of the checkpoint to read; None: the newest
    # row order of the fused projections in files that do not specify it
    qkv_layout: Literal["interleaved", "flat", "v0", "v1"] | None = None
    vocab_size: int | None = None  # entries of the vocabulary, for files that only have the padded number of rows
    tokenizer: Path | None = None  # folder or file to take the tokenizer from, instead of the source's own
    optimizer: bool = True  # convert the optimizer's state too, if the source has it and the target supports it
    dtype: torch.dtype | None = None  # dtype of the written weights; None: unchanged
    given: dict[str, Any] = field(default_factory=dict)  # settings of the model that the files do not specify
    # naming scheme of the parameters in Megatron's files
    megatron_names: Literal["core", "core-local", "legacy"] = "core"
    # layout to write for megatron-deepspeed; None: zero1 with the optimizer's state, else module
    deepspeed_layout: Literal["module", "zero1", "universal"] | None = None
    # row order of the fused projections to write for megatron-deepspeed
    deepspeed_qkv_layout: Literal["interleaved", "flat"] = "flat"
    tp: int = 1  # tensor and pipeline parallel sizes to write for, if the format has one file per rank
    pp: int = 1
    ep: int = 1  # number of ranks to write shares of the experts for, likewise
    max_metadata_mb: int = MAX_METADATA_BYTES >> 20  # largest .metadata of megatron-dist to read, in MiB
    max_shard_bytes: int = 5 << 30  # approximate maximum size of a safetensors file
    output: Path | None = None


class Writer(Protocol):
    """Interface for ``command.convert``."""

    def write(self, model: Any, path: Path, options: Options, progress: Progress) -> None:
        """Write a checkpoint into a folder that does not exist yet."""
        ...

    def size(self, model: Any, options: Options) -> int:
        """Return about the number of bytes."""
        ...


class Format(Writer, Protocol):
    """A checkpoint format: detects, reads and writes its files."""

    name: str
    holds_optimizer: bool  # it can store the optimizer's state

    def recognises(self, path: Path) -> bool:
        """Return whether a folder's file names are of this format."""
        ...

    def read(self, path: Path, options: Options) -> Model:
        """Read the description of a checkpoint without its tensors. Raises ConfigError where a flag is needed."""
        ...


def require_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that is in ``root`` through a symbolic link."""
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link: a checkpoint consists of plain files and folders, copy"
                                  " the folder there")  # fmt: skip


def require_sound(config: ModelConfig, num_tensors: int, where: str) -> None:
    """Refuse impossible sizes, before anything of that size is allocated."""
    layers, hidden = config.num_layers or 0, config.hidden_size or 0
    problem = "; ".join(model_violations(Config(model=config)))
    if not problem and layers > num_tensors:
        problem = (f"num_layers ({layers}) must not exceed the number of tensors ({num_tensors}), and each layer has"
                   " several")  # fmt: skip
    if not problem and layers > _MAX_LAYERS:
        problem = f"num_layers ({layers:,}) must not exceed {_MAX_LAYERS:,}"
    if not problem:
        heads = 3 * (config.num_attention_heads or 0) * config.head_dim
        experts = (config.num_experts or 0) * 2 * config.expert_ffn_size
        mlp = max(experts, 2 * config.ffn_size, 2 * config.shared_expert_size)
        width = max(heads, mlp, hidden, config.max_positions, config.vocab_size or 0, config.token_types)
        if width * hidden >= _MAX_NUMEL:
            problem = f"hidden_size ({hidden}) times the widest dimension ({width}) is more than any tensor can have"
    if problem:
        raise CheckpointError(f"{where} describes a model that cannot be: {problem}")


def build(config: ModelConfig, num_classes: int, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Build the model of this shape on the meta device."""
    with torch.device("meta"):
        if num_classes:
            return BertClassifier(config, KernelConfig(), num_classes=num_classes, seed=0, dtype=dtype)
        return (BertModel if config.is_bert else GPTModel)(config, KernelConfig(), seed=0, dtype=dtype)


def parameter_shapes(config: ModelConfig, num_classes: int = 0) -> dict[str, Shape]:
    """Return the global shape of every parameter and router bias, in the model's order."""
    layers = config.num_layers or 0
    with_experts = set(config.expert_layers(layers))
    # all blocks with experts are alike, and all others: only one of each is built, for a file may claim very many
    of_kind = {has: _shapes_of_one(config, num_classes, has) for has in {i in with_experts for i in range(layers)}}
    shapes: dict[str, Shape] = {}
    prefix, around, _ = next(iter(of_kind.values()))
    for name, shape in around.items():
        if name is not None:
            shapes[name] = shape
            continue
        for layer in range(layers):
            shapes |= {f"{prefix}{layer}.{rest}": shape for rest, shape in of_kind[layer in with_experts][2].items()}
    return shapes


def _shapes_of_one(
    config: ModelConfig, num_classes: int, has_experts: bool
) -> tuple[str, dict[str | None, Shape], dict[str, Shape]]:
    # prefix of the blocks' names, shapes outside of the blocks with None in the place of these, shapes of a block
    changes: dict[str, Any] = {"moe_layer_freq": "1"} if has_experts else {"num_experts": None}
    model = build(replace(config, num_layers=1, **changes), num_classes)
    specs = shard_specs(model)
    (block,) = (f"{unit.name}." for unit in model.units() if unit.alike == "block")
    around: dict[str | None, Shape] = {}
    inside: dict[str, Shape] = {}
    for name, _ in model.named_parameters():
        if name.startswith(block):
            around.setdefault(None, ())
            inside[name.removeprefix(block)] = specs[name].shape
        else:
            around[name] = specs[name].shape
    buffers = dict(model.named_buffers())
    inside |= {name.removeprefix(block): tuple(buffers[name].shape) for name in stored_names(model) if name in buffers}
    return block.removesuffix("0."), around, inside


def stored_names(module: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    return names + [name for name, _ in module.named_buffers() if is_expert_bias(name)]


def nearest(name: str, among: Iterable[str]) -> str:
    """Return a clause with the names most similar to an unknown one, or ""."""
    import difflib

    candidates = [other for other in islice(among, _MAX_COMPARED) if len(other) < 300]
    close = difflib.get_close_matches(name, candidates, 3, 0.6)
    return f" (nearest: {', '.join(close)})" if close else ""


def match_tensors(
    where: str, correspondence: Correspondence, store: TensorStore, ignored: Mapping[str, str], *,
    tied: Mapping[str, str] | None = None, shown: Mapping[str, str] | None = None,
) -> list[Fate]:  # fmt: skip
    """Return what becomes of each tensor. Raises CheckpointError unless they are those of the model."""
    # ``ignored``: regular expressions of names that are dropped, each with the reason; ``tied``: further names of
    # tensors that the model has only once, which must have the same values; ``shown``: the names in the files
    shown, tied = shown or {}, tied or {}
    stored, needed = store.tensors(), correspondence.theirs
    unknown = [name for name in stored if name not in needed]
    problems = [(name, " is missing", unknown) for name in needed if name not in stored]
    for name, shape in needed.items():
        if name in stored and stored[name].shape != shape:
            problems.append((name, f" is {list(stored[name].shape)}, {list(shape)} is expected", []))
    fates = []
    for ours, theirs, is_replica in correspondence.copies:
        fates.append(Fate(shown.get(theirs.name, theirs.name), ours.name, "compared only" if is_replica else ""))
    for name in unknown:
        if (twin := tied.get(name)) in stored:
            if not torch.equal(store.read(name), store.read(str(twin))):
                raise CheckpointError(f"{name} must be the same as {twin}, because config.json ties them, but it"
                                      " differs")  # fmt: skip
            reason: str | None = f"the same as {twin}"
        else:
            reason = next((reason for pattern, reason in ignored.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            problems.append((name, " has no place in this model", list(needed)))
        else:
            fates.append(Fate(shown.get(name, name), "", reason))
    if problems:
        lines = [f"{where} does not fit the model that it claims to be:"]
        for name, what, among in problems[:_SHOWN]:
            lines.append(f"  {shown.get(name, name)[:_MAX_NAME]}{what}{nearest(name[:_MAX_NAME], among)}")
        lines += [f"  and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n".join(lines))
    return fates
