"""One step of a dry run (a torch function or an exchange between ranks), and the checks that placement rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, NoReturn

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
        if name == "dim" and "axis" in self.kwargs:  # numpy's name, which torch accepts everywhere
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
        # over dp, a loss or a statistic over a rank's own rows may be meant
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


class Indexed(NamedTuple):
    """One item of an index, with the dims that it indexes: ``width`` of them, from ``dim`` on."""

    item: Any
    dim: int
    width: int

    def covers(self, dim: int) -> bool:
        """Return True if the item indexes this dim."""
        return self.dim <= dim < self.dim + self.width


def walk_index(index: Any, ndim: int) -> list[Indexed]:
    """Return the items of ``x[index]`` in order, with the dims of ``x`` that each indexes; an ellipsis stands for what the others leave."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(i is Ellipsis for i in items):
        items = (*items, Ellipsis)
    widths = [_width(i) for i in items]
    left, found, dim = ndim - sum(widths), list[Indexed](), 0
    for item, width in zip(items, widths, strict=True):
        width = left if item is Ellipsis else width
        found.append(Indexed(item, dim, width))
        dim += width
    return found


def _width(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):  # a new dim, or what is left over
        return 0
    return item.ndim if is_mask(item) else 1


def is_mask(item: Any) -> bool:
    """Return whether an item of an index is a tensor of booleans."""
    return isinstance(item, Tensor) and item.dtype is torch.bool


def join(step: Step, operands: Iterable[Operand]) -> Placement:
    """Return the placement of a result computed from whole tensors."""
    asked = [o for o in operands if not o.neutral]
    if any(o.differs for o in asked):
        conflict(step, asked)
    kinds = {o.kind for o in asked}
    if "R" in kinds:
        first = next(o for o in asked if o.kind == "R")
        require_parts(step, asked, first)
        return first.placement
    if "I" in kinds:
        for o in asked:
            o.decide("I", step.place)
        return next(o.placement for o in asked if o.kind == "I")
    for o in asked[1:]:
        assert asked[0].placement.choice is not None and o.placement.choice is not None
        asked[0].placement.choice.join(o.placement.choice)
    return asked[0].placement if asked else WHOLE


def require_parts(step: Step, operands: Iterable[Operand], other: Operand) -> None:
    """Check that whole tensors that meet ``other``, which each rank treats differently, have a gradient that is summed later.

    Raises:
        PlacementError: a gradient is never summed (E6, E7), or is summed although it is complete (E5); a partial sum
            (E3).
    """
    for o in operands:
        if o.is_partial:
            refuse_partial(step, o)
        if o.neutral:
            continue
        if o.kind == "I":
            _refuse(step, o, other)
        o.decide("R", step.place)


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
        f" would stay a part on each rank. Specify where it is summed: .sync('fwd_pre', 'copy'{step.over}) on the module around (all_gather"
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
        f" .row('all_reduce') or .row('reduce_scatter') there, or .sync('fwd_post', 'all_reduce'{step.over}) after it",
        "E3",
    )


def refuse_partials(step: Step, operands: Iterable[Operand]) -> None:
    """Raise PlacementError if one of the operands is a partial sum (E3)."""
    for o in operands:
        if o.is_partial:
            refuse_partial(step, o)


def conflict(step: Step, operands: Sequence[Operand], why: str = "these do not fit together") -> NoReturn:
    """Raise PlacementError: operands are cut in incompatible ways (E10)."""
    step.fail(f"{why}: " + "; ".join(f"{o.called} is {o.placement.describe()}" for o in operands), "E10")


def cut(operands: Iterable[Operand]) -> list[Operand]:
    """Return the operands of which each rank has a share."""
    return [o for o in operands if o.is_cut]


def runs(share: Operand) -> list[int]:
    """Return the lengths of this rank's shares of the parts along the cut dim."""
    return list(share.placement.blocks) or [share.size // share.placement.outer] * share.placement.outer


def same_parts(share: Operand, other: Operand) -> bool:
    """Return whether two shares consist of the same parts."""
    return (share.placement.outer, share.placement.blocks) == (other.placement.outer, other.placement.blocks)


def leading(shares: list[Operand]) -> Operand:
    """Return the share whose parts the others must have: the first whose parts are known."""
    return next((o for o in shares if not o.placement.as_needed), shares[0])


def broadcast(step: Step, operands: Sequence[Operand], ndim: int) -> Placement:
    """Return the placement of an elementwise result."""
    shares = cut(operands)
    if not shares:
        if operands and all(o.kind == "U" for o in operands):
            return UNIFORM
        return join(step, operands)
    first = leading(shares)
    dim = first.dim_from_behind
    for o in shares:
        parts_fit = o.placement.as_needed or same_parts(o, first)
        if o.dim_from_behind != dim or not parts_fit or o.size != first.size:
            conflict(step, [first, o], "they are cut in different ways")
    for o in operands:
        _require_broadcastable(step, o, first)
    require_parts(step, operands, first)
    return replace(first.placement.at(ndim + dim), copies=min(o.placement.copies for o in shares))


def _require_broadcastable(step: Step, o: Operand, share: Operand) -> None:
    """Raise PlacementError if what is not cut does not fit a share that it meets elementwise (E3, E10, E11)."""
    if o.is_partial:
        refuse_partial(step, o)
    dim = share.dim_from_behind
    if o.is_cut or o.tensor.ndim < -dim or o.tensor.shape[dim] == 1:
        return
    if not o.is_filled:
        conflict(step, [share, o], f"along dim {dim} one is cut and the other is not")
    if o.tensor.shape[dim] != share.tensor.shape[dim]:
        step.fail(f"{o.called} is as large as the whole, and meets {share.called}, which is {share.placement.describe()}", "E11")


def contract(step: Step, operands: Sequence[tuple[Operand, str]], out: str) -> Placement:
    """Return the placement of a tensor product whose dims have these letters, as in einsum; letters not in ``out`` are summed over."""
    every = [o for o, _ in operands]
    refuse_partials(step, every)
    shares = [(o, letters) for o, letters in operands if o.is_cut]
    if not shares:
        return join(step, every)
    shares = [(o, letters) for o, letters in shares if not o.placement.as_needed] or shares  # the others are cut, and repeated, alike
    first, letters = shares[0]
    letter = letters[first.dim]
    for o, names in operands:
        if o.is_cut and (names[o.dim] != letter or not same_parts(o, first)):
            conflict(step, [first, o], "they are cut in different ways")
        if o.is_cut or letter not in names:
            continue
        size = o.tensor.shape[names.index(letter)]
        if o.is_filled and size not in (1, first.size):
            conflict(step, [first, o], "they are multiplied along a dim of which a rank has a share in one, and all in the other")
        if not o.is_filled and (letter not in out or size != 1):
            conflict(step, [first, o], "they are multiplied along a dim that is cut in one and whole in the other")
    require_parts(step, every, first)
    copies = [o.placement.copies for o, _ in shares]
    if letter not in out:
        return summed_over(step, replace(first, placement=replace(first.placement, copies=max(copies))))
    return replace(first.placement.at(out.index(letter)), copies=min(copies))


def summed_over(step: Step, share: Operand) -> Placement:
    """Return the placement of a sum along the cut dim. Raises PlacementError if several ranks would count the same share (E10)."""
    if (copies := share.placement.copies) > 1:
        conflict(step, [share], f"{copies} ranks each have the same share of this, so a sum over it would count each {copies} times")
    name = "" if step.name == "linear" else f" {step.name}"  # for linear, the class of the module says it already
    return Placement("P", since=f"{step.place}{name} ({share.placement.since})")
