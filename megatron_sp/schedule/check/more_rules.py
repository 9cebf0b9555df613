"""More of the table in ``placement_rules.py``: rarer functions, in families that each have a clear rule.

along   computed over some dims, each row by itself: sort, norm, fft; the cut dim must not be among them
picked  rows selected by an index, read or written; nothing is selected along the cut dim
channels  convolutions, pooling, norms by channel: [b, c, ...]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.schedule.check.placement_rules import (
    ELEMENTWISE,
    EXPANSIONS,
    RULES,
    Rule,
    _words,
    ask,
    cat,
    elementwise,
    expand_whole,
    getitem,
    loss,
    moved,
    over,
    split,
)
from megatron_sp.schedule.core.placement_steps import (
    Step,
    broadcast,
    conflict,
    contract,
    cut,
    join,
    placed,
    refuse_partial,
    require_parts,
    runs,
    tensors_in,
)
from megatron_sp.schedule.core.placements import UNIFORM, Operand, Placement

_ELEMENTWISE = _words("""
    erfc exp2 atan arctan asin arcsin acos arccos sinh cosh asinh acosh atanh arctanh sgn frac trunc fix fmod hypot atan2 arctan2 logaddexp
    logaddexp2 xlogy logit sinc lgamma digamma positive float_power absolute negative multiply subtract divide true_divide ldexp deg2rad
    rad2deg isclose isposinf isneginf signbit heaviside fmin fmax nextafter i0 erfinv log10 hardshrink softshrink tanhshrink
    _threshold polar complex angle conj conj_physical resolve_conj greater
    greater_equal less less_equal not_equal logical_xor bitwise_xor bitwise_left_shift bitwise_right_shift lshift rshift real imag
