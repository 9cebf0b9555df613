"""Sequences shared by the ranks of sp and cp: who has which positions, how tensors are cut and gathered, how heads are exchanged.

Positions are dealt to the cp ranks in runs, and a cp rank's share is cut contiguously over sp; a length that the ranks
cannot share evenly is padded at the end. Padding travels through layers and exchanges. With cp 1 it is removed before
attention, which never sees it; else attention's mask hides it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import GatherGrad, all_to_all, gather_from, overridable
from megatron_sp.parallel.row_mask import Runs
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.numbers import round_up


class Cut(NamedTuple):
    """Share of one sequence on one rank.

    Attributes:
        ranks, rank: number of sp ranks that share it, and the index of this one.
    """

    length: int  # positions of the whole sequence, without padding
    padded: int  # the same with padding at the end
    ranks: int
    rank: int
    # runs of positions of each cp rank, with padding; all have as many. None if there is a single one.
    shares: tuple[Runs, ...] = ()
    cp_rank: int = 0

    @classmethod
    def of(cls, length: int, group: Group, multiple: int, *, pads: bool, what: str, where: str = "") -> Cut:
        """Create the cut of a sequence of the given length.

        Args:
            multiple: the padded length is a multiple of this.
            pads: whether padding is allowed; otherwise an uneven length is refused.
            what: name of what is cut, for the message.
            where: file and line that asked for it, for the message.
        Raises:
            ConfigError: padding is needed, but not allowed (E12).
        """
        padded = round_up(length, multiple)
        if padded != length and not pads:
            raise ConfigError(
                f"{what} has {length} positions, which must be a multiple of {multiple} (the ranks that share them): pad the batch, or"
                f" leave out pad=False, and it is done here ({where + ', ' if where else ''}E12)"
            )
        return cls(length, padded, group.size(), group.rank())

    @property
    def local(self) -> int:
        """Number of positions per rank."""
        return self.together // self.ranks

    @property
    def together(self) -> int:
        """Number of positions that come together in attention, with padding: all, or those of a cp rank."""
        return self.padded // max(1, len(self.shares))

    @property
    def attended(self) -> int:
        """Number of positions that attention computes; the padding of a cp rank is hidden by the mask, and not removed."""
        return self.together if self.shares else self.length

    def take(self, x: Tensor, dim: int, fill: float | None = 0) -> Tensor:
        """Return this rank's positions of a whole tensor; padding is filled with ``fill``, or with the last position if that is None."""
        return take_share(x, self, dim, fill)

    def whole(self, x: Tensor, dim: int, sp: Group, cp: Group, grad: GatherGrad) -> Tensor:
        """Gather all ranks' positions of a tensor, in order and without padding; ``grad`` as for ``gather_from``. Collective."""
        x = gather_from(x, sp, dim, grad)
        if self.shares:
            x = in_order(gather_from(x, cp, dim, grad), self, dim)
        return x.narrow(dim, 0, self.length)


@overridable
def take_share(x: Tensor, cut: Cut, dim: int, fill: float | None) -> Tensor:
    """Implement ``Cut.take``. Backward: each rank has its positions' gradient and zeros elsewhere, to be summed as for parameters."""
    missing = cut.padded - cut.length
    if missing and fill is None:
        last = x.narrow(dim, cut.length - 1, 1)
        x = F.pad(x.movedim(dim, -1), (0, missing)).movedim(-1, dim).clone()
        x.narrow(dim, cut.length, missing).copy_(last.expand_as(x.narrow(dim, cut.length, missing)))
    elif missing:
        x = F.pad(x.movedim(dim, -1), (0, missing), value=fill or 0).movedim(-1, dim)
    if cut.shares:
        x = torch.cat([x.narrow(dim, start, stop - start) for start, stop in cut.shares[cut.cp_rank]], dim)
    return x.narrow(
        dim, cut.rank * cut.local, cut.local
    ).contiguous()  # a copy, since models may hold views of their inputs


def in_order(x: Tensor, cut: Cut, dim: int) -> Tensor:
    """Return the shares of all cp ranks, one after another along ``dim``, in the order of the sequence."""
    parts: list[tuple[int, Tensor]] = []
    at = 0
    for start, stop in (run for runs in cut.shares for run in runs):
        parts.append((start, x.narrow(dim, at, stop - start)))
        at += stop - start
    return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])], dim)


@overridable
def repeated_heads(x: Tensor, times: int, dim: int) -> Tensor:
    """Repeat each head ``times`` times, its copies next to each other."""
    return x.repeat_interleave(times, dim)


class Heads(NamedTuple):
    """Exchange of q, k and v to the whole sequence of some heads, and of the result back to all heads of some positions.

    Attributes:
        seq, head: dims of the tensors that enter the attention.
    """

    group: Group
    seq: int
    head: int
    where: str

    def spread(self, x: Tensor, queries: int) -> Tensor:
        """Repeat key/value heads so that each rank gets those of its queries; autograd sums the gradients of the copies.

        Raises:
            ConfigError: the ranks cannot share the heads.
        """
        ranks, have = self.group.size(), x.shape[self.head]
        if queries % ranks:
            works = ", ".join(str(n) for n in range(2, queries + 1) if queries % n == 0) or "1 only"
            raise ConfigError(
                f"{self.where} has {queries} query heads on this rank, which must be a multiple of sp ({ranks}): the model's heads must be"
                f" one of tp * sp; sp {works} would work, or another tp (E2)"
            )
        if have % ranks == 0 or have == 0:
            return x
        times = ranks // have if ranks % have == 0 else queries // have
        return repeated_heads(x, times, self.head)

    def enter(self, x: Tensor, cut: Cut) -> Tensor:
        """Exchange some positions of all heads for all positions, without padding, of some heads."""
        return self.real(all_to_all(x, self.group, self.head, self.seq), cut)

    def real(self, x: Tensor, cut: Cut) -> Tensor:
        """Remove the padding of a whole sequence.

        Raises:
            ConfigError: the sequence is of another pass: a forward pass of another length began before this
                recomputation.
        """
        if x.shape[self.seq] != cut.together:
            raise ConfigError(
                f"{self.where} computes {x.shape[self.seq]} positions, but the last forward pass had {cut.together}: with recomputation a"
                " batch's backward pass must come before a forward pass of another length; pad batches to one length; where nothing is"
                " recomputed, layout= or core= is about other tensors, or the model has a second sequence, which cannot be cut (E10)"
            )
        return x.narrow(self.seq, 0, cut.attended)

    def leave(self, x: Tensor, cut: Cut, seq: int, head: int) -> Tensor:
        """Exchange a result with these dims back to some positions of all heads."""
        missing = cut.together - cut.attended
        if missing:
            x = F.pad(x.movedim(seq, -1), (0, missing)).movedim(-1, seq)
        return all_to_all(x, self.group, seq, head)
