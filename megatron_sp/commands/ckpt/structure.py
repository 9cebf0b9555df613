"""Parameters of a configuration's model, computed without allocating memory for them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.commands.ckpt.names import Tensors
from megatron_sp.config.rules import normalize
from megatron_sp.config.schema import Config
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.experts import expert_biases
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import ConfigError

_CLASSES = "classification_head.weight"
_WORDS = "embedding.word_embeddings.weight"


def expected_shapes(stored_config: Any, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter, by name.

    Args:
        stored_config: configuration in ``state.json``.
        tensors: stored tensors; they determine the number of classes, and the vocabulary size if the configuration does
            not.
    Raises:
        ConfigError: there is no configuration, or no model can be built from it.
    """
    config, _ = Config.from_dict(stored_config)
    normalize(config)
    shape = config.model
    if shape.vocab_size is None and _WORDS in tensors:
        shape.vocab_size = tensors[_WORDS][1][0]
    if not shape.num_layers or shape.num_layers > len(tensors):  # or a wrong number would build layers for hours
        raise ConfigError(f"the configuration has {shape.num_layers} layers, the checkpoint {len(tensors):,} tensors")
    try:
        with torch.device("meta"):
            model = _build(config, tensors)
    except (ValueError, TypeError, AssertionError, ArithmeticError, RuntimeError) as error:  # none of its numbers can be trusted
        raise ConfigError(f"no model can be built from the configuration: {error or type(error).__name__}") from None
    specs = shard_specs(model)
    found = {name: tuple(specs[name].shape) if name in specs else tuple(p.shape) for name, p in model.named_parameters()}
    return found | {name: tuple(bias.shape) for name, bias in expert_biases(model).items()}


def _build(config: Config, tensors: Tensors) -> LanguageModel:
    make: dict[str, Any] = {"seed": 0, "dtype": torch.float32}
    if _CLASSES in tensors:
        return BertClassifier(config.model, config.kernels, num_classes=tensors[_CLASSES][1][0], **make)
    return (BertModel if config.model.is_bert else GPTModel)(config.model, config.kernels, **make)
