"""What is handed from a reader to a writer: a checkpoint in our own terms, whatever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_sp.config import Config, KernelConfig, ModelConfig
from megatron_sp.config_rules import model_violations
from megatron_sp.convert.copies import TensorInfo, TensorStore
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.models.transformer import shard_specs
from megatron_sp.utils.errors import CheckpointError

OPTIMIZER = "optimizer."
KINDS = ("master", "exp_avg", "exp_avg_sq")
"""Of tensors of the optimizer: ``optimizer.{kind}.{name of the parameter}``."""
_MAX_NUMEL = 1 << 58  # torch counts bytes in 64 bits


class Fate(NamedTuple):
    """What became of a tensor of the source."""

    name: str
    went: str  # the tensor of ours that it is part of; empty: nowhere
    why: str  # it was dropped, or what else is worth saying


@dataclass
class Model:
    """A checkpoint in our own terms.

    Attributes:
        config: shape of the model; ``vocab_size`` is set.
        store: its tensors by our names: all weights, perhaps those of the optimizer.
        step: optimizer steps that made it; 0: not known.
        consumed_samples: likewise.
        num_classes: of a classifier; 0: it is none.
        fates: one for every tensor of the source.
        tokenizer: files, by the names that they had.
        tokenizer_type: what they are, as the flag says it; None: as the files say.
        settings: what the source says that has no place of its own here, JSON values: for the way back.
        notes: what the user should know.
    """

    config: ModelConfig
    store: TensorStore
    step: int = 0
    consumed_samples: int = 0
    num_classes: int = 0
    fates: list[Fate] = field(default_factory=list)
    tokenizer: dict[str, Path] = field(default_factory=dict)
    tokenizer_type: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def weights(self) -> dict[str, TensorInfo]:
        """Without those of the optimizer."""
        return {name: info for name, info in self.store.tensors().items() if not name.startswith(OPTIMIZER)}

    @property
    def has_optimizer(self) -> bool:
        return any(name.startswith(OPTIMIZER) for name in self.store.tensors())


def require_sound(config: ModelConfig, num_tensors: int, where: str) -> None:
    """Refuse sizes that no model has, before anything of that size is made.

    Args:
        num_tensors: that the files hold.
    Raises:
        CheckpointError: with all that is wrong.
    """
    problems = model_violations(Config(model=config))
    if not problems and (config.num_layers or 0) > num_tensors:
        problems = [f"num_layers ({config.num_layers}) must not exceed the number of tensors ({num_tensors}), and each layer has several"]
    if not problems and (width := _largest_width(config)) * (config.hidden_size or 0) >= _MAX_NUMEL:
        problems = [f"hidden_size ({config.hidden_size}) times the widest dimension ({width}) is more than any tensor can have"]
    if problems:
        raise CheckpointError(f"{where} describes a model that cannot be: " + "; ".join(problems))


def _largest_width(config: ModelConfig) -> int:
    """Of the dims that a weight has beside the hidden size; queries, keys and values together are at most three times the heads."""
    heads = 3 * (config.num_attention_heads or 0) * config.head_dim
    return max(heads, 2 * config.ffn_size, config.hidden_size or 0, config.max_positions, config.vocab_size or 0, config.token_types)


def build(config: ModelConfig, num_classes: int, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The model of this shape, on the meta device."""
    with torch.device("meta"):
        if num_classes:
            return BertClassifier(config, KernelConfig(), num_classes=num_classes, seed=0, dtype=dtype)
        return (BertModel if config.is_bert else GPTModel)(config, KernelConfig(), seed=0, dtype=dtype)


def parameter_shapes(config: ModelConfig, num_classes: int = 0) -> dict[str, tuple[int, ...]]:
    """Name and global shape of every parameter of a model, in its own order; a vocabulary is not padded."""
    model = build(config, num_classes)
    specs = shard_specs(model)
    return {name: specs[name].shape for name, _ in model.named_parameters()}


def nearest(name: str, among: Mapping[str, Any]) -> str:
    """The end of a sentence about a name that is not there."""
    import difflib

    close = difflib.get_close_matches(name, among, 3, 0.6)
    return f" (nearest: {', '.join(close)})" if close else ""
