"""Shape of an external model: its config.json in our fields, and flags that contradict it; without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"), "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"), "num_query_groups": ("num_key_value_heads",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"), "kv_channels": ("head_dim",), "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
}  # fmt: skip
"""Fields of our configuration -> what transformers' configurations call them."""
_OF_TRAINING = (
    "model_family", "seq_length", "attention_dropout", "hidden_dropout", "bert_no_binary_head",
    "make_vocab_size_divisible_by",
)  # fmt: skip
"""Fields of ``ModelConfig`` that a folder does not decide."""

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""Fields without which no run begins."""


def shape_of(folder: str) -> dict[str, int]:
    """Return the shape in a config.json, by the names that most classes use. Raises ConfigError: it is invalid."""
    path = Path(folder) / "config.json"
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        way_out = "give a local folder with transformers' config.json"
        raise ConfigError(f"--model {folder}: {path} cannot be read ({error}): {way_out}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"--model {folder}: {path} must be an object")
    shape = dict[str, int]()
    for field, names in NAMES.items():
        for name in names:
            if isinstance(entries.get(name), int):
                shape.setdefault(field, entries[name])
    return shape


def shape_in(configuration: Any) -> dict[str, int]:
    """Return the shape in a configuration of transformers, as fields of ours."""
    text, shape = configuration.get_text_config(decoder=True), dict[str, int]()
    for field, names in NAMES.items():
        for name in names:
            try:
                value = getattr(text, name, None)
            except Exception:  # some entries are properties that raise
                continue
            if type(value) is int:
                shape.setdefault(field, value)
    return shape


def contradictions(config: Config, shape: dict[str, int], folder: str) -> Iterator[str]:
    """Yield a message for each flag that contradicts a folder."""
    if config.preset is not None:
        yield f"--preset {config.preset}: the model is that of --model {folder}: leave one of the two out"
    for (group, name), where in config.given.items():
        if group != "model" or name in _OF_TRAINING:
            continue
        value = getattr(config.model, name)
        if name in shape and value != shape[name]:
            file = f"{folder}/config.json"
            yield f"{where} ({value}): {file} has {shape[name]}, and the model is the folder's: leave the flag out"
        elif name not in NAMES:
            whose = f"this one is as {folder}/config.json says"
            yield f"{where} is for megatron_sp's own models, and {whose}: leave the flag out"
