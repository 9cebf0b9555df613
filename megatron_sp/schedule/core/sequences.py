"""Sequences shared by the ranks of the sp axis: who has which positions, how tensors are cut and gathered, how heads are exchanged.

Positions are cut contiguously; a length that the ranks cannot share evenly is padded at the end. Padding travels
through layers and exchanges, and is removed before attention, which never sees it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import all_to_all, gather_from, overridable
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.numbers import round_up


class Cut(NamedTuple):
    """Share of one sequence on one rank.

    Attributes:
        length: positions of the whole sequence, without padding.
        padded: the same with padding at the end.
        ranks, rank: number of ranks that share it, and the index of this one.
    """

    length: int
    padded: int
    ranks: int
    rank: int

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
        return self.padded // self.ranks

    def take(self, x: Tensor, dim: int, fill: float | None = 0) -> Tensor:
        """Return this rank's positions of a whole tensor; padding is filled with ``fill``, or with the last position if that is None."""
        return take_share(x, self, dim, fill)

    def whole(self, x: Tensor, dim: int, group: Group) -> Tensor:
        """Gather all ranks' positions of a tensor that all of them go on to use alike. Collective."""
        return gather_from(x, group, dim, "slice").narrow(dim, 0, self.length)


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
    return x.narrow(dim, cut.rank * cut.local, cut.local).contiguous()  # a copy, since models may hold views of their inputs


@overridable
def repeated_heads(x: Tensor, times: int, dim: int) -> Tensor:
    """Repeat each head ``times`` times, its copies next to each other."""
    return x.repeat_interleave(times, dim)


class Heads(NamedTuple):
    """Exchange of q, k and v to the whole sequence of some heads, and of the result back to all heads of some positions.

    Attributes:
        group: the sp ranks.
        seq, head: dims of the tensors that enter the attention.
        where: the module, for messages.
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
        if x.shape[self.seq] != cut.padded:
            raise ConfigError(
                f"{self.where} computes {x.shape[self.seq]} positions, but the last forward pass had {cut.padded}: with recomputation a"
                " batch's backward pass must come before a forward pass of another length; pad batches to one length; where nothing is"
                " recomputed, layout= or core= is about other tensors, or the model has a second sequence, which cannot be cut (E10)"
            )
        return x.narrow(self.seq, 0, cut.length)

    def leave(self, x: Tensor, cut: Cut, seq: int, head: int) -> Tensor:
        """Exchange a result with these dims back to some positions of all heads."""
        missing = cut.padded - cut.length
        if missing:
            x = F.pad(x.movedim(seq, -1), (0, missing)).movedim(-1, seq)
        return all_to_all(x, self.group, seq, head)
