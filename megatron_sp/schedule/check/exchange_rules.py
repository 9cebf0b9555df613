"""Effects of exchanges between ranks on placements, and on shapes if there are no other ranks.

The adjoint of each is fixed (``parallel/regions.py``), so each expects one placement and produces one; anything else
means that a sum is missing or made twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.schedule.check.rules import products
from megatron_sp.schedule.core.placement_steps import Step, conflict, contract, join, refuse_partial, require_parts
from megatron_sp.schedule.core.placements import WHOLE, Operand, Placement
from megatron_sp.schedule.core.sequences import take_share as take
from megatron_sp.schedule.core.syncs import Guess

Rule = Callable[[Step], Placement]


def _double(step: Step, x: Operand, what: str, way: str = "leave one of them out") -> NoReturn:
    """Raise PlacementError: a sum is made twice (E5)."""
    step.fail(f"{x.called} is {x.placement.describe()}: {what}, {step.size} times too large; {way}", "E5")


def as_whole(step: Step, x: Operand) -> Operand:
    """Return an operand that is whole and has a complete gradient. Raises PlacementError if it is anything else."""
    if x.kind == "P":
        refuse_partial(step, x)
    if x.kind == "S":
        way = "rows of different ranks have nothing to do with each other" if step.axis == "dp" else "to make it whole, all_gather"
        conflict(step, [x], f"a tensor that is whole on every rank is expected{_here(step)}; {way}")
    if x.kind == "?" and x.placement.choice is not None:
        x.placement.choice.decide("I", step.place)
    if x.kind == "R" and not x.neutral:
        _double(step, x, f"the gradient that is summed in {step.name}{_here(step)} is summed again there")
    return x


def _here(step: Step) -> str:
    return f" ({step.lines})" if step.lines else ""


def copy_to(step: Step) -> Placement:
    as_whole(step, step.operands()[0])
    return Placement("R", since=step.label("copy"))


def reduce_from(step: Step) -> Placement:
    x = step.operands()[0]
    if x.placement.mean:
        refuse_partial(step, x)
    if x.kind != "P":
        _not_partial(step, x, "all_reduce")
    return Placement("I", since=step.label("all_reduce"))


def _not_partial(step: Step, x: Operand, op: str) -> NoReturn:
    if x.kind == "S":
        conflict(step, [x], f"{op}{_here(step)} sums partial sums, and this is a share; all_gather makes it whole")
    _double(
        step,
        x,
        f"it is not a partial sum, or no longer one, so {op}{_here(step)} makes it",
        "leave it out, or split a layer before it by rows",
    )


def gather_from(step: Step) -> Placement:
    x, dim, grad = step.operands()[0], step.arg(2, "dim"), step.arg(3, "grad")
    dim %= x.tensor.ndim
    if x.kind == "P":
        refuse_partial(step, x)
    if x.kind != "S":
        step.fail(
            f"all_gather{_here(step)} of {x.called}, which is {x.placement.describe()}: only what is cut can be gathered; cut it,"
            " with .sequence() or"
            " scatter, or use copy",
            "E10",
        )
    shuffled = x.placement.outer if dim == 0 and x.tensor.ndim == 2 else 1
    if x.placement.dim != dim or x.placement.outer > shuffled or x.placement.blocks:
        conflict(step, [x], f"all_gather{_here(step)} joins along dim {dim}")
    since = step.label("all_gather")
    if isinstance(grad, Guess) and (choice := step.choose()) is not None:
        return Placement("?", shuffled=shuffled, since=since, choice=choice)
    return Placement("R" if grad == "reduce_scatter" else "I", shuffled=shuffled, since=since)


def scatter_to(step: Step) -> Placement:
    x, dim = as_whole(step, step.operands()[0]), step.arg(2, "dim")
    return Placement("S", dim % x.tensor.ndim, since=step.label("scatter"))


def reduce_scatter_to(step: Step) -> Placement:
    x, dim = step.operands()[0], step.arg(2, "dim")
    if x.kind != "P":
        _not_partial(step, x, "reduce_scatter")
    dim %= x.tensor.ndim
    return Placement("S", dim, x.placement.shuffled if dim == 0 else 1, since=step.label("reduce_scatter"))


def all_to_all(step: Step) -> Placement:
    x, split, joined = step.operands()[0], step.arg(2, "split"), step.arg(3, "join")
    if x.kind == "P":
        refuse_partial(step, x)
    if x.kind != "S" or x.placement.dim != joined % x.tensor.ndim or x.placement.outer > 1 or x.placement.blocks:
        conflict(step, [x], f"all_to_all{_here(step)} joins along dim {joined}, which is to be cut over {step.axis}")
    return replace(x.placement.at(split % x.tensor.ndim), since=step.label("all_to_all"))


def take_share(step: Step) -> Placement:
    """Placement of a share taken from a whole tensor; the parts of its gradient are summed later, with those of earlier parameters."""
    x, dim = step.operands()[0], step.arg(2, "dim") % step.operands()[0].tensor.ndim
    made = Operand(x.tensor, Placement("S", dim, since=step.label(f"cut over {step.axis}")))
    if x.kind == "P":
        refuse_partial(step, x)
    if x.kind == "S":
        conflict(step, [x], f"cut over {step.axis}{_here(step)}, though it is cut already")
    require_parts(step, [x], made)
    return made.placement


def repeated_heads(step: Step) -> Placement:
    """Placement of heads repeated before an exchange: consecutive ranks will have the same ones."""
    x = step.operands()[0]
    return replace(x.placement, copies=step.arg(1, "times"))


def share_of_gradient(step: Step) -> Placement:
    x = step.operands()[0]
    if x.kind == "S" and step.arg(2, "may_be_cut", False):
        return x.placement
    if x.kind in "SP":
        conflict(step, [x], f"after the region{_here(step)} all ranks of {step.axis} are to have all positions")
    if x.kind == "?" and x.placement.choice is not None:
        x.placement.choice.decide("R", step.place)
    if x.kind == "I" and not x.neutral:
        step.fail(f"{x.called} is {x.placement.describe()}: a share of its gradient is taken, and nobody sums them", "E6")
    return Placement("I", since=step.label("the end of the model"))


def share_of_labels(step: Step) -> Placement:
    labels = step.operands()[0]
    if labels.kind in "SP":
        conflict(step, [labels], "the labels of all ranks are counted here")
    return Placement("P", since=step.label("its own labels"))


def weighed(step: Step) -> Placement:
    """Placement of a loss times the weight of its labels."""
    x, weight = step.operands()[:2]
    if not x.placement.mean:
        conflict(step, [x, weight], "a mean over a rank's own labels is expected here: is it loss='next_token'?")
    return Placement("P", since=step.label("weighed"))


def split_column(step: Step) -> Placement:
    x, weight = step.operands()[:2]
    group = step.arg(3, "group")
    if group is not None:
        x = replace(as_whole(step, x), placement=Placement("R", since=step.label("column")))
    batch = "abcdefgh"[: x.tensor.ndim - 1]
    product = contract(step, [(x, batch + "k"), (weight, "nk")], batch + "n")
    bias = step.operand(2, "bias")
    if bias is not None and product.kind == "S":
        step.result = x.tensor.new_empty(*x.tensor.shape[:-1], weight.tensor.shape[0], device="meta")
    return products.biased(step, product, bias)


def split_row(step: Step) -> Placement:
    x, weight = step.operands()[:2]
    batch = "abcdefgh"[: x.tensor.ndim - 1]
    product = replace(contract(step, [(x, batch + "k"), (weight, "nk")], batch + "n"), since=step.label("row"))
    if product.kind != "P":
        conflict(step, [x, weight], "the sum over ranks needs both cut along the inputs")
    if step.arg(3, "group") is None:
        return product
    whole = Placement("I", since=step.label("row"))
    bias = step.arg(2, "bias")
    if bias is not None:
        join(step, [Operand(step.result, whole), step.look(bias)])
    return whole


def split_embedding(step: Step) -> Placement:
    ids, weight = step.operands()[:2]
    if ids.kind in "SP" or weight.kind != "S" or weight.placement.dim != 0 or weight.placement.outer > 1 or weight.placement.blocks:
        conflict(step, [ids, weight], "ids must be the same on all ranks, and the table cut along its rows")
    return Placement("I", since=step.label("vocab_parallel"))


def own_exchange(step: Step) -> Placement:
    """Placement after a user's exchange, as its ``layouts`` declare it."""
    x = step.operands()[0]
    said, made = parse(step)
    if x.kind == "?" and x.placement.choice is not None and said.kind in "IR":
        x.placement.choice.decide(said.kind, step.place)
    if x.kind != said.kind and not (x.neutral and said.kind in "IR"):
        conflict(step, [x], f"a tensor of placement {said} is expected{_here(step)}")
    if said.kind == "S" and said.dim % x.tensor.ndim != x.placement.dim:
        conflict(step, [x], f"a tensor that is cut along dim {said.dim} is expected{_here(step)}")
    if x.kind == "S" and (x.placement.outer > 1 or x.placement.blocks):
        if made.kind != "S" or made.dim % x.tensor.ndim != x.placement.dim:
            conflict(step, [x], f"a tensor of which each rank has one run is expected{_here(step)}")
        return replace(x.placement, since=step.label("sync"))
    free = made.kind == "S" and x.neutral  # a bias for each head of a flattened batch, say: only the function knows which parts these are
    return replace(made, dim=made.dim % x.tensor.ndim, as_needed=free, since=step.label("sync"))


