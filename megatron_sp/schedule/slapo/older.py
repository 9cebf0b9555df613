"""Other arguments of Slapo's ``sync``: forward, backward or both of early versions, and "RS->SR" to change how a tensor is split."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import all_to_all
from megatron_sp.schedule.apply.splits import tensor_of
from megatron_sp.schedule.core.kinds import find_kind
from megatron_sp.schedule.schedule import Selection
from megatron_sp.schedule.slapo.methods import method_of
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.slapo.schedule import SlapoSchedule

MODES = {"fw_pre": "fwd_pre", "fw_post": "fwd_post", "bw_post": "bwd_post"}  # as in an example in Slapo's documentation
RESHARDS: dict[str, tuple[str, int] | tuple[str, int, int] | None] = {
    "RR->RR": None,
    "RS->RS": None,
    "SR->SR": None,
    "RR->RS": ("scatter", -1),
    "RR->SR": ("scatter", -2),
    "RS->RR": ("all_gather", -1),
    "SR->RR": ("all_gather", -2),
    "RS->SR": ("all_to_all", -2, -1),
    "SR->RS": ("all_to_all", -1, -2),
}


def exchanges(sch: SlapoSchedule, mode: str, kwargs: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (mode, operation, keywords) that the modes forward, backward or both of early versions stand for.

    Raises:
        ConfigError: another mode or other keywords; nothing is split yet; or the split does not need this collective.
    """
    where = f"sync on {sch.path or 'the model'}"
    if mode not in ("forward", "backward", "both") or kwargs:
        raise ConfigError(
            f"{where}: name the op at {mode!r}, such as sync('fwd_post', 'all_reduce'); only forward, backward and both of early"
            f" versions say it by themselves, and take nothing else{', not ' + ', '.join(kwargs) if kwargs else ''}"
        )
    kind, axis = _result(sch)
    if kind is None:
        raise ConfigError(
            f"{where}: {mode} asks what the result has become: write .shard() of its weight first, or name mode and operation"
        )
    if kind == "partial":
        if mode != "forward":
            raise ConfigError(
                f"{where}: it is split by its inputs, so it has a sum to make of its result, and none of a gradient: use forward"
            )
        yield "fwd_post", "all_reduce", {}
        return
    if mode != "backward":
        yield "fwd_post", "all_gather", {"axis": axis}
    if mode != "forward" and not is_by_channels(sch.mod):
        yield "bwd_post", "all_reduce", {}


def _result(sch: SlapoSchedule) -> tuple[str | None, int | None]:
    """Return ("partition", axis), ("partial", None), or (None, None), from the lines so far."""
    known, module = find_kind(sch.mod), sch.mod
    found: tuple[str | None, int | None] = (None, None)
    for line in sch.schedule.directives:
        if line.do != "shard" or line.on != sch.path:
            continue
        name, axis = line.args["tensor"], line.args["axis"]
        tensor = tensor_of(module, name)
        if tensor is None:
            continue  # build() reports it
        dim = axis % tensor.ndim
        if known is not None and dim == known.out_dims.get(name, -1):
            found = ("partition", known.out_axis) if found[0] is None else found
        elif known is not None and dim == known.in_dims.get(name, -1):
            found = ("partial", None)
        elif known is None:
            said = method_of(module).infer_output_type(sch, name, tensor.shape[dim] // sch.world_size, axis)
            found = said if said[0] is not None else found
    return found


def is_by_channels(module: nn.Module) -> bool:
    """Return whether each output depends on one input only, as in BatchNorm: if split, there is nothing to sum."""
    kind = find_kind(module)
    return kind is not None and kind.by_channel


def is_reshard(op: str) -> bool:
    """Return whether an operation is one of the reshards of early versions, such as "RS->SR"."""
    return op in RESHARDS


def put_reshard(line: Selection, path: str, mode: str, op: str, kwargs: dict[str, Any]) -> None:
    """Add a change of split of the last two dims, R whole and S split. Raises ConfigError: bwd_post, or keywords."""
    if kwargs:
        raise ConfigError(f"sync on {path}: {op!r} takes no {', '.join(kwargs)}: its letters say which dims are meant")
    if mode == "bwd_post":
        raise ConfigError(f"sync on {path}: {op!r} is for fwd_pre and fwd_post; the gradient goes the other way by itself")
    step = RESHARDS[op]
    if step is None:
        return
    if len(step) == 2:
        line.sync(mode, step[0], axis=step[1])
    else:
        line.sync(mode, partial(_trade, split=step[1], join=step[2]), layouts=f"S({step[2]})->S({step[1]})")


def _trade(x: Tensor, group: Group, *, split: int, join: int) -> Tensor:
    return all_to_all(x, group, split, join)
