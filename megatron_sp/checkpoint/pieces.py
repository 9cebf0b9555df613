"""A rank's part of a tensor, as rectangles of the global tensor, and who of the ranks writes which rectangle.

Files know only ``(offsets, sizes)``, so any layout can read what any other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_sp.comm.shard_spec import ShardSpec

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_CELLS = 1 << 24  # cells of the grid on which a tiling is checked; a real layout needs some ten thousand

Description = dict[str, list[Any]]  # name -> [dtype, shape, [[offsets, sizes], ...]]: as JSON


class Rect(NamedTuple):
    """A rectangle of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return f"{list(self.sizes)} at {list(self.offsets)}"


class Piece(NamedTuple):
    """A rectangle with its contents."""

    offsets: tuple[int, ...]  # where the rectangle starts
    tensor: Tensor  # its contents, contiguous or not, on any device

    @property
    def rect(self) -> Rect:
        return Rect(tuple(self.offsets), tuple(self.tensor.shape))


class NamedPiece(NamedTuple):
    name: str
    shape: tuple[int, ...]  # of the global tensor
    piece: Piece

    @property
    def num_bytes(self) -> int:
        return self.piece.tensor.numel() * self.piece.tensor.element_size()


@dataclass
class GlobalTensor:
    """A rank's part of one tensor; the pieces of all ranks together tile it."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype  # stored when saving; wanted when loading
    pieces: list[Piece]

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        return cls(tuple(tensor.shape), tensor.dtype, [Piece((0,) * tensor.dim(), tensor)])

    @classmethod
    def of_shard(cls, spec: ShardSpec, local: Tensor) -> GlobalTensor:
        """Describe this rank's part of a parameter."""
        return cls(spec.shape, local.dtype, [Piece(offsets, view) for offsets, view in spec.pieces(local)])

    @classmethod
    def of_range(cls, spec: ShardSpec, shape: tuple[int, ...], flat: Tensor, start: int) -> GlobalTensor:
        """Describe a ZeRO range of this rank's part (of ``shape``, with padding): its elements from ``start`` on."""
        # where tensor parallelism splits along dim 1, a range is up to three rectangles; gate | up and replicated
        # key/value rows are several
        pieces, position = [], 0
        for local in _rectangles(shape, start, start + flat.numel()):
            block = flat[position : position + local.numel].view(local.sizes)
            position += local.numel
            pieces += [Piece(offsets, view) for offsets, view in spec.pieces_of(local.offsets, block)]
        return cls(spec.shape, flat.dtype, pieces)

    def check(self, name: str) -> None:
        """Raise ValueError if a piece has another dtype or lies outside."""
        for piece in self.pieces:
            problem = _outside(self.shape, piece.rect)
            if problem is None and piece.tensor.dtype != self.dtype:
                problem = f"its dtype is {piece.tensor.dtype}, the tensor's {self.dtype}"
            if problem is not None:
                raise ValueError(f"{name} {list(self.shape)}: piece {piece.rect}: {problem}")


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rect]:
    # the rectangles that make up elements [start, stop) of a tensor in row-major order: the rest of a first row, whole
    # rows, the beginning of a last one; rows themselves are split likewise
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Rect((start,) if shape else (), (stop - start,) if shape else ())
        return
    row_size = math.prod(shape[1:])
    row, column = divmod(start, row_size)
    if column:
        end = min(stop, (row + 1) * row_size)
        yield from (
            Rect((row, *r.offsets), (1, *r.sizes)) for r in _rectangles(shape[1:], column, end - row * row_size)
        )
        start, row = end, row + 1
    rows = (stop - start) // row_size
    if rows > 0:
        yield Rect((row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        start, row = start + rows * row_size, row + rows
    yield from (Rect((row, *r.offsets), (1, *r.sizes)) for r in _rectangles(shape[1:], 0, stop - start))


def _outside(shape: tuple[int, ...], rect: Rect) -> str | None:
    if len(rect.offsets) != len(shape) or len(rect.sizes) != len(shape):
        return f"it has {len(rect.sizes)} sizes and {len(rect.offsets)} offsets, the tensor {len(shape)} dims"
    if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(rect.offsets, rect.sizes, shape, strict=True)):
        return "it reaches outside the tensor"
    return None


def tiling_problem(shape: tuple[int, ...], rects: Collection[Rect]) -> str | None:
    """Return why the rectangles, but for empty ones, do not cover every element exactly once; None if they do."""
    rects = [rect for rect in rects if rect.numel]
    for rect in rects:
        if problem := _outside(shape, rect):
            return f"piece {rect}: {problem}"
    volume, total = sum(rect.numel for rect in rects), math.prod(shape)
    if volume != total:
        return f"its pieces hold {volume:,} elements in total, the tensor has {total:,}"
    if len(rects) <= 1:
        return None  # inside the tensor and as large as it
    # the edges of all rectangles divide the tensor into a small grid of cells; each rectangle is painted onto it
    starts = np.array([rect.offsets for rect in rects])  # [rectangles, dims]
    ends = starts + np.array([rect.sizes for rect in rects])
    edges = [np.unique([starts[:, dim], ends[:, dim]]) for dim in range(len(shape))]
    if math.prod(len(e) for e in edges) > _MAX_CELLS:
        return f"its {len(rects):,} pieces cut it in too many places to check"
    firsts = [np.searchsorted(edge, starts[:, dim]) for dim, edge in enumerate(edges)]
    lasts = [np.searchsorted(edge, ends[:, dim]) for dim, edge in enumerate(edges)]
    painted = np.zeros([len(edge) - 1 for edge in edges], dtype=np.bool_)
    for index, rect in enumerate(rects):
        cells = tuple(slice(first[index], last[index]) for first, last in zip(firsts, lasts, strict=True))
        if painted[cells].any():
            return f"piece {rect} overlaps another"
        painted[cells] = True
    return None  # as many elements as the tensor, no overlap: complete


@dataclass(frozen=True)
class SavePlan:
    """Assignment of rectangles to the ranks that write them; the same on every rank."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype name, global shape)
    writer: dict[tuple[str, Rect], int]  # the rank that writes each rectangle
    rank_bytes: list[int]  # bytes of tensors each rank writes

    def items_of(self, rank: int, tensors: dict[str, GlobalTensor]) -> list[NamedPiece]:
        # each once, even if the rank holds it twice
        items: dict[tuple[str, Rect], NamedPiece] = {}
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                if piece.rect.numel and self.writer[name, piece.rect] == rank:
                    items.setdefault((name, piece.rect), NamedPiece(name, tensor.shape, piece))
        return list(items.values())


def describe(tensors: dict[str, GlobalTensor]) -> Description:
    """Return the description of this rank's rectangles. Raises ValueError for what a checkpoint cannot hold."""
    description: Description = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            dtypes = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
            raise ValueError(f"{name} is {tensor.dtype}: a checkpoint can hold {dtypes}")
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named __metadata__: safetensors uses that name itself")
        tensor.check(name)
        rects = [
            [list(rect.offsets), list(rect.sizes)] for rect in (piece.rect for piece in tensor.pieces) if rect.numel
        ]
        description[name] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape), rects]
    return description


