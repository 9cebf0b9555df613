"""Placement of a rank's part of a parameter in the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Sum(NamedTuple):
    """Local rows whose gradient is summed over the tp ranks that hold the same rows."""

    start: int
    length: int
    slot: int  # index of this set of rows among the ``num_slots`` different ones of the tp group
    num_slots: int


@dataclass(frozen=True)
class ShardSpec:
    """A parameter's place on one tp rank: contiguous runs along one dim."""

    # one run for a plain split, two for gate|up, or for own queries next to a key/value head that several ranks hold
    shape: tuple[int, ...]  # of the whole parameter, as in a checkpoint (without padding rows)
    dim: int  # that is split
    runs: tuple[tuple[int, int], ...]  # (start in the whole, length), in local order; local rows after them are padding
    sums: tuple[Sum, ...] = ()  # rows whose gradients must be summed
    # (local start, length) of rows that this rank adds to the gradient norm: each element of the whole on just one rank
    counted: tuple[tuple[int, int], ...] = ()
    stacked: int = 0  # leading dims that number parameters of their own, such as those of experts

    @classmethod
    def whole(cls, shape: tuple[int, ...], tp_rank: int, tp_size: int, *, summed: bool = False) -> ShardSpec:
        # a parameter that all ranks hold; ``summed``: each uses it on a share of positions or heads
        rows = shape[0] if shape else 1
        all_rows = ((0, rows),)
        sums = (Sum(0, rows, 0, 1),) if summed and tp_size > 1 else ()
        return cls(tuple(shape), 0, all_rows, sums, all_rows if tp_rank == 0 else ())

    @classmethod
    def split(cls, shape: tuple[int, ...], dim: int, runs: tuple[tuple[int, int], ...]) -> ShardSpec:
        # a parameter of which every rank holds other rows
        kept = tuple((start, length) for start, length in runs if length > 0)
        return cls(tuple(shape), dim, kept, (), ((0, sum(length for _, length in kept)),))

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part, without padding; a view if it is one run."""
        assert tuple(whole.shape) == self.shape, f"{tuple(whole.shape)} is not {self.shape}"
        if not self.shape:
            return whole
        parts = [whole.narrow(self.dim, start, length) for start, length in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim) if parts else whole.narrow(self.dim, 0, 0)

    def pieces(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield (offsets in the whole, view of ``local``) for each run."""
        if not self.shape:
            yield (), local
            return
        at = 0
        for start, length in self.runs:
            offsets = [0] * len(self.shape)
            offsets[self.dim] = start
            yield tuple(offsets), local.narrow(self.dim, at, length)
            at += length

    def pieces_of(self, offsets: tuple[int, ...], block: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        # the same for the runs of ``block``, a rectangle at ``offsets`` in the local part
        if not self.shape:
            yield (), block
            return
        at, dim = 0, self.dim
        begin, end = offsets[dim], offsets[dim] + block.shape[dim]
        for start, length in self.runs:
            low, high = max(begin, at), min(end, at + length)
            if low < high:
                place = (*offsets[:dim], start + low - at, *offsets[dim + 1 :])
                yield place, block.narrow(dim, low - begin, high - low)
            at += length
