"""Helpers that the presets share: module paths, collectives around split layers, vocabulary layers, dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


class Around(NamedTuple):
    """Collectives around layers that are split by columns and then by rows.

    Attributes:
        enter: operation for ``sync("fwd_pre", ...)`` before the first of them.
        leave: operation for ``row(...)`` at the last of them.
    """

    enter: str
    leave: str


class Blocks(NamedTuple):
    """Paths of a model's blocks, as a preset returns them.

    Attributes:
        glob: glob of the blocks.
        first: the block before which activations are split along the sequence, if they are.
        last: the module after which they are whole again: the norm after the blocks, or the last block.
    """

    glob: str
    first: str
    last: str


def around(seq: bool) -> Around:
    """Return the collectives for activations between the layers that are split along the sequence, or whole on every rank."""
    return Around("all_gather", "reduce_scatter") if seq else Around("copy", "all_reduce")


def config_of(s: Schedule) -> Any:
    """Return the model's configuration. Raises ConfigError: it has ``add_cross_attention``, which its preset does not cover."""
    config: Any = s.model.config
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            f"{type(s.model).__name__} has cross attention (add_cross_attention), which the preset of {config.model_type} does not cover:"
            " write its lines with schedule(model, mesh)"
        )
    return config


def base_of(s: Schedule) -> str:
    """Return the prefix of the base model's modules: such as "model." in a model with a head, empty in the base model itself."""
    prefix = getattr(s.model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(s.model, prefix, None), nn.Module) else ""


def module_or_none(s: Schedule, path: str) -> nn.Module | None:
    """Return the module at a path, or None."""
    try:
        return s.model.get_submodule(path)
    except AttributeError:
        return None


def share_key_values(s: Schedule, attention: str, queries: int, key_values: int) -> None:
    """Let each rank's queries use one key/value head, if there are fewer such heads than ranks."""
    size = s.mesh.tp.size()
    if key_values < size and size % key_values == 0:
        s[attention].set("num_key_value_groups", queries // size)


def drops(config: Any) -> bool:
    """Return whether there is any dropout in the blocks."""
    inside = [value for name, value in config.to_dict().items() if "drop" in name and not name.startswith(("summary_", "classifier_"))]
    return any(isinstance(value, float) and value > 0 for value in inside)


def differ(s: Schedule, blocks: str, *split: str, seq: bool) -> None:
    """Make dropout differ between tp ranks: in whole blocks if the sequence is split, otherwise only in the split modules."""
    if not drops(s.model.config):
        return
    for glob in [blocks] if seq else split:
        s[glob].rng("tp")


def write_vocabulary(s: Schedule) -> None:
    """Split the word embeddings and the output layer along the vocabulary; tied ones together."""
    weights = {id(m.weight) for m in _vocabularies(s.model) if isinstance(m, (nn.Embedding, nn.Linear))}
    done = set()
    for path, module in s.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights and id(module) not in done:
            done.add(id(module))
            s[path].vocab_parallel()


def _vocabularies(model: Any) -> list[Any]:
    """Return the word embeddings and the output layer; for a model of several models (CLIP), those of each."""
    try:
        return [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:
        return [m for child in model.children() if hasattr(child, "get_input_embeddings") for m in _vocabularies(child)]