""")


def repeat(step: Step) -> Placement:
    """Placement of ``repeat`` and ``tile``: repeated along the cut dim, a share lies in that many times more parts."""
    x = step.operands()[0]
    if x.kind != "S":
        return expand_whole(step)
    times = step.rest(1, "repeats" if step.name == "repeat" else "dims")
    times = [1] * (x.tensor.ndim - len(times)) + times
    dim = x.placement.dim + len(times) - x.tensor.ndim
    if times[dim] != 1 and x.placement.blocks:
        return ask(step)
    return x.placement.at(dim, x.placement.outer * times[dim])


def as_complex(step: Step, x: Operand) -> Placement:
    if x.placement.dim == x.tensor.ndim - 1:
        conflict(step, [x], "a number's real and imaginary part are on two ranks")
    return x.placement


def glu(step: Step) -> Placement:
    """Placement of ``glu``: if the dim is cut, each of its halves must be cut (a packed projection with blocks=2)."""
    x = step.operands()[0]
    dim = step.arg(1, "dim", -1) % x.tensor.ndim
    if x.kind != "S" or x.placement.dim != dim:
        return elementwise(step)
    if x.placement.blocks or x.placement.outer % 2:
        step.fail(f"{x.called}, {x.placement.describe()}, is two parts of which each rank has a piece: shard it with blocks=2", "E8")
    return x.placement.at(dim, x.placement.outer // 2)


def diff(step: Step) -> Placement:
    """Placement of ``diff``: what is prepended or appended must be cut like the rest."""
    x, *ends = step.operands()
    made = over(2, keeps=True, least=-1)(step)
    assert isinstance(made, Placement)
    for o in ends:
        if o.kind == "P":
            refuse_partial(step, o)
        if made.kind == "S" and o.kind != "U" and (o.kind != "S" or o.placement != made):
            conflict(step, [x, o], "they are cut in different ways")
    if made.kind != "S" and cut(ends):
        conflict(step, [x, *ends], "they are cut in different ways")
    return made


def bucketize(step: Step) -> Placement:
    """Placement of ``bucketize``: each number is compared with all boundaries."""
    x, boundaries = step.operand(0, "input"), step.operand(1, "boundaries")
    if x is None or boundaries is None:
        return ask(step)
    for o in (x, boundaries):
        if o.kind == "P":
            refuse_partial(step, o)
    if boundaries.kind == "S":
        conflict(step, [x, boundaries], "each number is held against all boundaries, of which every rank has a share only")
    return x.placement if x.kind == "S" else elementwise_whole(step, [x, boundaries])


def one(rule: Callable[[Step, Operand], Placement]) -> Rule:
    """Return a rule for one tensor, a share or a partial sum."""
    return lambda step: rule(step, step.operands()[0])


def as_real(step: Step, x: Operand) -> Placement:
    return x.placement


def unfold(step: Step, x: Operand) -> Placement:
    """Placement of ``Tensor.unfold``, which appends a dim; ``F.unfold`` (im2col) has no rule."""
    if step.result.ndim != x.tensor.ndim + 1:
        return ask(step)
    if step.arg(1, "dimension") % x.tensor.ndim == x.placement.dim:
        conflict(step, [x], "windows reach over the ends of a share")
    return x.placement


def pad(step: Step, x: Operand) -> Placement:
    amounts = list(step.arg(1, "pad"))
    place = 2 * (x.tensor.ndim - 1 - x.placement.dim)
    if x.kind == "P":
        if step.arg(2, "mode", "constant") == "constant" and step.arg(3, "value"):
            refuse_partial(step, x)
        return x.placement
    if any(amounts[place : place + 2]):
        conflict(step, [x], "padded along a cut dim, each share would get what belongs to the end of the whole: shift before it is cut")
    return x.placement


def similarity(step: Step) -> Placement:
    operands = step.operands()
    made = broadcast(step, operands, max(o.tensor.ndim for o in operands))
    if made.kind != "S":
        return made
    ndim = max(o.tensor.ndim for o in operands)
    dim = step.arg(2, "dim", 1) % ndim
    if dim == made.dim:
        conflict(step, operands, "the dim that is compared is cut")
    return made.at(made.dim - (dim < made.dim))


# rows that an index names


def _along(step: Step, x: Operand, place: int) -> int:
    """Return the dim along which an index selects. Raises PlacementError if it is the cut one (E10)."""
    dim = step.arg(place, "dim")
    if not isinstance(dim, int):
        ask(step)
    if x.kind == "S" and dim % x.tensor.ndim == x.placement.dim:
        conflict(step, [x], "what an index names is on some rank, and each has a share only")
    return int(dim) % x.tensor.ndim


def index_select(step: Step) -> Placement:
    x, index = step.operand(0, "input"), step.operand(2, "index")
    if x is None or index is None or index.kind in "SP":
        return ask(step)
    _along(step, x, 1)
    return x.placement if x.kind in "SP" else join(step, [x])


def gather(step: Step) -> Placement:
    """Placement of ``gather`` and ``take_along_dim``: the index is cut like the input, or the input is whole."""
    at = (2, 1) if step.name == "gather" else (1, 2)
    x, index = step.operand(0, "input"), step.operand(at[0], "index" if at == (2, 1) else "indices")
    if x is None or index is None or x.kind == "P" or index.kind == "P":
        return ask(step)
    if index.kind == "S" and x.kind != "S":
        dim = step.arg(at[1], "dim")
        shared = x.kind == "U" or (step.name != "gather" and x.tensor.shape[index.placement.dim] == 1)  # take_along_dim broadcasts
        if not isinstance(dim, int) or (index.placement.dim != dim % index.tensor.ndim and not shared):
            conflict(step, [x, index], "ranks would pick from the same rows, and each has an index for rows of its own")
        require_parts(step, [x], index)
        return index.placement
    _along(step, x, at[1])
    if index.kind == "U":
        return x.placement
    if step.name == "gather" and index.kind != "S":
        conflict(step, [x, index], "the index is whole, and what it picks from is cut")
    return broadcast(step, [x, index], x.tensor.ndim)


def put_back(step: Step) -> Placement:
    """Placement of scatter, index_add and index_copy into a tensor that is cut like the rows."""
    x, index = step.operand(0, "input"), step.operand(2, "index")
    source = step.operand(3, "source" if step.name.startswith("index") else "src")
    if x is None or index is None or index.kind == "P":
        return ask(step)
    dim = _along(step, x, 1)
    along = [
        o for o in (index, source) if o is not None and o.kind == "S" and o.placement.dim == (0 if o.tensor.ndim < x.tensor.ndim else dim)
    ]
    if along:
        conflict(step, [x, *along], "what an index names is put together from the shares of all ranks, and each has its own only")
    by_element = [index] if step.name.startswith("scatter") and index.kind != "U" else []
    return _same(step, x, [o for o in (source, *by_element) if o is not None])


def _same(step: Step, x: Operand, others: list[Operand]) -> Placement:
    """Placement of ``x`` after others, all cut alike, are written into it; if it was filled with one value, it takes their cut."""
    if x.kind == "U":
        shares = cut(others)
        if shares and all(o.tensor.ndim == x.tensor.ndim for o in shares):
            require_parts(step, others, shares[0])
            if any(o.kind == "S" and o.placement != shares[0].placement for o in others):
                conflict(step, others, "they are cut in different ways")
            return shares[0].placement
        partial = [o for o in others if o.kind == "P"]
        if partial and len(others) == 1 and step.name in ("index_add", "scatter_add"):
            return ask(step)
    return broadcast(step, [x, *others], x.tensor.ndim) if cut([x, *others]) else elementwise_whole(step, [x, *others])


def elementwise_whole(step: Step, operands: list[Operand]) -> Placement:
    for o in operands:
        if o.kind == "P":
            refuse_partial(step, o)
    return UNIFORM if all(o.kind == "U" for o in operands) and operands else join(step, operands)


def copied(step: Step) -> Placement:
    """Placement of ``a.copy_(b)``: that of b if a was filled with one value, else the two must fit elementwise."""
    x, source = step.operand(0, "input"), step.operand(1, "src")
    if x is None or source is None:
        return ask(step)
    if x.kind == "U":
        return source.placement.at(source.placement.dim + x.tensor.ndim - source.tensor.ndim) if source.kind == "S" else source.placement
    return elementwise(step)


def picked(step: Step, x: Operand, index: tuple[Any, ...]) -> Placement:
    """Placement of x[index] with tensors or lists in the index; their dims replace those that they index, or come first."""
    if any(o.kind in "SPR" for o in map(step.look, (i for i in index if isinstance(i, Tensor)))):
        return ask(step)
    used = sum(_width(i) for i in index if i is not None and i is not Ellipsis)
    kept: list[int | None] = []  # of each dim of the result but those of the index: the old one, None: new
    places: list[int] = []  # among these, where tensors and numbers stood
    old = 0
    for i in index if Ellipsis in [j for j in index if not isinstance(j, (Tensor, list))] else (*index, Ellipsis):
        if i is None:
            kept.append(None)
        elif i is Ellipsis:
            kept += range(old, old := old + x.tensor.ndim - used)
        elif isinstance(i, slice):
            size = x.tensor.shape[old]
            if old == x.placement.dim and len(range(*i.indices(size))) != size:
                conflict(step, [x], f"part of a cut dim is taken ({i}), which is another part on each rank")
            kept.append(old)
            old += 1
        else:
            if not isinstance(i, int):  # a number picks first, and its dim is gone
                places.append(len(kept))
            if old <= x.placement.dim < old + _width(i):
                conflict(step, [x], "what an index names is on some rank, and each has a share only")
            old += _width(i)
    wide = step.result.ndim - len(kept) if isinstance(step.result, Tensor) else 0
    first = places[0] if len(set(places)) == 1 else 0
    at = kept.index(x.placement.dim)
    return x.placement.at(at + (wide if at >= first else 0))


def _width(index: Any) -> int:
    return index.ndim if isinstance(index, Tensor) and index.dtype is torch.bool else 1


def taken(step: Step) -> Placement:
    x = step.look(step.args[0])
    index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    if x.kind == "S" and _has_index(index):
        return picked(step, x, index)
    return getitem(step)


def assigned(step: Step) -> Placement:
    """Placement of x after ``x[index] = value``."""
    x, value = step.look(step.args[0]), step.args[2]
    operand = step.look(value) if isinstance(value, Tensor) else None
    if operand is not None and operand.kind == "P":
        refuse_partial(step, operand)
    if x.kind == "P":
        return ask(step)
    if _has_mask(step.args[1]):
        return _assigned_where(step, x, operand)
    for o in (step.look(i) for i in tensors_in(step.args[1])):
        if o.kind in "SP":
            return ask(step)
    part = part_of(step.args[0], step.args[1])
    reading = replace(step, name="getitem", args=step.args[:2], result=part)
    if x.kind == "S":
        if part is None and operand is not None:
            return ask(step)
        place = taken(reading) if part is not None else x.placement
        _require_same_part(step, part, place)
        if operand is not None and part is not None:
            _require_fit(step, part, operand)
            broadcast(step, [Operand(part, place), operand], part.ndim)
            if x.placement.as_needed and operand.kind == "S":
                return operand.placement.at(x.placement.dim)
        return x.placement
    if operand is None or operand.kind != "S":
        # of an index nobody knows here whether it names every row
        everywhere = part is not None and part.shape == x.tensor.shape and not _has_index(step.args[1])
        others = [x] if operand is None else [x, operand]
        # one value here and another there: shares of it are no longer alike
        return elementwise_whole(step, others) if everywhere or x.kind != "U" else join(step, others)
    if not x.neutral or part is None:
        conflict(step, [x, operand], "a share is written into what is whole")
    _require_fit(step, part, operand)
    for dim in range(x.tensor.ndim):  # filled so far with what nobody's gradient reaches: it is cut as what is written
        made = replace(operand.placement, dim=dim)
        try:
            place = taken(replace(reading, look=lambda t, made=made: Operand(t, made) if t is step.args[0] else step.look(t)))  # type: ignore[misc]
        except Exception:  # this dim is picked from, so it is another
            continue
        same_dim = place.dim - part.ndim == operand.placement.dim - operand.tensor.ndim
        if same_dim and x.kind == "U" and part.shape[place.dim] == operand.tensor.shape[operand.placement.dim]:
            return made
    return ask(step)


def _has_index(index: Any) -> bool:
    return any(isinstance(i, (Tensor, list)) for i in (index if isinstance(index, tuple) else (index,)))


def _require_fit(step: Step, part: Tensor, value: Operand) -> None:
    """Raise PlacementError if sizes do not fit, which torch does not report without values (E11)."""
    try:
        fits = torch.broadcast_shapes(part.shape, value.tensor.shape[-part.ndim or value.tensor.ndim :]) == part.shape
    except RuntimeError:
        fits = False
    if not fits:
        step.fail(f"{value.called} of {list(value.tensor.shape)} is written into {list(part.shape)}", "E11")


def _assigned_where(step: Step, x: Operand, value: Operand | None) -> Placement:
    """Placement of x after ``x[mask] = value`` with one value; the mask is cut like what it selects from."""
    index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    if value is not None and (value.kind == "S" or value.tensor.numel() != 1):
        return ask(step)
    placement = x.placement
    for first, i in placed(index, x.tensor.ndim):
        if x.kind == "S" and first == x.placement.dim and isinstance(i, (int, slice, list)) and i != slice(None):
            conflict(step, [x], f"part of a cut dim is taken ({i}), which is another part on each rank")
        if not isinstance(i, Tensor):
            continue
        mask, width = step.look(i), _width(i)
        inside = x.kind == "S" and first <= x.placement.dim < first + width
        if mask.kind == "P" or (
            mask.kind == "S" and (not inside or mask.placement.dim + first != x.placement.dim or i.dtype is not torch.bool)
        ):
            conflict(step, [x, mask], "they are cut in different ways")
        if inside and mask.kind not in "SU":
            conflict(step, [x, mask], "what it picks is on some rank, and each has a share only")
        if inside and mask.kind == "S":
            made = broadcast(step, [replace(x, tensor=i, placement=x.placement.at(x.placement.dim - first)), mask], width)
            placement = made.at(x.placement.dim)
    others = [x] if value is None else [x, value]
    if x.kind != "S":
        return join(step, others)
    require_parts(step, others, x)
    return placement


def _require_same_part(step: Step, part: Tensor | None, place: Placement) -> None:
    """Raise PlacementError if what is written of a share is not the same part as in the whole (E11)."""
    if part is None or not step.whole:
        return
    times = [step.size // place.copies if place.kind == "S" and dim == place.dim else 1 for dim in range(part.ndim)]
    if [n * m for n, m in zip(part.shape, times, strict=True)] != list(step.whole[0]):
        step.fail(f"writes {list(part.shape)} of a share, and {list(step.whole[0])} of the whole", "E11")


def part_of(x: Tensor, index: Any) -> Tensor | None:
    """Return x[index] on the meta device; None if the index has a mask."""
    if _has_mask(index):
        return None
    items = index if isinstance(index, tuple) else (index,)
    return x.detach().to("meta")[tuple(i.to("meta") if isinstance(i, Tensor) else i for i in items)]


def _has_mask(index: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype is torch.bool for i in (index if isinstance(index, tuple) else (index,)))


# [b, c, ...]


def convolution(step: Step) -> Placement:
    """Placement of functional convolutions: outputs are a dim of the weight, and so are inputs."""
    x, weight, bias = (step.operand(i, name) for i, name in enumerate(("input", "weight", "bias")))
    if x is None or weight is None or x.tensor.ndim != weight.tensor.ndim:
        return ask(step)
    transposed = "transpose" in step.name
    groups = step.arg(6, "groups", 1)
    space = "uvw"[: x.tensor.ndim - 2]
    if x.tensor.shape[1] != (weight.tensor.shape[0] if transposed else weight.tensor.shape[1] * groups):
        step.fail(f"{x.tensor.shape[1]} channels meet a weight of {list(weight.tensor.shape)} and groups={groups}", "E11")
    for o in (x, weight):
        if o.kind == "S" and o.placement.dim > 1:
            conflict(step, [o], "a kernel reaches over the ends of a share")
    if groups == 1:
        inner = space.upper()  # positions before and behind a kernel are not the same dim
        product = contract(step, [(x, "bc" + space), (weight, ("co" if transposed else "oc") + inner)], "bo" + space)
    else:
        product = _by_groups(step, x, weight, groups)
    if bias is None or product.kind not in "SP":
        return product if bias is None else join(step, [Operand(step.result, product), bias])
    if product.kind == "P":
        step.fail(f"each rank would add {bias.called} to its partial sum: split the layer with .row(), which adds it behind the sum", "E3")
    if product.dim == 1 and bias.kind != "S":
        step.fail(f"{bias.called} is whole, and the outputs it is added to are {product.describe()}: split it along", "E4")
    return broadcast(step, [Operand(step.result, product), _of_channels(bias, x)], x.tensor.ndim)


def _by_groups(step: Step, x: Operand, weight: Operand, groups: int) -> Placement:
    """Placement of a grouped convolution: each group has outputs of its own, so a rank needs whole groups and their part of the weight."""
    shares = cut([x, weight])
    if shares and all(o is x and x.placement.dim == 0 for o in shares):
        require_parts(step, [weight], x)
        return x.placement
    if [o.placement.dim for o in shares] != [1, 0]:
        conflict(step, [x, weight], "groups are shared by cutting both the channels and the weight's outputs")
    made = _whole_groups(step, x, groups)
    outputs, rows = step.result.shape[1], weight.tensor.shape[0]
    channels, of_weight = runs(x), runs(weight)
    if [n * rows for n in channels] != [n * x.tensor.shape[1] for n in of_weight] or x.placement.copies != weight.placement.copies:
        conflict(step, [x, weight], "channels and the weight's outputs are cut in different ways")
    blocks = tuple(n * outputs // x.tensor.shape[1] for n in made.blocks)
    return replace(made, blocks=blocks, as_needed=made.as_needed and weight.placement.as_needed)


def _whole_groups(step: Step, x: Operand, groups: int) -> Placement:
    """Return the placement of cut channels. Raises PlacementError if a rank's are not whole groups (E10, E11)."""
    size = x.tensor.shape[1] // groups
    if not size or x.tensor.shape[1] % groups:
        step.fail(f"{x.tensor.shape[1]} channels are no {groups} groups: divide the number of groups, too", "E11")
    if any(n % size for n in runs(x)):
        conflict(step, [x], f"groups of {size} channels are put together from parts that do not lie side by side in the whole")
    return x.placement


