"""Entering and leaving tensor-parallel regions (Megatron's f and g, arXiv:1909.08053, 2205.05198)."""

# A column-parallel linear layer opens such a region, a row-parallel one closes it; inside, every rank has all positions
# and its own columns. Between the regions activations are replicated, or, with ``seq`` (--sequence-parallel), each rank
# has its own run of positions:
#
#             enter (forward)        leave (forward)
#     plain   nothing                all_reduce
#     seq     all_gather             reduce_scatter
#
# Each is the backward of the other, so the same two calls serve both directions.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_gather_async, all_reduce_async, done, reduce_scatter_async
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.ops.allocator import empty

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import CallSite, CollectiveRecord


@dataclass(frozen=True)
class TensorParallel:
    """The tp group, and how activations are held between tensor-parallel regions."""

    group: Group = SINGLE_RANK  # ranks over which weights are split
    seq: bool = False  # activations between the regions are split along the sequence over the group (tp_seq)
    recorder: CallSite | None = None  # records every collective and the computation between them

    @cached_property
    def size(self) -> int:
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @cached_property
    def parts(self) -> int:  # into which the positions are split between tensor-parallel regions
        return self.size if self.seq else 1

    # forward of enter and backward of leave
    def enter_async(self, x: Tensor) -> Handle:
        """Start entering a region, [s/parts, ...] -> [s, ...]."""
        if not self.seq or self.size == 1:
            return done(x)
        x = x.contiguous()
        out = empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        flight = None if self.recorder is None else self._flight("all_gather", x, out.numel())
        return all_gather_async(x, self.group, out).recorded(flight)

    # forward of leave and backward of enter
    def leave_async(self, x: Tensor) -> Handle:
        """Start summing [s, ...] -> [s/parts, ...], in place without ``seq``."""
        if self.size == 1:
            return done(x)
        if not self.seq:
            flight = None if self.recorder is None else self._flight("all_reduce", x, x.numel())
            return all_reduce_async(x, self.group).recorded(flight)
        out = empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        flight = None if self.recorder is None else self._flight("reduce_scatter", x, out.numel())
        return reduce_scatter_async(x, self.group, out).recorded(flight)

    def all_reduce(self, x: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        # in place
        flight = None if self.recorder is None or self.size == 1 else self._flight("all_reduce", x, x.numel())
        return all_reduce_async(x, self.group, op).recorded(flight).wait()

    def mark(self, label: str) -> None:
        if self.recorder is not None:
            self.recorder.mark(label)

    def _flight(self, op: str, x: Tensor, receives: int) -> CollectiveRecord | None:
        assert self.recorder is not None
        return self.recorder.start(op, (x.numel(),), (receives,), x.dtype, op.replace("_", "-"))


NO_TP = TensorParallel()
