"""Check that files of ZeRO stage 3 belong to the ranks in their names.

An optimizer's file does not contain its rank, all have the same shapes, and there are no other weights to compare them
with. Evidence:

    the arguments of the run, in the model states    their ``rank`` increases with the number of the file
    devices of the tensors (cuda:3)                  a rank's two files come from one process, and so from one device
    the end of a parameter that is split unevenly    is padding on the last ranks, which never gets a gradient: second moments of 0

Files exchanged with those of another host are not detected, unless a parameter is split unevenly: they leave no trace.
Source: deepspeed 0.19.8, runtime/zero/stage3.py :: partition_grads; Megatron-DeepSpeed, arguments.py (args.rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_sp.convert.formats.deepspeed_files import Files, Stored, Stretch, Stretches
from megatron_sp.convert.formats.deepspeed_states import Shapes, as_dict
from megatron_sp.convert.formats.rank_order import WAY_OUT, Written
from megatron_sp.utils.errors import CheckpointError


def written_by(files: Files, paths: Mapping[int, Mapping[int, Path]]) -> dict[tuple[int, int], Written]:
    """Return who wrote the model states, by model parallel rank and data parallel rank. Raises CheckpointError."""
    return {(mp, dp): _written(files, path) for mp, by_dp in paths.items() for dp, path in by_dp.items()}


def _written(files: Files, path: Path) -> Written:
    with files.glance(path) as file:
        return Written.of(path, as_dict(file.tree, str(path)))


def require_devices(files: Files, models: Mapping[int, Path], optimizers: Mapping[int, Path]) -> None:
    """Refuse an optimizer's file from another device than its rank's model states. Raises CheckpointError."""
    for dp in models.keys() & optimizers.keys():
        with files.glance(models[dp]) as file:
            of_model = file.devices
        of_optimizer = files.devices(optimizers[dp])
        if of_model and of_optimizer and not of_model & of_optimizer:
            raise CheckpointError(f"{optimizers[dp]} has tensors of {', '.join(sorted(of_optimizer))}, and {models[dp].name} of"
                                  f" {', '.join(sorted(of_model))}, which are one rank's by their names: {WAY_OUT}")  # fmt: skip


def require_padding(files: Files, squares: list[list[Stored]], shapes: Shapes) -> None:
    """Refuse files with moments where their rank has padding, if another rank's file would fit there.

    The second condition keeps files of unusual optimizers readable, which do update padding.

    Args:
        squares: the second moments of each data parallel rank, group by group.
    Raises:
        CheckpointError: the message names the two files.
    """
    count = len(squares)
    flats = [Stretches(files, {str(i): stored for i, stored in enumerate(groups)}) for groups in squares]
    for rank in range(count - 1, 0, -1):
        gaps = list(_padding(shapes, count, rank))
        if not gaps or _is_zero(flats[rank], gaps):
            continue
        for other in range(rank - 1, -1, -1):
            if _is_zero(flats[other], gaps):
                one, another = (squares[r][0].stretches[0].path for r in (rank, other))
                raise CheckpointError(f"{one} has moments where the data parallel rank {rank} of {count} has nothing but padding, and"
                                      f" {another.name} has none: {WAY_OUT}")  # fmt: skip


def _padding(shapes: Shapes, count: int, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (position, length) of the padding in the concatenated parts of a rank."""
    at = 0
    for shape in shapes.values():
        numel = torch.Size(shape).numel()
        part = -(-numel // count)
        real = max(0, min(part, numel - rank * part))
        if real < part:
            yield at + real, part - real
        at += part


def _is_zero(flats: Stretches, gaps: list[tuple[int, int]]) -> bool:
    """Return whether a rank's concatenated groups are zero at these positions."""
    first, rest = 0, iter(flats.stored.values())
    stored = next(rest)
    for position, length in gaps:
        at, end = position, position + length
        while at < end:
            while at >= first + stored.stretches[0].count:
                first += stored.stretches[0].count
                stored = next(rest)
            stretch = stored.stretches[0]
            take = min(end, first + stretch.count) - at
            if flats.piece(Stretch(stretch.path, stretch.record, at - first, take)).count_nonzero():
                return False
            at += take
    return True