def _of_channels(o: Operand, x: Operand) -> Operand:
    """Reshape one number per channel so that it broadcasts with ``x``."""
    return replace(o, tensor=o.tensor.reshape(-1, *[1] * (x.tensor.ndim - 2))) if o.tensor.ndim == 1 and x.tensor.ndim > 1 else o


def by_channel(step: Step) -> Placement:
    """Placement of norms and running statistics by channel; batch_norm looks at all rows, so these must not be cut."""
    x = step.operands()[0]
    others = step.operands()[1:]
    if x.kind == "P":
        refuse_partial(step, x)
    of_layer = isinstance(step.module, nn.GroupNorm) and others and all(o.name and o.kind == "S" for o in others)
    if step.name == "group_norm" and not of_layer:
        return ask(step)  # how many groups a rank has to have is known of a layer that is split alone
    if x.kind != "S" or (x.placement.dim == 0 and step.name == "batch_norm") or x.placement.dim > 1:
        conflict(step, step.operands(), "each channel is normed by itself, over everything else: cut it along channels")
    if x.placement.dim == 1 and any(o.kind != "S" for o in others):
        conflict(step, step.operands(), "channels are cut and their weights are not")
    if x.placement.dim == 1 and step.name == "group_norm":
        _whole_groups(step, x, step.arg(1, "num_groups"))
    return broadcast(step, [x, *(_of_channels(o, x) for o in others)], x.tensor.ndim)