def parse(step: Step) -> tuple[Placement, Placement]:
    """Return (from, to) of layouts such as "S(1)->R". Raises PlacementError if they are missing or malformed."""
    text = str(step.arg(3, "layouts") or "")
    found = [re.fullmatch(r"([IRP])|S\((-?\d+)\)", side.strip()) for side in text.split("->")]
    if len(found) != 2 or not found[0] or not found[1]:
        step.fail(
            f"sync with a function{_here(step)}: what it does to placements is not known, layouts={text or None!r};"
            " give it as layouts='S(1)->R' or 'P->I' (letters: megatron_sp/schedule/core/placements.py)",
            "unknown",
        )
    first, second = (Placement(m[1]) if m[1] else Placement("S", int(m[2])) for m in found if m)
    return first, second


RULES: dict[str, Rule] = {
    f.__name__: f
    for f in (
        own_exchange,
        copy_to,
        reduce_from,
        gather_from,
        scatter_to,
        reduce_scatter_to,
        all_to_all,
        take_share,
        repeated_heads,
        share_of_gradient,
        share_of_labels,
        weighed,
        split_column,
        split_row,
        split_embedding,
    )
}


_SPLIT_LAYERS = {"split_column": products.linear, "split_row": products.linear, "split_embedding": products.embedding}


