"""How a tensor lies over the ranks of an axis, and what may meet what: the vocabulary of ``Schedule.check()``.

    I        whole, the same on every rank, and so is its gradient (invariant)
    R        whole, the same on every rank; each has a part of its gradient, and a sum over the ranks is still to come (replicated)
    S(dim)   each rank has a share, and that share's gradient
    P        each rank has a summand
    U        filled with one value: any share of it is like any other

    copy: I -> R    all_reduce: P -> I    scatter: I -> S    reduce_scatter: P -> S
    all_gather: S -> R where its adjoint is reduce_scatter, S -> I where it is slice

What is computed from R or S together with I leaves the I with a part of its gradient that nobody sums: that is an error, and so every
forgotten or doubled sum of a gradient is seen in the forward pass. A tensor that needs no gradient may meet anything. Which adjoint an
all_gather has need not be said: it is open (``Choice``) until what uses the result decides. Source of the vocabulary: ``spmd_types``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_sp.utils.errors import ConfigError


class PlacementError(ConfigError):
    """Lines of a schedule that do not fit together."""


class NotFollowed(PlacementError):
    """The dry run came to something that it does not know, so it says nothing of the lines."""


class Choice:
    """Whether the result of an all_gather is R or I; open until something that uses it decides.

    Attributes:
        label: where it is.
        because: what decided.
    """

    def __init__(self, label: str) -> None:
        self.label, self.because = label, ""
        self._value = ""
        self._same: Choice | None = None

    def first(self) -> Choice:
        """The one that stands for all that must be decided alike."""
        return self if self._same is None else self._same.first()

    @property
    def value(self) -> str:
        """R, I, or "" while it is open."""
        return self.first()._value

    def decide(self, value: str, because: str) -> None:
        self.first()._value, self.first().because = value, because

    def join(self, other: Choice) -> None:
        """From now on both are decided alike."""
        if self.first() is not other.first():
            other.first()._same = self.first()


@dataclass(frozen=True)
class Placement:
    """Of one tensor.

    Attributes:
        dim: of S: the dim that is cut.
        outer: of S: the dim is (outer, ranks, share), so shares are not one run each: blocks of a packed projection, a flattened batch.
        blocks: of S: sizes of unequal parts, each of which is cut (a rank's own sizes).
        copies: of S: so many ranks that follow each other have the same share (fewer heads than ranks).
        shuffled: rows are in the order (ranks, this many, share), for a flattened batch was gathered; whoever scatters them again has the
            share that there was.
        mean: of P: the summands are means, each over a rank's own share, and are to be weighed before they are summed.
        as_needed: of S: a user's function has cut it, in whatever parts what it meets is cut.
        since: what made it so.
        choice: of the result of an all_gather: decides between R and I.
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
        """I, R, S, P, U, or ? while a choice is open."""
        return (self.choice.value or "?") if self.choice is not None else self.letter

    def at(self, dim: int, outer: int | None = None) -> Placement:
        """The same cut along another dim."""
        return replace(self, dim=dim, outer=self.outer if outer is None else outer)

    def __str__(self) -> str:
        kind = self.kind
        if kind == "S":
            parts = f", in {self.outer} parts" if self.outer > 1 else f", in parts of {list(self.blocks)}" if self.blocks else ""
            return f"S({self.dim}{parts})"
        return kind

    def describe(self) -> str:
        """In words, with its origin."""
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
    """A tensor that goes into a step.

    Attributes:
        name: of a parameter; else "".
    """

    tensor: Tensor
    placement: Placement
    name: str = ""

    @property
    def kind(self) -> str:
        return self.placement.kind

    @property
    def neutral(self) -> bool:
        """Whole, and nobody asks for its gradient: it may meet anything."""
        return self.kind == "U" or (self.kind in "IR?" and not self.tensor.requires_grad)

    @property
    def called(self) -> str:
        """For messages."""
        return self.name or f"a tensor of {list(self.tensor.shape)}"