def prelu(step: Step) -> Placement:
    """Placement of ``prelu``, with one slope or one for each channel."""
    x, weight = step.operands()[:2]
    if x.kind == "P":
        refuse_partial(step, x)
    return broadcast(step, [x, _of_channels(weight, x) if weight.tensor.numel() > 1 or weight.kind == "S" else weight], x.tensor.ndim)


def pool(step: Step, x: Operand) -> Placement:
    """Placement of pooling: the digit in the name is the number of dims of a window; there may be no batch dim."""
    if x.kind == "P":
        if "max" in step.name:
            refuse_partial(step, x)
        return x.placement
    if x.placement.dim >= x.tensor.ndim - (int(step.name[-2]) if step.name.endswith("d") else x.tensor.ndim - 2):
        conflict(step, [x], "a window reaches over the ends of a share")
    return x.placement


def ctc(step: Step) -> Placement:
    """Refuse ``ctc_loss`` unless its input [time, batch, classes] is whole: a row needs all times and classes."""
    x = step.operands()[0]
    step.fail(
        f"{x.called} is {x.placement.describe()}, and this loss needs all times and classes of a row: make it whole first (all_gather)",
        "E3",
    )


def stacked(step: Step) -> Placement:
    """Placement of vstack, hstack and dstack."""
    ndim = step.operands()[0].tensor.ndim
    dim = {"vstack": 0, "row_stack": 0, "hstack": min(1, ndim - 1), "dstack": 2}[step.name]
    if ndim < 2 or (dim == 2 and ndim < 3):
        return ask(step)
    return cat(replace(step, name="cat", args=(step.args[0], dim), kwargs={}))


