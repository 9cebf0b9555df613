"""Division of a save among the ranks: every rank describes its rectangles, and all compute the same plan.

A rectangle that several ranks hold is written by the one of them with the fewest bytes so far, the largest first, so
that the work is balanced. This module also checks that the rectangles tile every tensor, before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_sp.checkpoint.pieces import GlobalTensor, Rect, tiling_problem
from megatron_sp.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, NamedPiece

Description = dict[str, list[Any]]  # name -> [dtype, shape, [[offsets, sizes], ...]]: as JSON


@dataclass(frozen=True)
class SavePlan:
    """Assignment of rectangles to the ranks that write them; the same on every rank."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype name, global shape)
    writer: dict[tuple[str, Rect], int]  # the rank that writes each rectangle
    rank_bytes: list[int]  # bytes of tensors each rank writes

    def items_of(self, rank: int, tensors: dict[str, GlobalTensor]) -> list[NamedPiece]:
        """Return the pieces that ``rank`` writes, out of those it holds."""
        items, seen = [], set()
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                key = (name, piece.rect)
                if piece.rect.numel and self.writer[key] == rank and key not in seen:
                    seen.add(key)
                    items.append(NamedPiece(name, tensor.shape, piece))
        return items


def describe(tensors: dict[str, GlobalTensor]) -> Description:
    """Return the description of this rank's rectangles.

    Raises:
        ValueError: a piece that does not fit its tensor, a dtype that safetensors does not support, or a reserved name.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}: a checkpoint can hold {', '.join(str(d) for d in DTYPE_NAMES)}")
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named __metadata__: safetensors uses that name itself")
        tensor.check(name)
    return {
        name: [DTYPE_NAMES[tensor.dtype], list(tensor.shape), [[list(r.offsets), list(r.sizes)] for r in tensor.rects()]]
        for name, tensor in tensors.items()
    }


def make_plan(descriptions: list[Description]) -> SavePlan:
    """Assign every rectangle to a rank.

    Args:
        descriptions: those of all ranks, in rank order.
    Raises:
        ValueError: ranks disagree on a dtype or shape, or the rectangles do not tile a tensor.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[str, dict[Rect, list[int]]] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, rects) in description.items():
            known = tensors.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise ValueError(f"{name} is {dtype} {shape} on rank {rank}, but {known[0]} {list(known[1])} on a lower rank")
            of_name = holders.setdefault(name, {})
            for offsets, sizes in rects:
                of_name.setdefault(Rect(tuple(offsets), tuple(sizes)), []).append(rank)
    for name, (_, shape) in tensors.items():
        if problem := tiling_problem(shape, holders[name].keys()):
            raise ValueError(f"{name} {list(shape)} cannot be saved: {problem}")
    return _assign(tensors, holders, len(descriptions))


def _assign(tensors: dict[str, tuple[str, tuple[int, ...]]], holders: dict[str, dict[Rect, list[int]]], world_size: int) -> SavePlan:
    writer: dict[tuple[str, Rect], int] = {}
    rank_bytes = [0] * world_size
    work = [
        (rect.numel * DTYPES[tensors[name][0]].itemsize, name, rect, ranks)
        for name, rects in holders.items()
        for rect, ranks in rects.items()
    ]
    for num_bytes, name, rect, ranks in sorted(work, key=lambda w: (len(w[3]) > 1, -w[0], w[1], w[2])):  # replicas last
        rank = min(ranks, key=lambda r: (rank_bytes[r], r))
        writer[name, rect] = rank
        rank_bytes[rank] += num_bytes
    return SavePlan(tensors, writer, rank_bytes)
