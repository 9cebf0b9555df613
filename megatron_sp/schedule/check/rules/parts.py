"""Rules of functions that take a tensor apart or put several together: split, unbind, narrow, cat, stack."""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.schedule.check.rules.common import Rule, ask, join_complete, moved, same_rule
from megatron_sp.schedule.core.kinds import ONE_FOR_ALL
from megatron_sp.schedule.core.placement_steps import Step, conflict, cut, leading, refuse_partial
from megatron_sp.schedule.core.placements import Operand, Placement


def split(step: Step, x: Operand) -> Placement | list[Placement]:
    """Placement of ``split``: along the cut dim only into the parts that are cut one by one."""
    dim = step.arg(2, "dim", 0) % x.tensor.ndim
    if dim != x.dim:
        return x.placement
    pieces = [piece.shape[dim] for piece in step.result]
    if len(pieces) == 1:
        return x.placement
    if x.placement.blocks:
        if list(x.placement.blocks) == pieces:
            return replace(x.placement, blocks=())
    else:
        run = x.size // x.placement.outer
        if all(n % run == 0 for n in pieces):
            return [x.placement.at(dim, max(1, n // run)) for n in pieces]
    if set(pieces) == {1}:
        step.fail(
            f"{x.called}, {x.placement.describe()}, is taken apart one by one, and each rank has some of them alone, so what is meant for"
            f" each (a norm for every head) meets others: {ONE_FOR_ALL}",
            "E8",
        )
    return step.fail(
        f"{x.called}, {x.placement.describe()}, is taken apart into {pieces} along that dim, so it is a packed projection and each rank has"
        f" some of the parts: shard it with blocks={len(pieces)} (or the parts' sizes), so that each rank has a share of every part",
        "E8",
    )


def split_named(step: Step, x: Operand) -> Placement | list[Placement]:
    """Placement of vsplit, hsplit and dsplit."""
    dim = {"vsplit": 0, "hsplit": 1, "dsplit": 2}[step.name]
    return split(replace(step, name="split", kwargs={"dim": dim}), x)


def unbind(step: Step, x: Operand) -> Placement:
    dim = step.arg(1, "dim", 0) % x.tensor.ndim
    if dim == x.dim:
        conflict(step, [x], "one of a cut dim is taken, which is another one on each rank")
    return x.placement.at(x.dim - (dim < x.dim))


def narrow(step: Step, x: Operand) -> Placement:
    if step.arg(1, "dim") % x.tensor.ndim == x.dim and step.result.shape != x.tensor.shape:
        conflict(step, [x], "part of a cut dim is taken, which is another part on each rank")
    return x.placement


def cat(step: Step) -> Placement:
    operands = [o for o in step.operands() if o.tensor.shape != (0,)]  # an empty one joins anything
    shares = cut(operands)
    if not shares:
        return join_complete(step, operands)
    dim = step.arg(1, "dim", 0) % step.result.ndim
    first = leading(shares)  # what is cut as needed is cut as the others
    for o in operands:
        if o.is_partial:
            refuse_partial(step, o)
        if not o.is_filled and (not o.is_cut or o.placement != first.placement):
            conflict(step, [first, o], "they are cut in different ways")
    if step.name != "stack" and dim == first.dim and len(operands) > 1:
        conflict(step, operands, "joined along the cut dim, each rank's shares would lie between those of others")
    return first.placement.at(first.dim + (step.name == "stack" and dim <= first.dim))


def stack_named(step: Step) -> Placement:
    """Placement of vstack, hstack and dstack."""
    ndim = step.operands()[0].tensor.ndim
    dim = {"vstack": 0, "row_stack": 0, "hstack": min(1, ndim - 1), "dstack": 2}[step.name]
    if ndim < 2 or (dim == 2 and ndim < 3):
        return ask(step)
    return cat(replace(step, name="cat", args=(step.args[0], dim), kwargs={}))


RULES: dict[str, Rule] = {
    **same_rule("split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split", moved(split)),
    **same_rule("vsplit hsplit dsplit", moved(split_named)),
    **same_rule("unbind select", moved(unbind)),
    "narrow": moved(narrow),
    **same_rule("cat concat concatenate stack", cat),
    **same_rule("vstack hstack dstack row_stack", stack_named),
}