def parted(step: Step, x: Operand) -> Placement | list[Placement]:
    """Placement of vsplit, hsplit and dsplit."""
    dim = {"vsplit": 0, "hsplit": 1, "dsplit": 2}[step.name]
    return split(replace(step, name="split", kwargs={"dim": dim}), x)


def channel_dropout(step: Step) -> Placement:
    """Placement of dropout of whole channels (the first one or two dims): ranks with other positions would each drop different channels."""
    x = step.operands()[0]
    unbatched = {"dropout1d": 2, "dropout3d": 4}.get(step.name) == x.tensor.ndim
    active = float(step.arg(1, "p", 0.5)) > 0 and bool(step.arg(2, "training", True))
    if active and x.kind == "S" and x.placement.dim >= 2 - unbatched:
        conflict(step, [x], "a channel is dropped as a whole, and each rank has a part of all channels")
    return elementwise(step)


def spread(step: Step) -> Placement:
    operands = step.operands()
    return broadcast(step, operands, step.result[0].ndim)


def _of(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


ELEMENTWISE |= set(_ELEMENTWISE)
EXPANSIONS |= {"repeat", "tile"}
RULES |= {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **_of("norm linalg_norm linalg_vector_norm quantile nanquantile", over(2)),
    **_of("normalize", over(2, keeps=True, least=1)),
    **_of("var_mean std_mean median nanmedian nanmean aminmax", over(1)),
    **_of("nansum count_nonzero", over(1, sums=True)),
    **_of("sort argsort cummax cummin cumprod softmin", over(1, keeps=True, least=-1)),
    **_of("topk fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", over(2, keeps=True, least=-1)),
    **_of("kthvalue", over(2, least=-1)),
    **_of("mode", over(1, least=-1)),
    **_of("gather take_along_dim", gather),
    **_of("scatter scatter_add index_add index_copy", put_back),
    **_of("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", convolution),
    **_of("batch_norm instance_norm group_norm", by_channel),
    **_of("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d interpolate", one(pool)),
    **_of("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d", one(pool)),
    **_of("dropout1d dropout2d dropout3d feature_alpha_dropout", channel_dropout),
    **_of("vstack hstack dstack row_stack", stacked),
    **_of("vsplit hsplit dsplit", moved(parted)),
    **_of("unsafe_chunk unsafe_split", moved(split)),
    **_of("smooth_l1_loss binary_cross_entropy huber_loss", loss),
    "glu": glu, "repeat": repeat, "tile": repeat, "view_as_real": moved(as_real), "view_as_complex": moved(as_complex),
    "unfold": moved(unfold), "pad": one(pad), "cosine_similarity": similarity, "index_select": index_select, "copy": copied,
    "prelu": prelu, "diff": diff, "bucketize": bucketize,
    "getitem": taken, "setitem": assigned, "moveaxis": RULES["movedim"], "ctc_loss": ctc, "broadcast_tensors": spread,
}  # fmt: skip
