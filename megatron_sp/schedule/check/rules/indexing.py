"""Rules of functions that read or write what an index names: x[index], x[index] = y, gather, scatter, index_select, copy_.

Nothing may be selected along the cut dim: what an index names there is on some rank, and each rank has its share only.
``walk_index`` tells which dims each item of an index is about.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_sp.schedule.check.rules.common import Rule, ask, same_rule, uniform_or_joined
from megatron_sp.schedule.check.rules.elementwise import elementwise
from megatron_sp.schedule.core.placement_steps import (
    Indexed,
    Step,
    broadcast,
    conflict,
    cut,
    is_mask,
    join,
    refuse_partial,
    refuse_partials,
    require_parts,
    tensors_in,
    walk_index,
)
from megatron_sp.schedule.core.placements import Operand, Placement, PlacementError


def items_of(index: Any) -> tuple[Any, ...]:
    """Return the items of an index, which may be a single one."""
    return index if isinstance(index, tuple) else (index,)


def has_mask(index: Any) -> bool:
    """Return whether an index has a tensor of booleans, so that the size of what it selects depends on values."""
    return any(is_mask(i) for i in items_of(index))


def names_elements(index: Any) -> bool:
    """Return whether an index has tensors or lists, which name elements one by one."""
    return any(isinstance(i, (Tensor, list)) for i in items_of(index))


def part_of(x: Tensor, index: Any) -> Tensor | None:
    """Return x[index] on the meta device; None if the index has a mask."""
    if has_mask(index):
        return None
    return x.detach().to("meta")[tuple(i.to("meta") if isinstance(i, Tensor) else i for i in items_of(index))]


# x[index]


def getitem(step: Step) -> Placement:
    x, index = step.look(step.args[0]), step.args[1]
    if x.is_cut:
        return _of_share(step, x, index)
    named = [step.look(i) for i in tensors_in(index)]
    refuse_partials(step, named)
    if x.kind in "PU":
        return ask(step) if cut(named) else x.placement
    if (looked_up := _looked_up(step, x, index)) is not None:
        return looked_up
    return join(step, step.operands())


def _looked_up(step: Step, x: Operand, index: Any) -> Placement | None:
    """Placement of what a share of numbers names in a whole tensor, as an embedding does; None: the index is of another form."""
    before, named = 0, list[tuple[Operand, int]]()
    for i in walk_index(index, x.tensor.ndim):
        if isinstance(i.item, Tensor) and not is_mask(i.item):
            named.append((step.look(i.item), before))
        elif i.item is None or i.item is Ellipsis or isinstance(i.item, slice):
            before += 1 if i.item is not Ellipsis else i.width
        else:
            return None
    if len(named) != 1 or not named[0][0].is_cut:
        return None
    (share, place), *_ = named
    require_parts(step, [x], share)
    return share.placement.at(share.dim + place)


def _of_share(step: Step, x: Operand, index: Any) -> Placement:
    """Placement of ``x[index]`` for a share; the dims that tensors and lists make replace those that they index, or come first."""
    if any(step.look(i).kind in "SPR" for i in items_of(index) if isinstance(i, Tensor)):
        return ask(step)
    kept: list[int | None] = []  # for each dim of the result, except those that tensors and lists make: the old dim, None: a new one
    places: list[int] = []  # where in ``kept`` tensors and lists stand
    for i in walk_index(index, x.tensor.ndim):
        if isinstance(i.item, bool) and i.dim <= x.dim:
            return ask(step)
        if isinstance(i.item, (bool, type(None))):
            kept.append(None)
        elif i.item is Ellipsis:
            kept += range(i.dim, i.dim + i.width)
        elif isinstance(i.item, slice):
            if i.covers(x.dim) and not _is_all(i.item, x.size):
                _refuse_part(step, x, i.item)
            kept.append(i.dim)
        elif i.covers(x.dim):
            _refuse_named(step, x) if names_elements(index) else _refuse_part(step, x, i.item)
        elif not isinstance(i.item, int):  # a number selects first, and its dim is gone
            places.append(len(kept))
    at = kept.index(x.dim)
    first = places[0] if len(set(places)) == 1 else 0
    made = step.result.ndim - len(kept) if places and isinstance(step.result, Tensor) else 0
    return x.placement.at(at + (made if at >= first else 0))


def _is_all(item: slice, size: int) -> bool:
    """Return whether a slice takes all of a dim, in order."""
    return len(range(*item.indices(size))) == size and item.step in (None, 1)


def _refuse_part(step: Step, x: Operand, item: Any) -> NoReturn:
    conflict(step, [x], f"part of a cut dim is taken ({item}), which is another part on each rank")


def _refuse_named(step: Step, x: Operand) -> NoReturn:
    conflict(step, [x], "what an index names is on some rank, and each has a share only")


# x[index] = value


def setitem(step: Step) -> Placement:
    """Placement of x after ``x[index] = value``."""
    x, index, value = step.look(step.args[0]), step.args[1], step.args[2]
    operand = step.look(value) if isinstance(value, Tensor) else None
    if operand is not None and operand.is_partial:
        refuse_partial(step, operand)
    if x.is_partial:
        return ask(step)
    if has_mask(index):
        return _written_by_mask(step, x, operand)
    if any(step.look(i).differs for i in tensors_in(index)):
        return ask(step)
    part = part_of(step.args[0], index)
    assert part is not None  # the index has no mask
    if x.is_cut:
        return _written_into_share(step, x, part, operand)
    if operand is not None and operand.is_cut:
        return _share_written(step, x, part, operand)
    # whether an index that names elements covers every row is not known here
    everywhere = part.shape == x.tensor.shape and not names_elements(index)
    others = [x] if operand is None else [x, operand]
    # one value here and another there: shares of it are no longer alike
    return uniform_or_joined(step, others) if everywhere or not x.is_filled else join(step, others)


def _reading(step: Step, part: Tensor) -> Step:
    """Return the step that would read the part that a step writes."""
    return replace(step, name="getitem", args=step.args[:2], result=part)


def _written_into_share(step: Step, x: Operand, part: Tensor, value: Operand | None) -> Placement:
    """Placement of a share after something is written into a part of it."""
    place = getitem(_reading(step, part))
    _require_same_part(step, part, place)
    if value is None:
        return x.placement
    _require_fit(step, part, value)
    broadcast(step, [Operand(part, place), value], part.ndim)
    return value.placement.at(x.dim) if x.placement.as_needed and value.is_cut else x.placement


def _share_written(step: Step, x: Operand, part: Tensor, value: Operand) -> Placement:
    """Placement of a tensor after a share is written into it: if nobody's gradient reaches what it held, it is cut as the share is."""
    reading, written = _reading(step, part), step.args[0]
    if not x.neutral:
        conflict(step, [x, value], "a share is written into what is whole")
    _require_fit(step, part, value)
    for dim in range(x.tensor.ndim):
        made = replace(value.placement, dim=dim)
        try:
            place = getitem(replace(reading, look=partial(_look_as, reading, written, made)))
        except PlacementError:  # this dim is selected from, so the share lies along another
            continue
        same_dim = place.dim - part.ndim == value.dim_from_behind
        if same_dim and x.is_filled and part.shape[place.dim] == value.size:
            return made
    return ask(step)


