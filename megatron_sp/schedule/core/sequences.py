"""How the ranks of the sp axis share a sequence: who has which positions, how tensors are cut and made whole, how heads are traded.

Positions are cut contiguously; a length that the ranks cannot share evenly is padded at the end. Padding travels through layers and
exchanges, and is taken away in front of the attention, which never sees it.
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
    """One sequence on one rank.

    Attributes:
        length: real positions of the whole.
        padded: with padding at its end.
        ranks, rank: who shares it, and which of them this is.
    """

    length: int
    padded: int
    ranks: int
    rank: int

    @classmethod
    def of(cls, length: int, group: Group, multiple: int, *, pads: bool, what: str, where: str = "") -> Cut:
        """Of a length.

        Args:
            multiple: of which the padded length must be one.
            pads: whether it may be padded; else an uneven length is refused.
            what: is cut, for the message.
            where: who asked, for the message.
        Raises:
            ConfigError: it would have to be padded, and may not be (E12).
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
        """Positions of a rank."""
        return self.padded // self.ranks

    def take(self, x: Tensor, dim: int, fill: float | None = 0) -> Tensor:
        """This rank's positions of a whole tensor; ``fill`` stands in the padding, None: the last position again."""
        return take_share(x, self, dim, fill)

    def whole(self, x: Tensor, dim: int, group: Group) -> Tensor:
        """All ranks' positions of something that all of them go on to use alike. Collective."""
        return gather_from(x, group, dim, "slice").narrow(dim, 0, self.length)


@overridable
def take_share(x: Tensor, cut: Cut, dim: int, fill: float | None) -> Tensor:
    """``Cut.take``. Backward: each rank has its positions' gradient, zeros elsewhere, and they are summed as parameters' are."""
    missing = cut.padded - cut.length
    if missing and fill is None:
        last = x.narrow(dim, cut.length - 1, 1)
        x = F.pad(x.movedim(dim, -1), (0, missing)).movedim(-1, dim).clone()
        x.narrow(dim, cut.length, missing).copy_(last.expand_as(x.narrow(dim, cut.length, missing)))
    elif missing:
        x = F.pad(x.movedim(dim, -1), (0, missing), value=fill or 0).movedim(-1, dim)
    return x.narrow(dim, cut.rank * cut.local, cut.local).contiguous()  # models have views of what they are given


@overridable
def repeated_heads(x: Tensor, times: int, dim: int) -> Tensor:
    """Each head so many times, one behind the other."""
    return x.repeat_interleave(times, dim)


class Heads(NamedTuple):
    """How q, k and v become the whole sequence of some heads, and the result all heads of some positions again.

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
        """Key/value heads as often as it takes for each rank to get those of its queries; autograd adds the copies' gradients up.

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
        """Some positions of all heads -> all real positions of some heads."""
        return self.real(all_to_all(x, self.group, self.head, self.seq), cut)

    def real(self, x: Tensor, cut: Cut) -> Tensor:
        """Without the padding of a whole sequence.

        Raises:
            ConfigError: it is a sequence of another pass: a recomputation after a forward pass of another length has begun.
        """
        if x.shape[self.seq] != cut.padded:
            raise ConfigError(
                f"{self.where} computes {x.shape[self.seq]} positions, but the last forward pass had {cut.padded}: with recomputation a"
                " batch's backward pass must come before a forward pass of another length; pad batches to one length; where nothing is"
                " recomputed, layout= or core= is about other tensors, or the model has a second sequence, which cannot be cut (E10)"
            )
        return x.narrow(self.seq, 0, cut.length)

    def leave(self, x: Tensor, cut: Cut, seq: int, head: int) -> Tensor:
        """The way back, of a result with these dims."""
        missing = cut.padded - cut.length
        if missing:
            x = F.pad(x.movedim(seq, -1), (0, missing)).movedim(-1, seq)
        return all_to_all(x, self.group, seq, head)
