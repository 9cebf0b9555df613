"""Placements: how a tensor is laid out over the ranks of an axis, and which may meet. The vocabulary of ``Schedule.check()``.

    I        whole, the same on every rank, and so is its gradient (invariant)
    R        whole, the same on every rank; each has a part of its gradient, which is still to be summed over the ranks (replicated)
    S(dim)   each rank has a share, and that share's gradient
    P        each rank has a summand
    U        filled with one value: all shares of it are alike

    copy: I -> R    all_reduce: P -> I    scatter: I -> S    reduce_scatter: P -> S
    all_gather: S -> R where its adjoint is reduce_scatter, S -> I where it is slice

If R or S meets I in a computation, each rank gets only a part of the gradient of I, and nothing sums the parts. That is
an error, so every missing or doubled sum of a gradient is detected in the forward pass. A tensor that needs no gradient
may meet anything. The adjoint of an all_gather need not be given: it stays open (``Choice``) until an op that uses the
result decides. Source of the vocabulary: ``spmd_types``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_sp.utils.errors import ConfigError


class PlacementError(ConfigError):
    """Lines of a schedule that do not fit together."""


class NotFollowed(PlacementError):
    """The dry run reached something that it cannot follow, so it gives no verdict on the lines."""


class Choice:
    """Choice between R and I for the result of an all_gather; open until something that uses it decides.

    Attributes:
        label: place of the all_gather.
        because: what decided.
    """

    def __init__(self, label: str) -> None:
        self.label, self.because = label, ""
        self._value = ""
        self._same: Choice | None = None

    def first(self) -> Choice:
        """Return the representative of all choices that must be decided alike."""
        return self if self._same is None else self._same.first()

    @property
    def value(self) -> str:
        """Decided placement, R or I; "" while the choice is open."""
        return self.first()._value

    def decide(self, value: str, because: str) -> None:
        """Settle the choice, for all that share it."""
        self.first()._value, self.first().because = value, because

    def join(self, other: Choice) -> None:
        """Merge two choices, so that both are decided alike."""
        if self.first() is not other.first():
            other.first()._same = self.first()


@dataclass(frozen=True)
class Placement:
    """Placement of one tensor.

    Attributes:
        dim: for S: the dim that is cut.
        outer: for S: the dim is (outer, ranks, share), so a share is not one run: blocks of a packed projection, a
            flattened batch.
        blocks: for S: sizes of unequal parts, each of which is cut (this rank's sizes).
        copies: for S: number of consecutive ranks that have the same share (fewer heads than ranks).
        shuffled: rows are in the order (ranks, ``shuffled``, share), because a flattened batch was gathered; scattering
            them again restores the shares.
        mean: for P: the summands are means, each over a rank's own share, and must be weighted before they are summed.
        as_needed: for S: the parts are not known (cut by a user's function, or filled with one value): cut like
            whatever it meets.
        since: origin, for messages.
        choice: for the result of an all_gather: decides between R and I.
    """

    letter: str
    dim: int = 0
    outer: int = 1
    blocks: tuple[int, ...] = ()
    copies: int = field(default=1, compare=False)
    shuffled: int = 1
    mean: bool = False
    as_needed: bool = field(default=False, compare=False)
    since: str = field(default="", compare=False)
    choice: Choice | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """Letter of the placement: I, R, S, P, U, or ? while a choice is open."""
        return (self.choice.value or "?") if self.choice is not None else self.letter

    def at(self, dim: int, outer: int | None = None) -> Placement:
        """Return the same cut along another dim."""
        return replace(self, dim=dim, outer=self.outer if outer is None else outer)

    def __str__(self) -> str:
        kind = self.kind
        if kind == "S":
            parts = f", in {self.outer} parts" if self.outer > 1 else f", in parts of {list(self.blocks)}" if self.blocks else ""
            return f"S({self.dim}{parts})"
        return kind

    def describe(self) -> str:
        """Return a description in words, with the origin."""
        words = {
            "I": "whole and used alike by all ranks",
            "R": "whole, with a part of its gradient on each rank",
            "?": "whole",
            "U": "filled with one value",
            "P": "a partial sum on each rank",
            "S": f"cut along dim {self.dim}",
        }
        words["P"] = "a mean over its own share on each rank" if self.mean else words["P"]
        return words[self.kind] + (f" since {self.since}" if self.since else "")


WHOLE = Placement("I")
UNIFORM = Placement("U")


@dataclass(frozen=True)
class Operand:
    """An input tensor of a step.

    Attributes:
        name: of the parameter, or "" if it is none.
    """

    tensor: Tensor
    placement: Placement
    name: str = ""

    @property
    def kind(self) -> str:
        """Letter of the placement: I, R, S or P, or ? while it is open."""
        return self.placement.kind

    @property
    def is_cut(self) -> bool:
        """True if each rank has a share."""
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        """True if each rank has a summand."""
        return self.kind == "P"

    @property
    def is_filled(self) -> bool:
        """True if it is filled with one value."""
        return self.kind == "U"

    @property
    def differs(self) -> bool:
        """True if it is not the same on all ranks: a share, or a summand."""
        return self.kind in "SP"

    @property
    def neutral(self) -> bool:
        """True if it may meet anything: it is filled with one value, or whole and needs no gradient."""
        return self.is_filled or (self.kind in "IR?" and not self.tensor.requires_grad)

    @property
    def dim(self) -> int:
        """Dim that is cut."""
        return self.placement.dim

    @property
    def dim_from_behind(self) -> int:
        """Dim that is cut, counted from the last (-1), as broadcasting counts."""
        return self.placement.dim - self.tensor.ndim

    @property
    def size(self) -> int:
        """Size of the share along the dim that is cut."""
        return self.tensor.shape[self.placement.dim]

    def decide(self, value: str, because: str) -> None:
        """Decide whether the result of an all_gather is R or I, if that is still open."""
        if self.kind == "?" and self.placement.choice is not None:
            self.placement.choice.decide(value, because)

    @property
    def called(self) -> str:
        """Name or shape, for messages."""
        return self.name or f"a tensor of {list(self.tensor.shape)}"