def _look_as(step: Step, written: Tensor, placement: Placement, tensor: Tensor) -> Operand:
    """Look at a tensor, with the given placement if it is the one that is written to."""
    return Operand(tensor, placement) if tensor is written else step.look(tensor)


def _require_fit(step: Step, part: Tensor, value: Operand) -> None:
    """Raise PlacementError if sizes do not fit, which torch does not report without values (E11)."""
    try:
        fits = torch.broadcast_shapes(part.shape, value.tensor.shape[-part.ndim or value.tensor.ndim :]) == part.shape
    except RuntimeError:
        fits = False
    if not fits:
        step.fail(f"{value.called} of {list(value.tensor.shape)} is written into {list(part.shape)}", "E11")


def _require_same_part(step: Step, part: Tensor, place: Placement) -> None:
    """Raise PlacementError if what is written of a share is not the same part as in the whole (E11)."""
    if not step.whole:
        return
    times = [step.size // place.copies if place.kind == "S" and dim == place.dim else 1 for dim in range(part.ndim)]
    if [n * m for n, m in zip(part.shape, times, strict=True)] != list(step.whole[0]):
        step.fail(f"writes {list(part.shape)} of a share, and {list(step.whole[0])} of the whole", "E11")


def _written_by_mask(step: Step, x: Operand, value: Operand | None) -> Placement:
    """Placement of x after ``x[mask] = value`` with one value; the mask is cut like what it selects from."""
    if value is not None and (value.is_cut or value.tensor.numel() != 1):
        return ask(step)
    placement = x.placement
    for i in walk_index(step.args[1], x.tensor.ndim):
        if x.is_cut and i.dim == x.dim and isinstance(i.item, (int, slice, list)) and i.item != slice(None):
            _refuse_part(step, x, i.item)
        if isinstance(i.item, Tensor):
            placement = _selected_by(step, x, i, placement)
    others = [x] if value is None else [x, value]
    if not x.is_cut:
        return join(step, others)
    require_parts(step, others, x)
    return placement


def _selected_by(step: Step, x: Operand, i: Indexed, placement: Placement) -> Placement:
    """Placement of x after a write to what a mask, or an index beside one, selects."""
    mask = step.look(i.item)
    selects_cut_dim = x.is_cut and i.covers(x.dim)
    same_cut = selects_cut_dim and is_mask(i.item) and mask.is_cut and mask.dim + i.dim == x.dim
    if mask.is_partial or (mask.is_cut and not same_cut):
        conflict(step, [x, mask], "they are cut in different ways")
    if not selects_cut_dim:
        return placement
    if mask.kind not in "SU":
        conflict(step, [x, mask], "what it selects is on some rank, and each has a share only")
    if not mask.is_cut:
        return placement
    share = replace(x, tensor=i.item, placement=x.placement.at(x.dim - i.dim))
    return broadcast(step, [share, mask], i.width).at(x.dim)


# rows that an index names


def _selected_dim(step: Step, x: Operand, place: int) -> int:
    """Return the dim along which an index selects. Raises PlacementError if it is the cut one (E10)."""
    dim = step.arg(place, "dim")
    if not isinstance(dim, int):
        ask(step)
    if x.is_cut and dim % x.tensor.ndim == x.dim:
        _refuse_named(step, x)
    return int(dim) % x.tensor.ndim


def index_select(step: Step) -> Placement:
    x, index = step.operand(0, "input"), step.operand(2, "index")
    if x is None or index is None or index.differs:
        return ask(step)
    _selected_dim(step, x, 1)
    return x.placement if x.differs else join(step, [x])


def gather(step: Step) -> Placement:
    """Placement of ``gather`` and ``take_along_dim``: the index is cut like the input, or the input is whole."""
    broadcasts = step.name == "take_along_dim"
    x = step.operand(0, "input")
    index = step.operand(1, "indices") if broadcasts else step.operand(2, "index")
    place = 2 if broadcasts else 1
    if x is None or index is None or x.is_partial or index.is_partial:
        return ask(step)
    if index.is_cut and not x.is_cut:
        dim = step.arg(place, "dim")
        shared = x.is_filled or (broadcasts and x.tensor.shape[index.dim] == 1)
        if not isinstance(dim, int) or (index.dim != dim % index.tensor.ndim and not shared):
            conflict(step, [x, index], "ranks would pick from the same rows, and each has an index for rows of its own")
        require_parts(step, [x], index)
        return index.placement
    _selected_dim(step, x, place)
    if index.is_filled:
        return x.placement
    if not broadcasts and not index.is_cut:
        conflict(step, [x, index], "the index is whole, and what it picks from is cut")
    return broadcast(step, [x, index], x.tensor.ndim)


def scatter(step: Step) -> Placement:
    """Placement of scatter, index_add and index_copy into a tensor that is cut like the rows."""
    by_rows = step.name.startswith("index")
    x, index, source = step.operand(0, "input"), step.operand(2, "index"), step.operand(3, "source" if by_rows else "src")
    if x is None or index is None or index.is_partial:
        return ask(step)
    dim = _selected_dim(step, x, 1)
    along = [o for o in cut(o for o in (index, source) if o is not None) if o.dim == (0 if o.tensor.ndim < x.tensor.ndim else dim)]
    if along:
        conflict(step, [x, *along], "what an index names is put together from the shares of all ranks, and each has its own only")
    by_element = [index] if step.name.startswith("scatter") and not index.is_filled else []
    return _all_cut_alike(step, x, [o for o in (source, *by_element) if o is not None])


def _all_cut_alike(step: Step, x: Operand, others: list[Operand]) -> Placement:
    """Placement of ``x`` after others, all cut alike, are written into it; if it was filled with one value, it takes their cut."""
    if x.is_filled:
        shares = cut(others)
        if shares and all(o.tensor.ndim == x.tensor.ndim for o in shares):
            require_parts(step, others, shares[0])
            if any(o.placement != shares[0].placement for o in shares):
                conflict(step, others, "they are cut in different ways")
            return shares[0].placement
        if len(others) == 1 and others[0].is_partial and step.name in ("index_add", "scatter_add"):
            return ask(step)
    return broadcast(step, [x, *others], x.tensor.ndim) if cut([x, *others]) else uniform_or_joined(step, [x, *others])


def copy(step: Step) -> Placement:
    """Placement of ``a.copy_(b)``: that of b if a was filled with one value, else the two must fit elementwise."""
    x, source = step.operand(0, "input"), step.operand(1, "src")
    if x is None or source is None:
        return ask(step)
    if not x.is_filled:
        return elementwise(step)
    return source.placement.at(source.dim + x.tensor.ndim - source.tensor.ndim) if source.is_cut else source.placement


RULES: dict[str, Rule] = {
    "getitem": getitem,
    "setitem": setitem,
    "index_select": index_select,
    **same_rule("gather take_along_dim", gather),
    **same_rule("scatter scatter_add index_add index_copy", scatter),
    "copy": copy,
}
