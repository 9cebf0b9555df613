"""What passes between readers and writers: a checkpoint in our own terms, the options, the interface of a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_sp.checkpoint.stream import FiniteTensors
from megatron_sp.config.fields import field_kinds
from megatron_sp.config.rules import model_violations
from megatron_sp.config.schema import Config, KernelConfig, ModelConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert.archive.dist_folder import MAX_METADATA_BYTES
from megatron_sp.convert.copies import Correspondence, TensorInfo, TensorStore
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.experts import stored_dtype
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import CheckpointError, ConfigError

LossScale = dict[str, float | int | bool]
"""Of dynamic loss scaling, as our checkpoints have it: dynamic, scale, good_steps, hysteresis_left."""
OPTIMIZER = "optimizer."
KINDS = ("master", "exp_avg", "exp_avg_sq")
"""Of tensors of the optimizer: ``optimizer.{kind}.{name of the parameter}``."""
_MAX_LAYERS = 1 << 10
_MAX_COMPARED = 500  # names; each takes some 0.1 ms
_MAX_NUMEL = 1 << 58  # torch counts bytes in 64 bits


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

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the parameters; biases of routers, which are in fp32 in any run, do not count."""
        return {info.dtype for name, info in self.weights().items() if not is_expert_bias(name)}

    @property
    def has_optimizer(self) -> bool:
        return any(name.startswith(OPTIMIZER) for name in self.store.tensors())


class LookedAt:
    """A model's tensors, each of which is looked at when it is read (a ``TensorStore``)."""

    def __init__(self, store: TensorStore, finite: FiniteTensors, dtype: torch.dtype | None) -> None:
        self._store, self._finite, self._dtype = store, finite, dtype

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._store.tensors()

    def read(self, name: str) -> Tensor:
        tensor = self._store.read(name)
        wanted = None if name.startswith(OPTIMIZER) else self._dtype
        return self._finite.look(name, tensor, stored_dtype(name, tensor.dtype, wanted))


def require_sound(config: ModelConfig, num_tensors: int, where: str) -> None:
    """Refuse impossible sizes, before anything of that size is allocated."""
    layers, hidden = config.num_layers or 0, config.hidden_size or 0
    problem = "; ".join(model_violations(Config(model=config)))
    if not problem and layers > num_tensors:
        problem = (f"num_layers ({layers}) must not exceed the number of tensors ({num_tensors}), and each layer has"
                   " several")  # fmt: skip
    if not problem and layers > _MAX_LAYERS:
        problem = f"num_layers ({layers:,}) must not exceed {_MAX_LAYERS:,}"
    if not problem and (width := _largest_width(config)) * hidden >= _MAX_NUMEL:
        problem = f"hidden_size ({hidden}) times the widest dimension ({width}) is more than any tensor can have"
    if problem:
        raise CheckpointError(f"{where} describes a model that cannot be: {problem}")


def _largest_width(config: ModelConfig) -> int:
    heads = 3 * (config.num_attention_heads or 0) * config.head_dim
    experts = (config.num_experts or 0) * 2 * config.expert_ffn_size
    mlp = max(experts, 2 * config.ffn_size, 2 * config.shared_expert_size)
    return max(heads, mlp, config.hidden_size or 0, config.max_positions, config.vocab_size or 0, config.token_types)


