"""The layout of one model on this rank, as the layers see it: the tp and sp groups, and how a sequence is cut over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.recorder import Recorder
from megatron_sp.parallel.heads import HeadChunk, OverlapMode, plan_heads
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.parallel.ulysses import NO_SP, SequenceParallel
from megatron_sp.utils.numbers import round_up


class SequenceCut(NamedTuple):
    """Which of a sequence's positions a rank holds.

    Attributes:
        length: real positions of the sequence.
        padded: with padding at the end, a multiple of all parts.
        tp_seq_slice: positions between the tensor-parallel parts of the layers.
        sp_slice: positions inside them, where the whole tp group has the same.
    """

    length: int
    padded: int
    tp_seq_slice: slice
    sp_slice: slice

    def pad(self, x: Tensor) -> Tensor:
        """[length, ...] -> [padded, ...], zeros behind."""
        missing = self.padded - self.length
        return x if missing == 0 else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing))


@dataclass(frozen=True)
class ParallelContext:
    """Groups and modes of the parallel layers.

    Attributes:
        tp, sp: the groups.
        mode, num_chunks: how the exchanges of Ulysses are cut (``parallel/heads.py``).
        recorder: of collectives and computation (--report-overlap).
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
        tp, sp = TensorParallel(groups.tp, tp_seq and groups.tp.size() > 1), SequenceParallel(groups.sp, overlap)
        return cls(tp, sp, mode, num_chunks, recorder).in_layer(None)

    def in_layer(self, layer: int | None) -> ParallelContext:
        """The layout as a block sees it: what it does is recorded under its number."""
        if self.recorder is None:
            return self
        tp, sp = replace(self.tp, recorder=self.recorder.at("tp", layer)), replace(self.sp, recorder=self.recorder.at("sp", layer))
        return replace(self, tp=tp, sp=sp)

    def plan(self, queries_per_group: int, num_groups: int) -> tuple[HeadChunk, ...]:
        """The way of one tp rank's heads through the exchanges."""
        return tuple(plan_heads(queries_per_group, num_groups, self.sp.size, self.mode, self.num_chunks))

    def cut(self, length: int) -> SequenceCut:
        """This rank's positions of a sequence: contiguous runs, over sp first, then over tp where tp_seq is on."""
        padded = round_up(length, self.sp.size * self.tp.parts)
        num_sp = padded // self.sp.size
        num_tp_seq = num_sp // self.tp.parts
        start = self.sp.rank * num_sp
        mine = start + (self.tp.rank * num_tp_seq if self.tp.parts > 1 else 0)
        return SequenceCut(length, padded, slice(mine, mine + num_tp_seq), slice(start, start + num_sp))
