"""Parallel layout of a model as a rank's layers see it: groups, and how a sequence is split over them."""

# A sequence of s positions is first dealt to the cp ranks in runs that follow from its mask (``context_plan.py``); a cp
# rank's share, L positions in order, is then split evenly over sp, and with tp_seq over tp. Shares may differ in
# length, and one may be empty; it is padded so that each rank has at least one row, of which no result depends on.

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce_async
from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups, expert_groups
from megatron_sp.parallel.all_to_all import AllToAllGroup
from megatron_sp.parallel.heads import HeadChunk, OverlapMode, Sections, plan_heads
from megatron_sp.parallel.row_mask import RowMask, Run, Runs, merge_runs
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.utils.numbers import round_up

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import Recorder
    from megatron_sp.parallel.pipeline_stages import Stage
    from megatron_sp.parallel.sequence_slices import RowSlice


@dataclass(frozen=True)
class SequenceParallel(AllToAllGroup):
    """The sp group, over which a cp rank's share of each sequence is split."""

    def all_reduce(self, x: Tensor) -> Tensor:  # in place
        if self.size == 1:
            return x
        flight = None
        if self.recorder is not None:
            flight = self.recorder.start("all_reduce", (x.numel(),), (x.numel(),), x.dtype, "norm statistics")
        return all_reduce_async(x, self.group).recorded(flight).wait()


@dataclass(frozen=True)
class ContextParallel(AllToAllGroup):
    """The cp group, to which the positions of each sequence are dealt."""

    overlap: bool = True
    # number of shifts under way at a time; each has a buffer of its own. As many as there are shifts: all keys and
    # values are gathered first.
    stages_ahead: int = 1
    keep_kv: bool = False  # keep the received keys and values for backward instead of sending them again


@dataclass(frozen=True)
class ExpertParallel(AllToAllGroup):
    """The ep group, over which the experts of each layer are dealt."""

    # Experts are dealt to ``ep`` neighbours on the axes dp, cp and sp taken together, with tp_seq on tp, too; the rest
    # of these axes has replicas of the same experts. Without tp_seq the ranks of a tp group have the same tokens and
    # compute alike.
    #
    #     ranks of a stage   d0c0s0  d0c0s1  d1c0s0  d1c0s1        (dp 2, sp 2)
    #     ep 2               experts 0-3, 4-7, 0-3, 4-7             groups of neighbours; replicas: every second rank

    replicas: Group = SINGLE_RANK  # the ranks that have the same experts as this one, and other tokens
    sequence: Group = SINGLE_RANK  # the ranks that have other positions of the same sequences
    tokens: Group = SINGLE_RANK  # the ranks that have other tokens, of these sequences or of others
    # this rank's tokens are its own, so that it counts them: with several tp ranks that have the same tokens only the
    # first
    counts: bool = True
    chunks: int = 1  # parts of a rank's tokens that are sent and computed in turn

    @classmethod
    def create(
        cls, groups: ParallelGroups, ep_size: int = 1, *, tp_seq: bool = False, chunks: int = 1, check: bool = False
    ) -> ExpertParallel:
        """Make the groups for ``ep_size`` ranks; ``tp_seq``: the tp ranks have different tokens. Collective."""
        by_name = expert_groups(groups, ep_size, over_tp=tp_seq, check=check)
        counts = tp_seq or groups.tp_rank == 0
        return cls(overlap=True, recorder=None, counts=counts, chunks=chunks, group=by_name.pop("ep"), **by_name)


NO_SP, NO_CP, NO_EP = SequenceParallel(), ContextParallel(), ExpertParallel()