def build(config: ModelConfig, num_classes: int, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Build the model of this shape on the meta device."""
    with torch.device("meta"):
        if num_classes:
            return BertClassifier(config, KernelConfig(), num_classes=num_classes, seed=0, dtype=dtype)
        return (BertModel if config.is_bert else GPTModel)(config, KernelConfig(), seed=0, dtype=dtype)


def parameter_shapes(config: ModelConfig, num_classes: int = 0) -> dict[str, tuple[int, ...]]:
    """Return name and global shape of every parameter of a model, in the model's order; the vocabulary is not padded.

    Biases of routers, which are no parameters but are stored as these, are among them. All blocks with experts have the
    same shapes, and all others, so only one of each kind is built: a file may claim a very large number of them.
    """
    layers = config.num_layers or 0
    with_experts = set(config.expert_layers(layers))
    kinds = {layer in with_experts for layer in range(layers)}
    of_kind = {has_experts: _shapes_of_one(config, num_classes, has_experts) for has_experts in kinds}
    shapes: dict[str, tuple[int, ...]] = {}
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
) -> tuple[str, dict[str | None, tuple[int, ...]], dict[str, tuple[int, ...]]]:  # fmt: skip
    # prefix of the blocks' names, shapes outside of the blocks with None in the place of these, shapes of a block
    changes: dict[str, Any] = {"moe_layer_freq": "1"} if has_experts else {"num_experts": None}
    model = build(replace(config, num_layers=1, **changes), num_classes)
    specs = shard_specs(model)
    blocks = [f"{unit.name}." for unit in model.units() if unit.alike == "block"]
    assert len(blocks) == 1 and blocks[0].endswith(".0."), f"the blocks of a model with one layer are {blocks}"
    around: dict[str | None, tuple[int, ...]] = {}
    inside: dict[str, tuple[int, ...]] = {}
    for name, _ in model.named_parameters():
        if name.startswith(blocks[0]):
            around.setdefault(None, ())
            inside[name.removeprefix(blocks[0])] = specs[name].shape
        else:
            around[name] = specs[name].shape
    buffers = dict(model.named_buffers())
    inside |= {n.removeprefix(blocks[0]): tuple(buffers[n].shape) for n in stored_names(model) if n in buffers}
    return blocks[0][: -len("0.")], around, inside


def stored_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters, and of the biases of routers."""
    names = [name for name, _ in module.named_parameters()]
    return names + [name for name, _ in module.named_buffers() if is_expert_bias(name)]


def nearest(name: str, among: Iterable[str]) -> str:
    """Return a clause with the names most similar to an unknown one, or ""; of very many the first are compared."""
    import difflib

    candidates = [other for other in islice(among, _MAX_COMPARED) if len(other) < 300]
    close = difflib.get_close_matches(name, candidates, 3, 0.6)
    return f" (nearest: {', '.join(close)})" if close else ""


_SHOWN = 12
_MAX_NAME = 200  # characters of a name that are shown


class Coverage(NamedTuple):
    """A correspondence that the source satisfies, and the fates of the source's tensors."""

    correspondence: Correspondence
    fates: list[Fate]


def match_tensors(
    where: str, correspondence: Correspondence, store: TensorStore, ignored: Mapping[str, str], *,
    tied: Mapping[str, str], shown: Mapping[str, str] | None = None,
) -> Coverage:  # fmt: skip
    """Compare the tensors of a checkpoint with those that its model needs.

    Args:
        where: the checkpoint, for error messages.
        correspondence: lists all needed tensors.
        store: the tensors of the checkpoint.
        ignored: regular expressions of names that are dropped, each with the reason.
        tied: further names of tensors that the model has only once; both must have the same values.
        shown: names used in the files, for messages and fates.
    """
    shown = shown or {}
    stored, needed = store.tensors(), correspondence.theirs
    unknown = [name for name in stored if name not in needed]
    missing = [name for name in needed if name not in stored]
    problems = [(name, " is missing", unknown) for name in missing]
    for name, shape in needed.items():
        if name in stored and stored[name].shape != shape:
            problems.append((name, f" is {list(stored[name].shape)}, {list(shape)} is expected", []))
    fates = []
    for ours, theirs, is_replica in correspondence.copies:
        fates.append(Fate(shown.get(theirs.name, theirs.name), ours.name, "compared only" if is_replica else ""))
    for name in unknown:
        reason = _reason(name, store, ignored, tied)
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
    return Coverage(correspondence, fates)


def _reason(name: str, store: TensorStore, ignored: Mapping[str, str], tied: Mapping[str, str]) -> str | None:
    if name in tied and tied[name] in store.tensors():
        if torch.equal(store.read(name), store.read(tied[name])):
            return f"the same as {tied[name]}"
        raise CheckpointError(f"{name} must be the same as {tied[name]}, because config.json ties them, but it differs")
    return next((reason for pattern, reason in ignored.items() if re.fullmatch(pattern, name)), None)


class Overrides(dict[str, Any]):
    """Values of fields of ``ModelConfig``, by name."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> Overrides:
        """Parse the NAME=VALUE words of the command line."""
        overrides, kinds = cls(), field_kinds(ModelConfig)
        for word in words:
            name, _, text = word.partition("=")
            field = name.strip().lstrip("-").replace("-", "_")
            if field not in kinds or not text:
                raise ConfigError(f"--set {word[:100]}: it must be NAME=VALUE with a setting of the"
                                  f" model{nearest(field, kinds)}")  # fmt: skip
            try:
                overrides[field] = kinds[field].parse(text.split())
            except ValueError as error:
                raise ConfigError(f"--set {word[:100]}: {error}") from None
        return overrides

    def count(self, name: str, default: int | None) -> int | None:
        """Return a setting that must be at least 1, or the default."""
        value = self.get(name, default)
        if value is not None and value < 1:
            raise ConfigError(f"--set {name.replace('_', '-')}={value} must be at least 1")
        return value

    def apply(self, config: ModelConfig) -> None:
        for name, value in self.items():
            setattr(config, name, value)


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
    given: Overrides = field(default_factory=Overrides)  # settings of the model that the files do not specify
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


Progress = Callable[[int], None]
"""Told how many bytes have been written since the last call."""


class Writer(Protocol):
    """Interface of what ``command.convert`` writes with: ``Format``, or what has a model of its own."""

    def write(self, model: Any, path: Path, options: Options, progress: Progress) -> None:
        """Write a checkpoint into a folder that does not exist yet."""
        ...

    def size(self, model: Any, options: Options) -> int:
        """Return about how many bytes ``write`` writes."""
        ...


class Format(Protocol):
    """A checkpoint format: detects, reads and writes its files."""

    @property
    def name(self) -> str: ...

    @property
    def holds_optimizer(self) -> bool:
        """True if the format can store the optimizer's state."""
        ...

    def recognises(self, path: Path) -> bool:
        """Return whether a folder contains a checkpoint of this format, judged by its file names."""
        ...

    def read(self, path: Path, options: Options) -> Model:
        """Read the description of a checkpoint without its tensors; nothing in the files is trusted unchecked.

        Raises:
            CheckpointError: something is missing, damaged or not supported.
            ConfigError: a flag is needed for something that the files do not specify; the message names it.
        """
        ...

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None: ...

    def size(self, model: Model, options: Options) -> int:
        """Return the size in bytes of the tensors that ``write`` will write."""
        ...


def require_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that is in ``root`` through a symbolic link; ``root`` may be one, since the user named it."""
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link: a checkpoint consists of plain files and folders, copy"
                                  " the folder there")  # fmt: skip
