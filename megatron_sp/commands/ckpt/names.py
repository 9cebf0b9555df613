"""Classification of a checkpoint's tensors by name: weight or optimizer state, and module."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_sp.checkpoint.file_records import ITEM_BYTES
from megatron_sp.utils.errors import CheckpointError

WEIGHTS = "weights"
_OPTIMIZER = re.compile(r"optimizer\.([a-z_]+)\.(.+)")
_LAYER = re.compile(r"\.[0-9]+(?=\.)")

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # as in a manifest: name -> (dtype, shape)


def kind_of(name: str) -> tuple[str, str]:
    """Return (``weights`` or the kind of optimizer state, name of the weight)."""
    match = _OPTIMIZER.fullmatch(name)
    return (match[1], match[2]) if match else (WEIGHTS, name)


def weights_of(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the weights, without the optimizer's tensors."""
    return {name: value for name, value in tensors.items() if kind_of(name)[0] == WEIGHTS}


def num_elements(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Size of a tensor in bytes."""
    return num_elements(shape) * ITEM_BYTES[dtype]


@dataclass
class Total:
    """Number, elements and bytes of a set of tensors."""

    tensors: int = 0
    elements: int = 0
    num_bytes: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Count a tensor."""
        self.tensors += 1
        self.elements += num_elements(shape)
        self.num_bytes += num_bytes(dtype, shape)


def by_kind(tensors: Tensors) -> dict[tuple[str, str], Total]:
    """Return (kind, dtype) -> total, weights first."""
    totals: dict[tuple[str, str], Total] = {}
    for name, (dtype, shape) in tensors.items():
        totals.setdefault((kind_of(name)[0], dtype), Total()).add(dtype, shape)
    return dict(sorted(totals.items(), key=lambda item: (item[0][0] != WEIGHTS, item[0])))


def by_module(tensors: Tensors) -> dict[str, Total]:
    """Return module -> total for the weights; the same module of all layers is one entry, with ``*`` for the layer's number."""
    totals: dict[str, Total] = {}
    for name, (dtype, shape) in sorted(weights_of(tensors).items()):
        module = _LAYER.sub(".*", name).rpartition(".")[0] or name
        totals.setdefault(module, Total()).add(dtype, shape)
    return totals


def matching(tensors: Tensors, pattern: str) -> list[str]:
    """Return the names that equal the pattern or match it as a shell pattern.

    Raises:
        CheckpointError: no name matches; the message lists the nearest names.
    """
    found = [name for name in sorted(tensors) if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, list(tensors), n=3, cutoff=0.4) or sorted(tensors)[:3]
        raise CheckpointError(f"no tensor matches {pattern!r}; nearest: {', '.join(near) or 'it has no tensors at all'}")
    return found
