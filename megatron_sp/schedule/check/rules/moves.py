"""Rules of functions that move elements within one tensor: reshape, transpose, expand, repeat, flip, pad.

The cut dim is followed to where it goes. It may go anywhere, but each rank's share must be the share of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_sp.schedule.check.rules.common import Rule, as_list, ask, is_share_of, moved, names, of_one, same_rule
from megatron_sp.schedule.core.placement_steps import Step, conflict, join, refuse_partial, require_parts
from megatron_sp.schedule.core.placements import Operand, Placement

#: functions that make more elements from the same ones, so that whole ones may become as large as a share
EXPANSIONS = names("expand expand_as broadcast_to repeat tile")


# other shapes


def reshape(step: Step, x: Operand) -> Placement:
    """Placement after a reshape: a dim is (outer, ranks, run), and the run's position among all elements gives its new dims."""
    placement, old, new = x.placement, tuple(x.tensor.shape), tuple(step.result.shape)
    if step.result.dtype.itemsize != x.tensor.dtype.itemsize:
        return ask(step)
    if placement.blocks:
        return _with_unequal_parts(step, x)
    if old == new:
        return placement
    whole = step.whole[0] if step.whole else None
    for dim, outer in _candidates(step, x):
        if whole is None or is_share_of(new, whole, dim, step.size // placement.copies):
            return placement.at(dim, outer)
        if is_share_of(new, whole, dim, step.size):  # heads that several ranks have were repeated for each of their queries
            return replace(placement.at(dim, outer), copies=1)
    seen = f"; in the whole model it makes {list(whole)}" if whole else ""
    return step.fail(
        f"{x.called}, {placement.describe()}, becomes {list(new)}, in which no dim is {step.size} times as large in the whole model{seen}:"
        " the module has a hard-coded size of the whole model; divide it, .set('<attribute>', divide='tp')",
        "E11",
    )


def _candidates(step: Step, x: Operand) -> Iterator[tuple[int, int]]:
    """Yield (dim of the result, its outer parts) wherever the share may lie after a reshape, from the first dim on."""
    old, new = tuple(x.tensor.shape), tuple(step.result.shape)
    run = old[x.dim] // x.placement.outer
    top = run * math.prod(old[x.dim + 1 :])  # elements of one share that lie in one piece
    asked = step.args[1] if len(step.args) == 2 else step.args[1:]
    left_open = list(asked).index(-1) if isinstance(asked, (tuple, list)) and -1 in asked else None
    for dim, size in enumerate(new):
        behind = math.prod(new[dim + 1 :])
        ends_here = behind < top <= behind * size
        # a share of one: the whole model tells it from any other dim of one, or a size of -1 does
        size_one = size == 1 and behind == top and (bool(step.whole) or dim == left_open)
        if (ends_here or size_one) and top % behind == 0 and size % (top // behind) == 0:
            yield dim, size // (top // behind)


def _with_unequal_parts(step: Step, x: Operand) -> Placement:
    """Placement after a reshape of other dims than the one that is cut in unequal parts."""
    old, new = tuple(x.tensor.shape), tuple(step.result.shape)
    for dim, size in enumerate(new):
        if size == old[x.dim] and math.prod(new[dim + 1 :]) == math.prod(old[x.dim + 1 :]):
            return x.placement.at(dim)
    parts = list(x.placement.blocks)
    return step.fail(f"{x.called} is {x.placement.describe()} in parts of {parts}: split it into these parts first", "E8")


def unsqueeze(step: Step, x: Operand) -> Placement:
    dim = step.arg(1, "dim") % (x.tensor.ndim + 1)
    return x.placement.at(x.dim + (dim <= x.dim))


def squeeze(step: Step, x: Operand) -> Placement:
    given = step.arg(1, "dim")
    dims = range(x.tensor.ndim) if given is None else [d % x.tensor.ndim for d in as_list(given)]
    gone = [d for d in dims if x.tensor.shape[d] == 1]
    if x.dim in gone:
        step.fail(f"{x.called} is {x.placement.describe()}, of which this rank has one and others too: that dim cannot go", "E11")
    return x.placement.at(x.dim - sum(d < x.dim for d in gone))


def as_complex(step: Step, x: Operand) -> Placement:
    if x.dim == x.tensor.ndim - 1:
        conflict(step, [x], "a number's real and imaginary part are on two ranks")
    return x.placement


def as_real(step: Step, x: Operand) -> Placement:
    return x.placement


def unfold(step: Step, x: Operand) -> Placement:
    """Placement of ``Tensor.unfold``, which appends a dim; ``F.unfold`` (im2col) has no rule."""
    if step.result.ndim != x.tensor.ndim + 1:
        return ask(step)
    if step.arg(1, "dimension") % x.tensor.ndim == x.dim:
        conflict(step, [x], "windows reach over the ends of a share")
    return x.placement


# other orders


def transpose(step: Step, x: Operand) -> Placement:
    ndim = x.tensor.ndim
    if ndim < 2:
        return x.placement
    if step.name in ("t", "T", "mT", "H", "mH", "adjoint"):
        first, second = ndim - 2, ndim - 1
    else:
        words = ("axis0", "axis1") if "axis0" in step.kwargs or "axis1" in step.kwargs else ("dim0", "dim1")
        first, second = (step.arg(i, name) % ndim for i, name in enumerate(words, 1))
    return x.placement.at({first: second, second: first}.get(x.dim, x.dim))


def permute(step: Step, x: Operand) -> Placement:
    order = [d % x.tensor.ndim for d in step.rest(1, "dims")]
    return x.placement.at(order.index(x.dim))


def movedim(step: Step, x: Operand) -> Placement:
    ndim = x.tensor.ndim
    source, target = step.arg(1, "source"), step.arg(2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        return ask(step)
    order = [d for d in range(ndim) if d != source % ndim]
    order.insert(target % ndim, source % ndim)
    return x.placement.at(order.index(x.dim))


def flip(step: Step, x: Operand) -> Placement:
    return x.placement if x.dim not in [d % x.tensor.ndim for d in step.rest(1, "dims")] else ask(step)


def roll(step: Step, x: Operand) -> Placement:
    dims = step.arg(2, "dims")
    return x.placement if dims is not None and x.dim not in [d % x.tensor.ndim for d in as_list(dims)] else ask(step)


def triangle(step: Step, x: Operand) -> Placement:
    return x.placement if x.dim < x.tensor.ndim - 2 else ask(step)


# more elements


def expand(step: Step) -> Placement:
    x = step.operands()[0]
    return _expand_share(step, x) if x.is_cut else _expand_whole(step, x)


def _expand_share(step: Step, x: Operand) -> Placement:
    """Placement of an expanded share; heads that several ranks have, if repeated for each rank's queries, are then cut along that dim."""
    placement, local = x.placement.at(x.dim + step.result.ndim - x.tensor.ndim), tuple(step.result.shape)
    whole = step.whole[0] if step.whole and placement.copies > 1 else ()
    for dim in range(len(local) if len(whole) == len(local) else 0):
        if dim == placement.dim or whole[dim] != local[dim] * placement.copies:
            continue
        if placement.copies < step.size:
            step.fail(f"{x.called}, of which {placement.copies} ranks each have the same share, becomes cut along two dims", "unknown")
        return replace(placement.at(dim, 1), copies=1)
    return placement


def _expand_whole(step: Step, x: Operand) -> Placement:
    """Placement of a whole tensor repeated to the length of a share (this rank's heads, say): all shares of what is repeated are alike."""
    local = tuple(step.result.shape)
    whole = step.whole[0] if step.whole else local
    for dim, n in enumerate(local if len(local) == len(whole) else ()):
        if n != whole[dim] and is_share_of(local, whole, dim, step.size) and not x.is_partial:
            made = Placement("S", dim, since=f"{step.place} {step.name} to the size of a share")
            require_parts(step, [x], Operand(step.result, made))
            return made
    return x.placement if x.kind in "PU" else join(step, step.operands())


def repeat(step: Step) -> Placement:
    """Placement of ``repeat`` and ``tile``: repeated along the cut dim, a share lies in that many times more parts."""
    x = step.operands()[0]
    if not x.is_cut:
        return _expand_whole(step, x)
    times = step.rest(1, "repeats" if step.name == "repeat" else "dims")
    times = [1] * (x.tensor.ndim - len(times)) + times
    dim = x.dim + len(times) - x.tensor.ndim
    if times[dim] != 1 and x.placement.blocks:
        return ask(step)
    return x.placement.at(dim, x.placement.outer * times[dim])


def repeat_interleave(step: Step, x: Operand) -> Placement:
    dim, times = step.arg(2, "dim"), step.arg(1, "repeats")
    if not isinstance(dim, int):
        return ask(step)
    if dim % x.tensor.ndim != x.dim:
        return x.placement
    if not isinstance(times, int):
        return ask(step)
    for_queries = x.placement.copies > 1 and x.size == 1 and bool(step.whole)
    if for_queries and step.whole and is_share_of(step.result.shape, step.whole[0], x.dim, step.size):
        return replace(x.placement, copies=1)  # a head that several ranks have, repeated for the queries of each
    return ask(step) if x.placement.blocks else x.placement


def pad(step: Step, x: Operand) -> Placement:
    amounts = list(step.arg(1, "pad"))
    place = 2 * (x.tensor.ndim - 1 - x.dim)
    if x.is_partial:
        if step.arg(2, "mode", "constant") == "constant" and step.arg(3, "value"):
            refuse_partial(step, x)
        return x.placement
    if any(amounts[place : place + 2]):
        conflict(step, [x], "padded along a cut dim, each share would get what belongs to the end of the whole: shift before it is cut")
    return x.placement


RULES: dict[str, Rule] = {
    **same_rule("view reshape flatten unflatten view_as reshape_as", moved(reshape)),
    "unsqueeze": moved(unsqueeze),
    "squeeze": moved(squeeze),
    "view_as_real": moved(as_real),
    "view_as_complex": moved(as_complex),
    "unfold": moved(unfold),
    **same_rule("transpose swapaxes swapdims t T mT H mH adjoint", moved(transpose)),
    "permute": moved(permute),
    **same_rule("movedim moveaxis", moved(movedim)),
    "flip": moved(flip),
    "roll": moved(roll),
    **same_rule("tril triu", moved(triangle)),
    **same_rule("expand expand_as broadcast_to", expand),
    **same_rule("repeat tile", repeat),
    "repeat_interleave": moved(repeat_interleave),
    "pad": of_one(pad),
}
