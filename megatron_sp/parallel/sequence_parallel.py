"""The groups over which a sequence is split: sp, of Ulysses, and cp, of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_sp.comm.collectives import all_reduce_async
from megatron_sp.parallel.all_to_all import AllToAllGroup


@dataclass(frozen=True)
class SequenceParallel(AllToAllGroup):
    """The sp group, over which each sequence, or each cp rank's share of it, is split."""

    def all_reduce(self, x: Tensor) -> Tensor:  # in place
        if self.size == 1:
            return x
        flight = None
        if self.recorder is not None:
            flight = self.recorder.start("all_reduce", (x.numel(),), (x.numel(),), x.dtype, "norm statistics")
        return all_reduce_async(x, self.group).recorded(flight).wait()


@dataclass(frozen=True)
class ContextParallel(AllToAllGroup):
    """The cp group, over which the positions of each sequence are dealt."""

    overlap: bool = True
    # number of shifts under way at a time; each has a buffer of its own. As many as there are shifts: all keys and
    # values are gathered first.
    stages_ahead: int = 1
    keep_kv: bool = False  # keep the received keys and values for backward instead of sending them again


NO_SP, NO_CP = SequenceParallel(), ContextParallel()
