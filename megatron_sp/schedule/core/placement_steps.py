"""One step of a dry run (a torch function or an exchange between ranks), and the checks that placement rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megatron_sp.schedule.core.placements import UNIFORM, WHOLE, Choice, NotFollowed, Operand, Placement, PlacementError


@dataclass
class Step:
    """One call of a torch function or of an exchange.

    Attributes:
        name: of the function, without the underscores of in-place and operator spellings.
        result: its return value; None if the rule runs before the call.
        look: returns a tensor as an operand, with its placement.
        place: path and class of the calling module.
        module: that module.
        size: number of ranks.
        axis: mesh axis along which placements are followed.
        whole: result shapes of the same call in the whole model, if that call is known.
        lines: lines of the schedule on this module, for messages.
        choose: creates the open choice of an all_gather here, or returns None if its adjoint was given.
        hint: more words for messages about sizes that are stored in a module.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    look: Callable[[Tensor], Operand]
    place: str
    size: int
    whole: list[tuple[int, ...]] | None = None
    lines: str = ""
    axis: str = "tp"
    choose: Callable[[], Choice | None] = lambda: None
    hint: Callable[[], str] = lambda: ""
    module: nn.Module | None = None

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Argument by position or name."""
        if name == "dim" and "axis" in self.kwargs:  # numpy's word, which torch takes everywhere
            return self.kwargs["axis"]
        return self.kwargs[name] if name in self.kwargs else self.args[place] if place < len(self.args) else default

    def rest(self, place: int, name: str) -> list[int]:
        """Return integers that are passed one by one, as a sequence, or by name."""
        if name in self.kwargs:
            return list(self.kwargs[name])
        given = self.args[place:]
        return list(given[0]) if given and isinstance(given[0], (tuple, list)) else list(given)

    def operand(self, place: int, name: str) -> Operand | None:
        """Argument by position or name, as an operand; None if it is not a tensor."""
        value = self.arg(place, name)
        return self.look(value) if isinstance(value, Tensor) else None

    def operands(self) -> list[Operand]:
        """All tensors among the arguments, as operands."""
        return [self.look(t) for t in tensors_in((self.args, self.kwargs))]

    @property
    def over(self) -> str:
        """Argument with which a sync acts on this axis, for messages."""
        return "" if self.axis == "tp" else f", over='{self.axis}'"

    def label(self, op: str) -> str:
        """Return the origin (``since``) of a placement that begins here."""
        return f"{op} at {self.place}" + (f" ({self.lines})" if self.lines else "")

    def fail(self, text: str, code: str) -> NoReturn:
        """Raise PlacementError; NotFollowed with the code "unknown", and over dp with E3."""
        more = self.hint() if code == "E11" else ""
        # a loss, or a statistic, over a rank's own rows is its own, whatever is made of it
        kind = NotFollowed if code == "unknown" or (code == "E3" and self.axis == "dp") else PlacementError
        raise kind(f"{self.place}: {self.name}: {text}{more} ({code})")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for place in fields(value):
            yield from tensors_in(getattr(value, place.name))


def placed(items: tuple[Any, ...], ndim: int) -> Iterator[tuple[int, Any]]:
    """Yield (first dim that it indexes, item) for each item of an index."""
    of = [0 if i is None or isinstance(i, bool) else i.ndim if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in items]
    dim = 0
    for i, width in zip(items, of, strict=True):
        yield dim, i
        dim += ndim - sum(of) + 1 if i is Ellipsis else width


def join(step: Step, operands: Iterable[Operand]) -> Placement:
    """Return the placement of a result computed from whole tensors."""
    asked = [o for o in operands if not o.neutral]
    if any(o.kind in "SP" for o in asked):
        conflict(step, asked)
    kinds = {o.kind for o in asked}
    if "R" in kinds:
        first = next(o for o in asked if o.kind == "R")
        require_parts(step, asked, first)
        return first.placement
    if "I" in kinds:
        for o in asked:
            if o.kind == "?" and o.placement.choice is not None:
                o.placement.choice.decide("I", step.place)
        return next(o.placement for o in asked if o.kind == "I")
    for o in asked[1:]:
        assert asked[0].placement.choice is not None and o.placement.choice is not None
        asked[0].placement.choice.join(o.placement.choice)
    return asked[0].placement if asked else WHOLE


def require_parts(step: Step, operands: Iterable[Operand], other: Operand) -> None:
    """Check that whole tensors that meet ``other``, which each rank treats differently, have a gradient that is summed later.

    Raises:
        PlacementError: a gradient is never summed (E6, E7), or is summed although it is complete (E5); a partial sum (E3).
    """
    for o in operands:
        if o.kind == "P":
            refuse_partial(step, o)
        if o.neutral or o.kind in "SR":
            continue
        if o.kind == "?" and o.placement.choice is not None:
            o.placement.choice.decide("R", step.place)
        elif o.kind == "I":
            _refuse(step, o, other)


def _refuse(step: Step, complete: Operand, other: Operand) -> NoReturn:
    if complete.name:
        step.fail(
            f"{complete.name} is whole on every rank and meets {other.called}, which is {other.placement.describe()}: each rank gets a part"
            f" of its gradient only. Split it too, or sum its gradient: s[{complete.name.rpartition('.')[0]!r}].sum_gradients()",
            "E7",
        )
    if other.name and other.kind == "R":
        step.fail(
            f"the gradient of {other.name} is summed over the ranks ({other.placement.since}), and here all ranks use it alike, with"
            f" {complete.called}: the sum would be {step.size} times the gradient; leave that line out",
            "E5",
        )
    since = f" since {complete.placement.since}" if complete.placement.since else ""
    step.fail(
        f"{complete.called} is whole and used alike by all ranks{since}, and meets {other.called}, which is"
        f" {other.placement.describe()}: its gradient"
        f" would stay a part on each rank. Say where it is summed: .sync('fwd_pre', 'copy'{step.over}) on the module around (all_gather"
        " where it is cut), or .column(input='copy'); or where the other is made whole",
        "E6",
    )


def refuse_partial(step: Step, operand: Operand) -> NoReturn:
    """Raise PlacementError: a partial sum is used as if it were the sum (E3)."""
    if operand.placement.mean:
        step.fail(
            f"{operand.called} is {operand.placement.describe()}: ranks have different numbers of labels, so it counts by their number"
            " before it is summed (ulysses(loss='per_token')), or the sum over the share is divided by the number of all",
            "E3",
        )
    step.fail(
        f"{operand.called} is {operand.placement.describe()}, and the whole is expected here, or a share: complete it first, with"
        f" .row('all_reduce') or .row('reduce_scatter') there, or .sync('fwd_post', 'all_reduce'{step.over}) behind it",
        "E3",
    )


def conflict(step: Step, operands: Sequence[Operand], why: str = "these do not fit together") -> NoReturn:
    """Raise PlacementError: operands are cut in incompatible ways (E10)."""
    step.fail(f"{why}: " + "; ".join(f"{o.called} is {o.placement.describe()}" for o in operands), "E10")


def cut(operands: Iterable[Operand]) -> list[Operand]:
    """Operands that are shares."""
    return [o for o in operands if o.kind == "S"]


def runs(share: Operand) -> list[int]:
    """Return the lengths of this rank's shares of the parts along the cut dim."""
    size = share.tensor.shape[share.placement.dim]
    return list(share.placement.blocks) or [size // share.placement.outer] * share.placement.outer


def broadcast(step: Step, operands: Sequence[Operand], ndim: int) -> Placement:
    """Return the placement of an elementwise result."""
    shares = cut(operands)
    if not shares:
        if operands and all(o.kind == "U" for o in operands):
            return UNIFORM
        return join(step, operands)
    first = next((o for o in shares if not o.placement.as_needed), shares[0])
    dim = first.placement.dim - first.tensor.ndim  # from behind, as broadcasting counts
    for o in shares:
        parts = (first.placement.outer, first.placement.blocks) if o.placement.as_needed else (o.placement.outer, o.placement.blocks)
        sizes = o.tensor.shape[o.placement.dim], first.tensor.shape[dim]
        if (o.placement.dim - o.tensor.ndim, *parts) != (dim, first.placement.outer, first.placement.blocks) or sizes[0] != sizes[1]:
            conflict(step, [first, o], "they are cut in different ways")
    for o in operands:
        if o.kind == "P":
            refuse_partial(step, o)
        if o.kind == "U" and o.tensor.ndim >= -dim and o.tensor.shape[dim] not in (1, first.tensor.shape[dim]):
            step.fail(f"{o.called} is as large as the whole, and meets {first.called}, which is {first.placement.describe()}", "E11")
        if o.kind != "S" and o.kind != "U" and o.tensor.ndim >= -dim and o.tensor.shape[dim] != 1:
            conflict(step, [first, o], f"along dim {dim} one is cut and the other is not")
    require_parts(step, operands, first)
    return replace(first.placement.at(ndim + dim), copies=min(o.placement.copies for o in shares))


def contract(step: Step, operands: Sequence[tuple[Operand, str]], out: str) -> Placement:
    """Return the placement of a tensor product whose dims have these letters, as in einsum; letters not in ``out`` are summed over."""
    every = [o for o, _ in operands]
    for o in every:
        if o.kind == "P":
            refuse_partial(step, o)
    shares = [(o, letters) for o, letters in operands if o.kind == "S"]
    if not shares:
        return join(step, every)
    shares = [(o, letters) for o, letters in shares if not o.placement.as_needed] or shares  # those are cut, and doubled, as the others
    first, letters = shares[0]
    letter = letters[first.placement.dim]
    for o, names in operands:
        if o.kind == "S" and (names[o.placement.dim], o.placement.outer, o.placement.blocks) != (
            letter,
            first.placement.outer,
            first.placement.blocks,
        ):
            conflict(step, [first, o], "they are cut in different ways")
        if o.kind not in "SU" and letter in names and (letter not in out or o.tensor.shape[names.index(letter)] != 1):
            conflict(step, [first, o], "they are multiplied along a dim that is cut in one and whole in the other")
        if o.kind == "U" and letter in names and o.tensor.shape[names.index(letter)] not in (1, first.tensor.shape[first.placement.dim]):
            conflict(step, [first, o], "they are multiplied along a dim of which a rank has a share in one, and all in the other")
    require_parts(step, every, first)
    copies = [o.placement.copies for o, _ in shares]
    if letter not in out:
        return summed_over(step, replace(first, placement=replace(first.placement, copies=max(copies))))
    return replace(first.placement.at(out.index(letter)), copies=min(copies))


def summed_over(step: Step, share: Operand) -> Placement:
    """Return the placement of a sum along the cut dim. Raises PlacementError if several ranks would count the same share (E10)."""
    if (copies := share.placement.copies) > 1:
        conflict(step, [share], f"{copies} ranks each have the same share of this, so a sum over it would count each {copies} times")
    name = "" if step.name == "linear" else f" {step.name}"  # which the module's class says
    return Placement("P", since=f"{step.place}{name} ({share.placement.since})")
