"""Parallel layout of a model as the layers on this rank see it: the tp and sp groups, and how a sequence is split over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.recorder import Recorder
from megatron_sp.parallel.heads import HeadChunk, OverlapMode, plan_heads
from megatron_sp.parallel.sequence_parallel import NO_SP, SequenceParallel
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.utils.numbers import round_up


class SequenceCut(NamedTuple):
    """Positions of a sequence that a rank holds.

    Attributes:
        length: real positions of the sequence.
        padded: length with padding at the end, divisible by the number of parts.
        tp_seq_slice: this rank's positions outside the tensor-parallel regions.
        sp_slice: this rank's positions inside them, the same on the whole tp group.
    """

    length: int
    padded: int
    tp_seq_slice: slice
    sp_slice: slice

    def pad(self, x: Tensor) -> Tensor:
        """Pad with zeros at the end: [length, ...] -> [padded, ...]."""
        missing = self.padded - self.length
        return x if missing == 0 else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing))


@dataclass(frozen=True)
class ParallelContext:
    """Groups and modes of the parallel layers.

    Attributes:
        tp, sp: the groups.
        mode, num_chunks: how the Ulysses exchanges are split (``parallel/heads.py``).
        recorder: recorder of collectives and computation (--report-overlap).
    """

    tp: TensorParallel = NO_TP
    sp: SequenceParallel = NO_SP
    mode: OverlapMode = "none"
    num_chunks: int = 1
    recorder: Recorder | None = None

    @classmethod
    def of(
        cls, groups: ParallelGroups, *, tp_seq: bool = False, mode: OverlapMode = "none", num_chunks: int = 1, overlap: bool = False,
        recorder: Recorder | None = None,
    ) -> ParallelContext:  # fmt: skip
        """Context of a rank's groups, for a model outside of any layer."""
        tp, sp = TensorParallel(groups.tp, tp_seq and groups.tp.size() > 1), SequenceParallel(groups.sp, overlap)
        return cls(tp, sp, mode, num_chunks, recorder).in_layer(None)

    def in_layer(self, layer: int | None) -> ParallelContext:
        """Return the context for a block, whose collectives and computation are recorded under its number."""
        if self.recorder is None:
            return self
        tp, sp = replace(self.tp, recorder=self.recorder.at("tp", layer)), replace(self.sp, recorder=self.recorder.at("sp", layer))
        return replace(self, tp=tp, sp=sp)

    def plan(self, queries_per_group: int, num_groups: int) -> tuple[HeadChunk, ...]:
        """Return the plan of the exchanges of one tp rank's heads."""
        return tuple(plan_heads(queries_per_group, num_groups, self.sp.size, self.mode, self.num_chunks))

    def cut(self, length: int) -> SequenceCut:
        """Return this rank's contiguous positions of a sequence, split over sp first, then over tp with tp_seq."""
        padded = round_up(length, self.sp.size * self.tp.parts)
        num_sp = padded // self.sp.size
        num_tp_seq = num_sp // self.tp.parts
        start = self.sp.rank * num_sp
        mine = start + (self.tp.rank * num_tp_seq if self.tp.parts > 1 else 0)
        return SequenceCut(length, padded, slice(mine, mine + num_tp_seq), slice(start, start + num_sp))
