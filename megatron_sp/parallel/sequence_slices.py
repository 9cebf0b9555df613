"""Slices of a row, which go through a pipeline one after another."""

#     slice 0    queries 0 .. a     keys 0 .. a
#     slice 1    queries a .. b     keys 0 .. b      those of slice 0 are there
#     ...
#     backward: the last slice first; what it finds for earlier slices' keys is added up, and each slice takes its sum
#
# Attention of a slice is that of context parallelism with more keys than queries (``context_plan.py``): a rank's own
# are those of its earlier slices, too, and to others it sends what their queries see of all of them.
#
# A late query sees more keys than an early one, and a slice that takes longer than the others holds up the pipeline. So
# they are not of the same length, but cut to take the same time.
#
# Sources: Seq1F1B (arXiv:2406.03488), which cuts by work as here; SlimPipe (arXiv:2504.14519) keeps slices equal, and
# sends attention's surplus to ranks that wait.

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.parallel.context_plan import areas_before
from megatron_sp.parallel.row_mask import RowMask, Run


class LayerKeys:
    # keys and values of the slices of a row so far, of one layer or some of its heads

    def __init__(self) -> None:
        self.slices: dict[int, Tensor] = {}  # [L, m, d + d_v] by number of the slice
        self.grad: Tensor | None = None  # of all slices that are left, with what later ones have added


class KeysOfSlices(dict[Hashable, LayerKeys]):
    """Keys and values of the slices of a micro-batch so far, by layer."""

    def __missing__(self, layer: Hashable) -> LayerKeys:
        self[layer] = keys = LayerKeys()
        return keys


class SliceKeys(NamedTuple):
    """Keys and values of a layer as one slice sees them."""

    number: int
    layer: LayerKeys

    def add(self, kv: Tensor) -> Tensor:  # the slice's own; a recomputation, which adds them again, changes nothing
        self.layer.slices.setdefault(self.number, kv)
        return self.so_far()

    def so_far(self) -> Tensor:  # [rows, m, d + d_v], of the slices up to this one
        if self.number == 0:
            return self.layer.slices[0]
        parts = [self.layer.slices[number] for number in range(self.number + 1)]
        like = parts[0]
        out = empty((sum(map(len, parts)), *like.shape[1:]), dtype=like.dtype, device=like.device)
        return torch.cat(parts, out=out)

    def gradient(self, dtype: torch.dtype) -> Tensor:  # where to add to that of ``so_far``
        layer = self.layer
        rows = sum(layer.slices[number].shape[0] for number in range(self.number + 1))
        if layer.grad is None:
            like = layer.slices[0]
            layer.grad = empty((rows, *like.shape[1:]), dtype=dtype, device=like.device).zero_()
        return layer.grad[:rows]

    def take_gradient(self) -> Tensor:  # that of the slice's own, complete; the slice is forgotten
        layer = self.layer
        assert layer.grad is not None, "no slice has added anything"
        num_own = layer.slices.pop(self.number).shape[0]
        rows = sum(kv.shape[0] for kv in layer.slices.values())
        own = layer.grad[rows : rows + num_own]
        if self.number == 0:
            layer.grad = None
        return own


class RowSlice(NamedTuple):
    """Slice of a row that a pass computes."""

    number: int
    runs: tuple[Run, ...]  # all slices of the row
    keys: KeysOfSlices

    def of(self, layer: Hashable) -> SliceKeys:
        return SliceKeys(self.number, self.keys[layer])


# pairs_per_position: time of all but attention at a position of a sequence, in that of a pair of a query and a key
@lru_cache(maxsize=64)
def cut_into_slices(mask: RowMask, num_slices: int, pairs_per_position: float) -> tuple[Run, ...]:
    """Return slices of a row that take the same time; ValueError: too few positions, or not causal."""
    s = mask.length
    if not mask.causal:
        text = "slices of a row go through a pipeline one after another"
        raise ValueError(f"{text}, and queries of this mask see keys of later slices")
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
