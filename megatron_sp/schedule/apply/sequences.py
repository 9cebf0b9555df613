"""Sequences shared by the ranks of sp and cp: who has which positions, how tensors are cut and gathered, how heads are exchanged.

Positions are dealt to the cp ranks in runs, and a cp rank's share is cut contiguously over sp; a length that the ranks
cannot share evenly is padded at the end. Padding travels through layers and exchanges. With cp 1 it is removed before
attention, which never sees it; else attention's mask hides it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import GatherGrad, all_to_all, gather_from, overridable
from megatron_sp.parallel.row_mask import Runs
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.numbers import round_up

IGNORED = -100  # label of a position without a loss


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
    def of(cls, length: int, group: Group, multiple: int, *, pads: bool, what: str, where: str = "") -> Cut:
        """Create the cut of a sequence of the given length, padded to a multiple.

        Raises:
            ConfigError: padding is needed, but not allowed (E12); names ``what`` is cut, and the line that asked.
        """
        padded = round_up(length, multiple)
        if padded != length and not pads:
            rule = f"must be a multiple of {multiple} (the ranks that share them)"
            way_out = "pad the batch, or leave out pad=False, and it is done here"
            at = f"{where}, " if where else ""
            raise ConfigError(f"{what} has {length} positions, which {rule}: {way_out} ({at}E12)")
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
        """Return this rank's positions of a whole tensor; padding is filled with ``fill``, or the last position if None."""
        return take_share(x, self, dim, fill)

    def whole(self, x: Tensor, dim: int, sp: Group, cp: Group, grad: GatherGrad) -> Tensor:
        """Gather all ranks' positions of a tensor, in order and without padding; ``grad`` as for ``gather_from``. Collective."""
        x = gather_from(x, sp, dim, grad)
        if self.shares:
            x = gather_from(x, cp, dim, grad)
            runs = [run for share in self.shares for run in share]
            pieces = x.split([stop - start for start, stop in runs], dim)
            in_order = sorted(zip(runs, pieces, strict=True), key=lambda item: item[0])
            x = torch.cat([piece for _, piece in in_order], dim)
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
    return x.narrow(dim, cut.rank * cut.local, cut.local).contiguous()  # a copy: models may hold views of their inputs


@overridable
def repeated_heads(x: Tensor, times: int, dim: int) -> Tensor:
    """Repeat each head ``times`` times, its copies next to each other."""
    return x.repeat_interleave(times, dim)


class Heads(NamedTuple):
    """Exchange of q, k and v to the whole sequence of some heads, and of the result back to all heads of some positions."""

    group: Group
    seq: int  # dims of the tensors that enter the attention
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
                f"{self.where} has {queries} query heads on this rank, which must be a multiple of sp ({ranks}): the"
                f" model's heads must be one of tp * sp; sp {works} would work, or another tp (E2)"
            )
        if have % ranks == 0 or have == 0:
            return x
        return repeated_heads(x, ranks // have if ranks % have == 0 else queries // have, self.head)

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
                f"{self.where} computes {x.shape[self.seq]} positions, but the last forward pass had {cut.together}: with"
                " recomputation a batch's backward pass must come before a forward pass of another length; pad batches to"
                " one length; where nothing is recomputed, layout= or core= is about other tensors, or the model has a"
                " second sequence, which cannot be cut (E10)"
            )
        return x.narrow(self.seq, 0, cut.attended)

    def leave(self, x: Tensor, cut: Cut, seq: int, head: int) -> Tensor:
        """Exchange a result with these dims back to some positions of all heads."""
        missing = cut.together - cut.attended
        if missing:
            x = F.pad(x.movedim(seq, -1), (0, missing)).movedim(-1, seq)
        return all_to_all(x, self.group, seq, head)


@overridable
def share_of_labels(labels: Tensor, cut: Cut) -> Tensor:
    """Return the fraction of all labels [b, s] that are on this rank's positions."""
    local = (cut.take(labels, 1, IGNORED) != IGNORED).sum()
    return local.double() / (labels != IGNORED).sum()


@overridable
def weighed(loss: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    """Return the share of a rank in the mean over all labels, from the mean over its own; 0 without labels, whose mean is NaN."""
    return loss * weight.to(loss.dtype) if int(weight > 0) else (logits * 0.0).sum().to(loss.dtype)


@overridable
def share_of_gradient(x: Tensor, group: Group) -> Tensor:
    """Return ``x``; in backward, this rank's share of the gradient of what all ranks of a group compute alike."""
    return _ShareOfGradient.apply(x, group.size())  # type: ignore[no-any-return]


class _ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.ranks, None