def elsewhere(step: Step) -> Placement:
    """Placement after an exchange over another axis than the one followed: split layers act as whole ones, all else is unchanged."""
    if step.name in _SPLIT_LAYERS:
        return _SPLIT_LAYERS[step.name](step)
    operands = step.operands()
    return operands[0].placement if operands else WHOLE


def is_elsewhere(step: Step, group: object) -> bool:
    """Return whether a step is an exchange over another axis than this group's."""
    if step.name in _SPLIT_LAYERS and step.axis != "tp":
        return True
    groups = [a for a in step.args if hasattr(a, "rank") and callable(getattr(a, "size", None)) and not isinstance(a, Tensor)]
    return bool(groups) and groups[0] is not group


# shapes


def shaped(name: str, args: tuple[Any, ...]) -> Tensor:
    """Return the result of an exchange without other ranks: only its shape is right. Raises ValueError if a dim cannot be cut evenly."""
    x = args[0]
    if name in ("copy_to", "reduce_from", "share_of_gradient", "weighed"):
        return x.view_as(x)
    if name == "take_share":
        return take(*args)
    if name == "repeated_heads":
        return x.repeat_interleave(args[1], args[2])
    if name == "share_of_labels":
        return torch.ones((), dtype=torch.float64)
    if name == "split_column":
        return F.linear(x, args[1], args[2])
    if name == "split_row":
        return F.linear(x, args[1], args[2])
    if name == "split_embedding":
        return F.embedding(x, args[1])
    size = args[1].size()
    if name == "gather_from":
        return torch.cat([x] * size, args[2])
    if name == "own_exchange":
        return _reshaped_as_said(x, size, *(re.search(r"-?\d+", side) for side in args[3].split("->")))
    cut = args[2]
    if x.shape[cut] % size:
        raise ValueError(f"dim {cut} of {list(x.shape)} must be a multiple of the group's size ({size})")
    share = x.narrow(cut, 0, x.shape[cut] // size)
    return torch.cat([share] * size, args[3]) if name == "all_to_all" else share.clone()


def _reshaped_as_said(x: Tensor, size: int, joined: re.Match[str] | None, cut: re.Match[str] | None) -> Tensor:
    y = x if joined is None else torch.cat([x] * size, int(joined[0]))
    return y.view_as(y) if cut is None else y.narrow(int(cut[0]), 0, y.shape[int(cut[0])] // size).clone()
