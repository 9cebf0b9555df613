"""Sequences shared by the ranks of sp and cp: who has which positions, and how these are exchanged for heads.

Positions are dealt to the cp ranks in runs, and a cp rank's share is cut contiguously over sp. Padding is at the end.
With cp 1 it is removed before attention; else attention's mask hides it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.mappings import GatherGrad, all_to_all, gather_from
from megatron_sp.parallel.row_mask import Runs
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.numbers import round_up


class Cut(NamedTuple):
    """Share of one sequence on one rank."""

    length: int  # positions of the whole sequence, without padding
    padded: int  # the same with padding at the end
    ranks: int  # of sp, which share it
    rank: int
    # runs of positions of each cp rank, with padding; all have as many. () if there is a single one.
    shares: tuple[Runs, ...] = ()
    cp_rank: int = 0

    @classmethod
    def of(cls, length: int, group: Group, multiple: int, *, pads: bool, what: str, where: str) -> Cut:
        """Cut a sequence, padded to a multiple. Raises ConfigError (E12): it is none, and ``pads`` is false."""
        padded = round_up(length, multiple)
        if padded != length and not pads:
            rule = f"must be a multiple of {multiple} (the ranks that share them)"
            way_out = "pad the batch, or leave out pad=False, and it is done here"
            raise ConfigError(f"{what} has {length} positions, which {rule}: {way_out} ({where}, E12)")
        return cls(length, padded, group.size(), group.rank())

    @property
    def local(self) -> int:
        return self.together // self.ranks

    @property
    def together(self) -> int:
        # number of positions that come together in attention, with padding: all, or those of a cp rank
        return self.padded // max(1, len(self.shares))

    def take(self, x: Tensor, dim: int, fill: float | None = 0) -> Tensor:
        """Return this rank's positions of a whole tensor; ``fill``: of padding; None: the last position.

        Backward gives zeros elsewhere, to be summed as for parameters.
        """
        missing = self.padded - self.length
        if missing:
            last = x.narrow(dim, self.length - 1, 1)
            x = F.pad(x.movedim(dim, -1), (0, missing), value=fill or 0).movedim(-1, dim)
            if fill is None:
                x = x.clone()
                x.narrow(dim, self.length, missing).copy_(last.expand_as(x.narrow(dim, self.length, missing)))
        if self.shares:
            x = torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.shares[self.cp_rank]], dim)
        return x.narrow(dim, self.rank * self.local, self.local).contiguous()  # a copy: models may hold views of inputs

    def whole(self, x: Tensor, dim: int, sp: Group, cp: Group, grad: GatherGrad) -> Tensor:
        """Gather all ranks' positions in order, without padding; ``grad`` as for ``gather_from``. Collective."""
        x = gather_from(x, sp, dim, grad)
        if self.shares:
            x = gather_from(x, cp, dim, grad)
            runs = [run for share in self.shares for run in share]
            pieces = x.split([stop - start for start, stop in runs], dim)
            in_order = sorted(zip(runs, pieces, strict=True), key=lambda item: item[0])
            x = torch.cat([piece for _, piece in in_order], dim)
        return x.narrow(dim, 0, self.length)


class Heads(NamedTuple):
    """Exchange of q, k and v to the whole sequence of some heads, and back."""

    group: Group
    seq: int  # dims of the tensors that enter the attention
    head: int
    where: str

    def spread(self, x: Tensor, queries: int) -> Tensor:
        """Repeat key/value heads so that each rank gets those of its queries."""
        ranks, have = self.group.size(), x.shape[self.head]
        if queries % ranks:
            works = ", ".join(str(n) for n in range(2, queries + 1) if queries % n == 0) or "1 only"
            raise ConfigError(
                f"{self.where} has {queries} query heads on this rank, which must be a multiple of sp ({ranks}): the"
                f" model's heads must be one of tp * sp; sp {works} would work, or another tp (E2)"
            )
        if have % ranks == 0 or have == 0:
            return x
        return x.repeat_interleave(ranks // have if ranks % have == 0 else queries // have, self.head)

    def enter(self, x: Tensor, cut: Cut) -> Tensor:
        return self.real(all_to_all(x, self.group, self.head, self.seq), cut)

    def real(self, x: Tensor, cut: Cut) -> Tensor:
        if x.shape[self.seq] != cut.together:
            raise ConfigError(
                f"{self.where} computes {x.shape[self.seq]} positions, but the last forward pass had {cut.together}:"
                " with recomputation a batch's backward pass must come before a forward pass of another length; pad"
                " batches to one length; where nothing is recomputed, layout= or core= is about other tensors, or the"
                " model has a second sequence, which cannot be cut (E10)"
            )
        # the padding of a cp rank is hidden by the mask, and not removed
        return x if cut.shares else x.narrow(self.seq, 0, cut.length)

    def leave(self, x: Tensor, cut: Cut, seq: int, head: int) -> Tensor:
        """Exchange a result with these dims back to some positions of all heads."""
        missing = 0 if cut.shares else cut.together - cut.length
        if missing:
            x = F.pad(x.movedim(seq, -1), (0, missing)).movedim(-1, seq)
        return all_to_all(x, self.group, seq, head)


class ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.ranks, None
