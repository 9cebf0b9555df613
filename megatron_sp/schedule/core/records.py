"""Tensors of a nested result, and the optional records of a transformers result: ``hidden_states`` and ``attentions``.

A rank's own result has shares of them: of positions (``hidden_states``, where the sequence is cut) or of heads
(``attentions``). ``Applied.complete`` makes them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from megatron_sp.utils.errors import ConfigError

HIDDEN = ("hidden_states", "encoder_hidden_states")
HEADS = ("attentions", "encoder_attentions")


def tensors_of(result: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a nested result, by path."""
    if isinstance(result, Tensor):
        return {prefix or "result": result}
    items: Any = (
        result.items() if isinstance(result, dict) else enumerate(result) if isinstance(result, (tuple, list)) else ()
    )
    if is_dataclass(result) and not isinstance(result, (dict, type)):
        items = ((place.name, getattr(result, place.name)) for place in fields(result))
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= tensors_of(value, f"{prefix}.{key}" if prefix else str(key))
    return found


@dataclass
class RegionLength:
    """Number of positions of this sp rank that entered the region cut over tp, in the last pass; 0: there is no such region."""

    positions: int = 0


def change_records(result: Any, names: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the tensors under these names of a transformers result; a plain tuple has no names and is left as it is."""
    for name in names_in(result, names):
        value = result[name]
        result[name] = (
            change(value)
            if isinstance(value, Tensor)
            else tuple(change(t) if isinstance(t, Tensor) else t for t in value)
        )


def names_in(result: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those of ``names`` that a result has."""
    if isinstance(result, dict):
        yield from (name for name in names if isinstance(result.get(name), (Tensor, tuple, list)))


def require_named(result: Any, is_share: Callable[[Tensor], bool]) -> None:
    """Raise ConfigError if a plain tuple (``return_dict=False``) holds shares, which only names distinguish from other records."""
    items = enumerate(result) if type(result) in (tuple, list) else ()
    for place, value in items:
        if not isinstance(value, (tuple, list)):
            continue
        found = next((t for t in value if isinstance(t, Tensor) and is_share(t)), None)
        if found is not None:
            raise ConfigError(
                f"result {place} is a plain tuple of records, of which this rank has shares ({list(found.shape)}), and no name"
                " tells what they are: call the model with return_dict=True, or without output_hidden_states and output_attentions"
            )
