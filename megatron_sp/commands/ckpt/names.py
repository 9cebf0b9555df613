"""What the names of a checkpoint's tensors say: of a weight or of the optimizer, and of which module."""

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
    """(``weights`` or the kind of optimizer state, the weight's name)."""
    match = _OPTIMIZER.fullmatch(name)
    return (match[1], match[2]) if match else (WEIGHTS, name)


def weights_of(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Without the optimizer's."""
    return {name: value for name, value in tensors.items() if kind_of(name)[0] == WEIGHTS}


def num_elements(shape: Iterable[int]) -> int:
    return math.prod(shape)


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    return num_elements(shape) * ITEM_BYTES[dtype]


@dataclass
class Total:
    """Of some tensors."""

    tensors: int = 0
    elements: int = 0
    num_bytes: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.tensors += 1
        self.elements += num_elements(shape)
        self.num_bytes += num_bytes(dtype, shape)


def by_kind(tensors: Tensors) -> dict[tuple[str, str], Total]:
    """(kind, dtype) -> total, weights first."""
    totals: dict[tuple[str, str], Total] = {}
    for name, (dtype, shape) in tensors.items():
        totals.setdefault((kind_of(name)[0], dtype), Total()).add(dtype, shape)
    return dict(sorted(totals.items(), key=lambda item: (item[0][0] != WEIGHTS, item[0])))


def by_module(tensors: Tensors) -> dict[str, Total]:
    """Of the weights: module -> total; the same module of all layers is one, its number a star."""
    totals: dict[str, Total] = {}
    for name, (dtype, shape) in sorted(weights_of(tensors).items()):
        module = _LAYER.sub(".*", name).rpartition(".")[0] or name
        totals.setdefault(module, Total()).add(dtype, shape)
    return totals


def matching(tensors: Tensors, pattern: str) -> list[str]:
    """Names that are the pattern, or match it as a shell's does.

    Raises:
        CheckpointError: there is none; with the nearest names.
    """
    found = [name for name in sorted(tensors) if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, list(tensors), n=3, cutoff=0.4) or sorted(tensors)[:3]
        raise CheckpointError(f"no tensor matches {pattern!r}; nearest: {', '.join(near) or 'there is none at all'}")
    return found