def make_plan(descriptions: list[Description]) -> SavePlan:
    """Assign every rectangle to one of the ranks that hold it. Raises ValueError if they do not tile their tensors."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[str, Rect], list[int]] = {}
    rects_of: dict[str, dict[Rect, None]] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, rects) in description.items():
            known = tensors.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                lower = f"{known[0]} {list(known[1])}"
                raise ValueError(f"{name} is {dtype} {shape} on rank {rank}, but {lower} on a lower rank")
            for offsets, sizes in rects:
                rect = Rect(tuple(offsets), tuple(sizes))
                holders.setdefault((name, rect), []).append(rank)
                rects_of.setdefault(name, {})[rect] = None
    for name, (_, shape) in tensors.items():
        if problem := tiling_problem(shape, rects_of.get(name, {})):
            raise ValueError(f"{name} {list(shape)} cannot be saved: {problem}")
    writer: dict[tuple[str, Rect], int] = {}
    rank_bytes = [0] * len(descriptions)
    work = [
        (rect.numel * DTYPES[tensors[name][0]].itemsize, name, rect, ranks) for (name, rect), ranks in holders.items()
    ]
    # the largest first, replicas last: they can go to whichever of their ranks has the fewest bytes by then
    for num_bytes, name, rect, ranks in sorted(work, key=lambda w: (len(w[3]) > 1, -w[0], w[1], w[2])):
        rank = min(ranks, key=lambda r: (rank_bytes[r], r))
        writer[name, rect] = rank
        rank_bytes[rank] += num_bytes
    return SavePlan(tensors, writer, rank_bytes)
