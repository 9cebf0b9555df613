"""A rank's part of a tensor, as rectangles of the global tensor.

A ZeRO range of a parameter that tensor parallelism splits along dim 1 is up to three rectangles; gate|up and replicated
key/value rows are several. Whatever the layout, a checkpoint sees only ``(offsets, sizes)`` in the global tensor, so
any layout can read what any other wrote. A rectangle that several ranks hold in full is a replica and is written once;
the distinct rectangles must tile the tensor exactly: every element in one rectangle, none in two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_sp.comm.shard_spec import ShardSpec

_MAX_CELLS = 1 << 24  # cells of the grid on which a tiling is checked; a real layout needs some ten thousand


class Rect(NamedTuple):
    """A rectangle of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


class Piece(NamedTuple):
    """A rectangle of a global tensor together with its contents."""

    offsets: tuple[int, ...]  # where the rectangle starts
    tensor: Tensor  # its contents, contiguous or not, on any device

    @property
    def rect(self) -> Rect:
        """Place of the tensor in the global one."""
        return Rect(tuple(self.offsets), tuple(self.tensor.shape))


@dataclass
class GlobalTensor:
    """A rank's part of one tensor; the pieces of all ranks together tile it (ranks may hold the same piece)."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype  # stored when saving; wanted when loading
    pieces: list[Piece]

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """Describe a tensor that this rank holds in full."""
        return cls(tuple(tensor.shape), tensor.dtype, [Piece((0,) * tensor.dim(), tensor)])

    @classmethod
    def of_shard(cls, spec: ShardSpec, local: Tensor) -> GlobalTensor:
        """Describe this rank's part of a parameter, or of a tensor placed like it."""
        return cls(spec.shape, local.dtype, [Piece(offsets, view) for offsets, view in spec.pieces(local)])

    @classmethod
    def of_range(cls, spec: ShardSpec, shape: tuple[int, ...], flat: Tensor, start: int) -> GlobalTensor:
        """Describe a contiguous range of this rank's part of a parameter (ZeRO), or of a tensor placed like it.

        Args:
            spec: placement of the part.
            shape: shape of the part, with padding.
            flat: its elements from ``start`` on, in row-major order.
        """
        pieces, at = [], 0
        for local in rectangles(shape, start, start + flat.numel()):
            block, at = flat[at : at + local.numel].view(local.sizes), at + local.numel
            pieces += [Piece(offsets, view) for offsets, view in spec.pieces_of(local.offsets, block)]
        return cls(spec.shape, flat.dtype, pieces)

    def rects(self) -> list[Rect]:
        """Return this rank's rectangles, in the order of ``pieces``, without empty ones."""
        return [piece.rect for piece in self.pieces if piece.rect.numel]

    def check(self, name: str) -> None:
        """Reject pieces of another dtype or number of dims, or outside the tensor.

        Raises:
            ValueError: a piece does not fit; the message names it and the tensor.
        """
        for piece in self.pieces:
            problem = outside(self.shape, piece.rect)
            if problem is None and piece.tensor.dtype != self.dtype:
                problem = f"its dtype is {piece.tensor.dtype}, the tensor's {self.dtype}"
            if problem is not None:
                raise ValueError(
                    f"{name} {list(self.shape)}: piece {list(piece.rect.sizes)} at {list(piece.rect.offsets)}: {problem}"
                )


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rect]:
    """Return the rectangles that make up elements [start, stop) of a tensor in row-major order, in that order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Rect((start,) if shape else (), (stop - start,) if shape else ())
        return
    row_size = math.prod(shape[1:])
    row, column = divmod(start, row_size)
    if column:
        end = min(stop, (row + 1) * row_size)
        yield from (Rect((row, *r.offsets), (1, *r.sizes)) for r in rectangles(shape[1:], column, end - row * row_size))
        start, row = end, row + 1
    rows = (stop - start) // row_size
    if rows > 0:
        yield Rect((row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        start, row = start + rows * row_size, row + rows
    yield from (Rect((row, *r.offsets), (1, *r.sizes)) for r in rectangles(shape[1:], 0, stop - start))


def outside(shape: tuple[int, ...], rect: Rect) -> str | None:
    """Return why the rectangle does not fit in a tensor of that shape; None if it does."""
    if len(rect.offsets) != len(shape) or len(rect.sizes) != len(shape):
        return f"it has {len(rect.sizes)} sizes and {len(rect.offsets)} offsets, the tensor {len(shape)} dims"
    if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(rect.offsets, rect.sizes, shape, strict=True)):
        return "it reaches outside the tensor"
    return None


def tiling_problem(shape: tuple[int, ...], rects: Collection[Rect]) -> str | None:
    """Return why the rectangles do not cover every element of the tensor exactly once; None if they do.

    The edges of all rectangles divide the tensor into a (small) grid of cells; each rectangle is painted onto that
    grid, and every cell must be painted exactly once. Empty rectangles are ignored.
    """
    rects = [rect for rect in rects if rect.numel]
    for rect in rects:
        if problem := outside(shape, rect):
            return f"piece {list(rect.sizes)} at {list(rect.offsets)}: {problem}"
    volume, total = sum(rect.numel for rect in rects), math.prod(shape)
    if volume != total:
        return f"its pieces hold {volume:,} elements in total, the tensor has {total:,}"
    if len(rects) <= 1:
        return None  # inside the tensor and as large as it
    edges = [np.unique([[r.offsets[dim], r.offsets[dim] + r.sizes[dim]] for r in rects]) for dim in range(len(shape))]
    if math.prod(len(e) for e in edges) > _MAX_CELLS:
        return f"its {len(rects):,} pieces cut it in too many places to check"
    painted = np.zeros(
        [len(e) - 1 for e in edges], dtype=np.uint8
    )  # cannot wrap round to 1: the volume above would not fit
    starts, ends = (
        [
            np.searchsorted(edges[dim], [r.offsets[dim] + (r.sizes[dim] if end else 0) for r in rects])
            for dim in range(len(shape))
        ]
        for end in (False, True)
    )
    for index, rect in enumerate(rects):
        cells = tuple(slice(starts[dim][index], ends[dim][index]) for dim in range(len(shape)))
        if painted[cells].any():
            return f"piece {list(rect.sizes)} at {list(rect.offsets)} overlaps another"
        painted[cells] = 1
    return None  # as many elements as the tensor, no overlap: complete
