"""Vocabulary of all rules: their type, two ways to make one from a function of a single tensor, and the refusal to guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_sp.schedule.core.placement_steps import Step, join, refuse_partial, refuse_partials
from megatron_sp.schedule.core.placements import UNIFORM, Operand, Placement

Rule = Callable[[Step], "Placement | list[Placement]"]
OfOne = Callable[[Step, Operand], "Placement | list[Placement]"]


def ask(step: Step) -> Placement:
    """Raise PlacementError: it is not known what the function does to a share."""
    told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in step.operands() if o.differs)
    return step.fail(
        f"it is not known what this does to shares ({told}): teach it with megatron_sp.schedule.teach({step.name!r}, rule)",
        "unknown",
    )


def names(text: str) -> set[str]:
    """Return names that are separated by blanks."""
    return set(text.split())


def same_rule(functions: str, rule: Rule) -> dict[str, Rule]:
    """Return one rule for several functions, whose names are separated by blanks."""
    return dict.fromkeys(functions.split(), rule)


def of_one(rule: OfOne) -> Rule:
    """Return the rule of a function of one tensor, a share or a partial sum."""
    return lambda step: rule(step, step.operands()[0])


def moved(rule: OfOne) -> Rule:
    """Return the rule of a function that only moves the elements of one tensor: what is not cut keeps its placement."""

    def of(step: Step) -> Placement | list[Placement]:
        x = step.operands()[0]
        if x.is_partial and isinstance(step.result, Tensor) and step.result.dtype != x.tensor.dtype:  # the same bits, read as another dtype
            refuse_partial(step, x)
        return rule(step, x) if x.is_cut else x.placement

    return of


def join_complete(step: Step, operands: Sequence[Operand]) -> Placement:
    """Return the placement of a result computed from whole tensors. Raises PlacementError if one is a partial sum."""
    refuse_partials(step, operands)
    return join(step, operands)


def uniform_or_joined(step: Step, operands: Sequence[Operand]) -> Placement:
    """Return the placement as ``join_complete``, but U if all operands are filled with one value."""
    refuse_partials(step, operands)
    return UNIFORM if operands and all(o.is_filled for o in operands) else join(step, operands)


def is_share_of(local: Sequence[int], whole: Sequence[int], dim: int, ranks: int) -> bool:
    """Return whether a share's shape, times the number of ranks along one dim, is the whole tensor's shape."""
    return len(local) == len(whole) and all(n * (ranks if i == dim else 1) == w for i, (n, w) in enumerate(zip(local, whole, strict=True)))


def as_list(value: Any) -> list[int]:
    """Return an integer, or several, as a list."""
    return [value] if isinstance(value, int) else list(value)
