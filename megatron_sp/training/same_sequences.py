"""Comparison of the masks that ranks which share sequences have read: a cp rank plans by its own what others send to it.

Ranks with different masks would wait for rows that nobody sends, or compute with the wrong ones; so would stages of a pipeline
with different lengths or documents. So with several cp or pp ranks each step begins with a comparison of a few bytes on
the host; the device is not waited for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.utils.errors import DataError

_READ_BY_THE_HOST = ("documents", "length")
_NOBODY = -(2**62)


def require_same_sequences(micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> None:
    """Check that all ranks of each data-parallel replica have sequences of the same length, documents and padding. Collective.

    With one cp and one pp rank nothing is planned, and nothing compared.

    Raises:
        DataError: they have not; on every rank.
    """
    if groups.cp.size() == groups.pp.size() == 1:
        return
    digest = hashlib.sha256()
    for batch in micro_batches:
        digest.update(str(tuple(batch["tokens"].shape)).encode())
        for name in _READ_BY_THE_HOST:
            digest.update(f"{name}: ".encode() + (batch[name].cpu().numpy().tobytes() if name in batch else b"none"))
    mine = int.from_bytes(digest.digest()[:7], "little")
    found = torch.full((groups.dp_size, 2), _NOBODY, dtype=torch.int64)
    found[groups.dp_rank] = torch.tensor([mine, -mine])  # largest, and smallest with another sign
    all_reduce(found, groups.control, "max")
    differ = [replica for replica, (largest, smallest) in enumerate(found.tolist()) if largest != -smallest and largest != _NOBODY]
    if differ:
        ranks, pipelined = groups.cp.size() * groups.sp.size() * groups.tp.size(), groups.pp.size() > 1
        firsts = [(stage * groups.dp_size + differ[0]) * ranks for stage in range(groups.pp.size())]
        which = ", ".join(f"{first} to {first + ranks - 1}" if ranks > 1 else f"{first}" for first in firsts)
        sizes = f"{f'pp {groups.pp.size()} * ' if pipelined else ''}cp {groups.cp.size()} * sp {groups.sp.size()} * tp {groups.tp.size()}"
        raise DataError(
            f"ranks {which} ({sizes} = {groups.pp.size() * ranks}) share each sequence, and have read sequences of different lengths or"
            " documents: see that all hosts have the same data files and flags"
        )
