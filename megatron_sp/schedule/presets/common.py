"""What the families share: where the blocks are, which collectives stand around a split, vocabularies, dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


class Around(NamedTuple):
    """The collectives around what is split by columns and then by rows.

    Attributes:
        enter: for ``sync("fwd_pre", ...)`` where it begins.
        leave: for ``row(...)`` where it ends.
    """

    enter: str
    leave: str


class Blocks(NamedTuple):
    """What a preset says of its model beside the lines.

    Attributes:
        glob: of the blocks.
        first: the block in front of which activations are cut, where they are.
        last: the module behind which they are whole again: the norm behind the blocks, or the last of them.
    """

    glob: str
    first: str
    last: str


def around(seq: bool) -> Around:
    """With activations between the layers cut along the sequence, or whole on every rank."""
    return Around("all_gather", "reduce_scatter") if seq else Around("copy", "all_reduce")


def config_of(s: Schedule) -> Any:
    """The model's configuration. Raises ConfigError: it attends to another model's output, which no preset covers."""
    config: Any = s.model.config
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            f"{type(s.model).__name__} has cross attention (add_cross_attention), which the preset of {config.model_type} does not cover:"
            " write its lines with schedule(model, mesh)"
        )
    return config


def base_of(s: Schedule) -> str:
    """What stands before the names of the base model's modules: "model." in a model with a head, "" in the base model itself."""
    prefix = getattr(s.model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(s.model, prefix, None), nn.Module) else ""


def module_or_none(s: Schedule, path: str) -> nn.Module | None:
    """The module there, if there is one."""
    try:
        return s.model.get_submodule(path)
    except AttributeError:
        return None


def share_key_values(s: Schedule, attention: str, queries: int, key_values: int) -> None:
    """Where there are fewer key/value heads than ranks: each rank's queries go with one of them."""
    size = s.mesh.tp.size()
    if key_values < size and size % key_values == 0:
        s[attention].set("num_key_value_groups", queries // size)


def drops(config: Any) -> bool:
    """Whether there is any dropout in the blocks."""
    inside = [value for name, value in config.to_dict().items() if "drop" in name and not name.startswith(("summary_", "classifier_"))]
    return any(isinstance(value, float) and value > 0 for value in inside)


def differ(s: Schedule, blocks: str, *split: str, seq: bool) -> None:
    """Dropout: ranks differ in whole blocks, of which each has some positions, or only in what is split."""
    if not drops(s.model.config):
        return
    for glob in [blocks] if seq else split:
        s[glob].rng("tp")


def write_vocabulary(s: Schedule) -> None:
    """Split word embeddings, and the layer that gives logits, by words; tied ones together."""
    weights = {id(m.weight) for m in _vocabularies(s.model) if isinstance(m, (nn.Embedding, nn.Linear))}
    done = set()
    for path, module in s.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights and id(module) not in done:
            done.add(id(module))
            s[path].vocab_parallel()


def _vocabularies(model: Any) -> list[Any]:
    """The word embeddings and the layer that gives logits; of a model of several (CLIP), those of each."""
    try:
        return [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:
        return [m for child in model.children() if hasattr(child, "get_input_embeddings") for m in _vocabularies(child)]
