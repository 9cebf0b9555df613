"""Slices of a row of positions, which go through a pipeline one after another, and the keys and values that they leave for those to come.

    slice 0    queries 0 .. a     keys 0 .. a
    slice 1    queries a .. b     keys 0 .. b      those of slice 0 are there
    ...
    backward: the last slice first; what it finds for the keys of earlier slices is added up, and each slice takes its sum

Attention of a slice is that of context parallelism with more keys than queries (``context_plan.py``, ``context_parallel.py``): a
rank's own are those of its earlier slices, too, and to others it sends what their queries see of all of them.

Slices are not of the same length: a late query sees more keys than an early one, and a slice that takes longer than the
others holds up the pipeline. So they are cut to take the same time.

Sources: Seq1F1B (arXiv:2406.03488), which cuts by work as here; SlimPipe (arXiv:2504.14519) keeps slices equal, and sends
attention's surplus to ranks that wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.parallel.context_plan import areas_before
from megatron_sp.parallel.row_mask import RowMask, Run


class KeysOfSlices:
    """Keys and values of the slices of a micro-batch so far, for each layer, and the gradients that later slices have found for them."""

    def __init__(self) -> None:
        self._layers: dict[Hashable, LayerKeys] = {}

    def of(self, layer: Hashable) -> LayerKeys:
        """Return those of a layer, or of some of its heads."""
        return self._layers.setdefault(layer, LayerKeys())


class LayerKeys:
    """Keys and values of the slices of a row so far, of this rank's positions."""

    def __init__(self) -> None:
        self._slices: dict[int, Tensor] = {}
        self._grad: Tensor | None = None

    def add(self, index: int, kv: Tensor) -> Tensor:
        """Add those of a slice; return ``so_far``. A second time changes nothing."""
        self._slices.setdefault(index, kv)
        return self.so_far(index)

    def so_far(self, index: int) -> Tensor:
        """Return those of the slices up to this one, in order."""
        if index == 0:
            return self._slices[0]
        parts = [self._slices[number] for number in range(index + 1)]
        whole = empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device=parts[0].device)
        return torch.cat(parts, out=whole)

    def gradient(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return where a slice adds to the gradients of ``so_far(index)``; zeros but for what later slices have added."""
        rows = sum(self._slices[number].shape[0] for number in range(index + 1))
        if self._grad is None:
            like = self._slices[0]
            self._grad = empty((rows, *like.shape[1:]), dtype=dtype, device=like.device).zero_()
        return self._grad[:rows]

    def take_gradient(self, index: int) -> Tensor:
        """Return the gradient of a slice's own keys and values, which no other slice adds to any more, and forget the slice."""
        assert self._grad is not None, "no slice has added anything"
        own = self._slices.pop(index).shape[0]
        rows = sum(kv.shape[0] for kv in self._slices.values())
        mine = self._grad[rows : rows + own]
        if index == 0:
            self._grad = None
        return mine


class SliceKeys(NamedTuple):
    """The keys and values of a layer as the attention of one slice sees them."""

    number: int
    layer: LayerKeys

    def add(self, kv: Tensor) -> Tensor:
        """Add the slice's own, [L, m, d + d_v]; return those of all slices so far. In a recomputation they are there already."""
        return self.layer.add(self.number, kv)

    def so_far(self) -> Tensor:
        """Return those of all slices so far, [rows, m, d + d_v]."""
        return self.layer.so_far(self.number)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return where to add to their gradients, [rows, m, d + d_v]."""
        return self.layer.gradient(self.number, dtype)

    def take_gradient(self) -> Tensor:
        """Return the gradient of the slice's own, complete, and forget the slice."""
        return self.layer.take_gradient(self.number)


class RowSlice(NamedTuple):
    """The slice of a row that a pass computes."""

    number: int
    runs: tuple[Run, ...]  # all slices of the row
    keys: KeysOfSlices

    def of(self, layer: Hashable) -> SliceKeys:
        """Return the keys of a layer, or of some of its heads."""
        return SliceKeys(self.number, self.keys.of(layer))


@lru_cache(maxsize=64)
def cut_into_slices(mask: RowMask, num_slices: int, pairs_per_position: float) -> tuple[Run, ...]:
    """Return slices of a row that take the same time, each of one position at least.

    Args:
        mask: causal; of the row.
        pairs_per_position: time of all that is not attention at one position of a sequence, in that of a pair of a
            query and a key.
    Raises:
        ValueError: there are fewer positions than slices, or the mask lets queries see later keys.
    """
    s = mask.length
    if not mask.causal:
        raise ValueError(
            "slices of a row go through a pipeline one after another, and queries of this mask see keys of later slices"
        )
    if not 1 <= num_slices <= s:
        raise ValueError(f"a row of {s} positions cannot be cut into {num_slices} slices: at least one position each")
    area = areas_before(mask)

    def time_before(position: int) -> float:
        return area(position) + pairs_per_position * mask.sequences * position

    ends, total = [0], time_before(s)
    for number in range(1, num_slices):
        low, high = ends[-1] + 1, s - (num_slices - number)
        goal = total * number / num_slices
        first, last = low, high
        while first < last:  # the first position with as much before it
            middle = (first + last) // 2
            first, last = (first, middle) if time_before(middle) >= goal else (middle + 1, last)
        if first > low and goal - time_before(first - 1) < time_before(first) - goal:
            first -= 1
        ends.append(first)
    return tuple(zip(ends, (*ends[1:], s), strict=True))
