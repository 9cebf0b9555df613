"""All-to-alls of parts of any size over a group: what sp, cp and ep have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_to_all_async, done
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.ops.allocator import empty

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import CallSite


@dataclass(frozen=True)
class AllToAllGroup:
    """A group, and how its all-to-alls are run."""

    group: Group = SINGLE_RANK
    overlap: bool = False  # overlap exchanges with computation; else wait for each at once
    recorder: CallSite | None = None  # records every exchange and the computation between them

    @cached_property
    def size(self) -> int:
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    def exchange_async(self, name: str, send: Tensor, send_counts: list[int], receive_counts: list[int]) -> Handle:
        """Start an exchange of flat ``send``, whose r-th run of ``send_counts[r]`` elements is for rank r.

        Without ``overlap`` it is complete when this returns.
        """
        if self.size == 1:
            return done(send)
        receive = empty((sum(receive_counts),), dtype=send.dtype, device=send.device)
        flight = None
        if self.recorder is not None:
            flight = self.recorder.start("all_to_all", tuple(send_counts), tuple(receive_counts), send.dtype, name)
        handle = all_to_all_async(send, send_counts, receive, receive_counts, self.group).recorded(flight)
        if self.overlap:
            return handle
        return Handle(None, handle.wait(), "all_to_all")

    def mark(self, label: str) -> None:
        if self.recorder is not None:
            self.recorder.mark(label)