@dataclass(frozen=True)
class SequenceCut:
    """Positions of a sequence that a rank holds."""

    # runs of positions of each cp rank, in order; with one cp rank a single run, the whole sequence
    shares: tuple[Runs, ...]
    tp: TensorParallel = NO_TP
    sp: SequenceParallel = NO_SP
    cp: ContextParallel = NO_CP
    row: int = 0  # positions of the row that these are a slice of; 0: the sequence is not sliced
    # with a slice, runs of positions of each cp rank in it and all slices before it
    keys: tuple[Runs, ...] | None = None

    @cached_property
    def runs(self) -> Runs:  # of this cp rank's positions
        return self.shares[self.cp.rank]

    @cached_property
    def whole(self) -> int:  # positions of the sequence, s, of a slice those of its row
        return self.row or sum(self.length_of(rank) for rank in range(len(self.shares)))

    @cached_property
    def length(self) -> int:  # real positions of this cp rank, L
        return self.length_of(self.cp.rank)

    def length_of(self, cp_rank: int) -> int:
        return sum(stop - start for start, stop in self.shares[cp_rank])

    @cached_property
    def padded(self) -> int:  # L with padding at the end, in even parts of at least one row
        return self._padded(self.cp.rank)

    def _padded(self, cp_rank: int) -> int:
        return round_up(max(1, self.length_of(cp_rank)), self.sp.size * self.tp.parts)

    @cached_property
    def sp_slice(self) -> slice:
        # this rank's rows of the padded share inside the tensor-parallel regions, the same on the whole tp group
        length = self.padded // self.sp.size
        return slice(self.sp.rank * length, (self.sp.rank + 1) * length)

    @cached_property
    def tp_seq_slice(self) -> slice:
        # this rank's rows outside the tensor-parallel regions
        inside = self.sp_slice
        length = (inside.stop - inside.start) // self.tp.parts
        start = inside.start + (self.tp.rank * length if self.tp.parts > 1 else 0)
        return slice(start, start + length)

    def share(self, x: Tensor) -> Tensor:
        """Return this cp rank's positions: [s, ...] -> [L, ...]."""
        assert x.shape[0] == self.whole, f"{x.shape[0]} positions, and the sequence that was cut has {self.whole}"
        if len(self.shares) == 1 and not self.row:
            return x
        parts = [x[start:stop] for start, stop in self.runs]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else x[:0]

    def take(self, x: Tensor) -> Tensor:
        """Return ``share`` with zeros behind: [s, ...] -> [padded, ...]."""
        share, missing = self.share(x), self.padded - self.length
        return share if missing == 0 else F.pad(share, (0, 0) * (x.ndim - 1) + (0, missing))

    def put_together(self, shares: list[Tensor]) -> Tensor:
        """Return the sequence in order, [s, ...], from the shares of all cp ranks."""
        assert not self.row, "a slice is a part of a sequence, of which the others are not here"
        if len(shares) == 1:
            return shares[0][: self.whole]
        parts: list[tuple[int, Tensor]] = []
        for runs, share in zip(self.shares, shares, strict=True):
            row = 0
            for start, stop in runs:
                parts.append((start, share[row : row + stop - start]))
                row += stop - start
        return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])

    def place(self, position: int) -> tuple[int, int, int]:
        """Return who has a position: (cp rank, sp rank, row of that rank's ``sp_slice``)."""
        for cp_rank, runs in enumerate(self.shares):
            row = 0
            for start, stop in runs:
                if start <= position < stop:
                    return cp_rank, *divmod(row + position - start, self._padded(cp_rank) // self.sp.size)
                row += stop - start
        raise ValueError(f"there is no position {position} in a sequence of {self.whole}")

    @cached_property
    def num_tokens(self) -> int:  # rows of ``tp_seq_slice`` that are not padding; they come first
        return max(0, min(self.tp_seq_slice.stop, self.length) - self.tp_seq_slice.start)

    def row_of(self, position: int) -> int | None:  # of this rank's ``sp_slice``, if that has the position
        cp_rank, sp_rank, row = self.place(position)
        return row if (cp_rank, sp_rank) == (self.cp.rank, self.sp.rank) else None


@dataclass(frozen=True)
class ParallelContext:
    """Groups and modes of the parallel layers."""

    tp: TensorParallel = NO_TP
    sp: SequenceParallel = NO_SP
    mode: OverlapMode = "none"  # how Ulysses' exchanges are split (``heads.py``)
    num_chunks: int = 1
    recorder: Recorder | None = None  # recorder of collectives and computation (--report-overlap)
    cp: ContextParallel = NO_CP
    cp_chunks: int | None = None  # chunks of a sequence that each cp rank is dealt; None: as many as the mask needs
    stages: tuple[Stage, ...] = ()  # this pipeline rank's stages of the model, in order; empty: the model is not cut
    num_slices: int = 1  # slices of each row, which go through the pipeline one after another
    ep: ExpertParallel = NO_EP  # the ranks that share experts

    @classmethod
    def of(
        cls, groups: ParallelGroups, *, tp_seq: bool = False, mode: OverlapMode = "none", num_chunks: int = 1,
        overlap: bool = False, recorder: Recorder | None = None, cp_chunks: int | None = None, cp_stages_ahead: int = 1,
        cp_keep_kv: bool = False, stages: tuple[Stage, ...] = (), num_slices: int = 1, ep: ExpertParallel = NO_EP,
    ) -> ParallelContext:  # fmt: skip
        tp, sp = TensorParallel(groups.tp, tp_seq and groups.tp.size() > 1), SequenceParallel(groups.sp, overlap)
        cp = ContextParallel(groups.cp, stages_ahead=cp_stages_ahead, keep_kv=cp_keep_kv)
        return cls(tp, sp, mode, num_chunks, recorder, cp, cp_chunks, stages, num_slices, ep).in_layer(None)

    def in_layer(self, layer: int | None) -> ParallelContext:
        # collectives and computation of a block are recorded under its number, those outside under None
        if self.recorder is None:
            return self
        tp, sp, cp, ep = (self.recorder.at(axis, layer) for axis in ("tp", "sp", "cp", "ep"))
        return replace(
            self, tp=replace(self.tp, recorder=tp), sp=replace(self.sp, recorder=sp), cp=replace(self.cp, recorder=cp),
            ep=replace(self.ep, recorder=ep),
        )  # fmt: skip

    def plan(self, sections: Sections, *, whole: bool = False) -> tuple[HeadChunk, ...]:
        """Return the plan of the exchanges of a tp rank's heads; ``whole``: in one chunk."""
        in_pieces = self.cp.size > 1 or self.num_slices > 1
        mode = "none" if whole and self.mode == "chunked" else self.mode
        return tuple(plan_heads(sections, self.sp.size, mode, self.num_chunks, pairs=in_pieces))

    def cut(self, mask: RowMask, row_slice: RowSlice | None = None) -> SequenceCut:
        """Return this rank's positions of a sequence, or of a slice."""
        if row_slice is None:
            return SequenceCut(self._deal(mask, None), self.tp, self.sp, self.cp)
        by_slice = [self._deal(mask, part) for part in row_slice.runs[: row_slice.number + 1]]
        keys = tuple(merge_runs(run for runs in of_rank for run in runs) for of_rank in zip(*by_slice, strict=True))
        return SequenceCut(by_slice[-1], self.tp, self.sp, self.cp, mask.length, keys)

    def _deal(self, mask: RowMask, part: Run | None) -> tuple[Runs, ...]:
        if self.cp.size == 1:
            return (((0, mask.length) if part is None else part,),)
        from megatron_sp.parallel.context_plan import cut_row

        return cut_row(mask, self.cp.size, self.cp_chunks, part)
