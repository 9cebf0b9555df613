"""From a schedule in Slapo's spelling to the model: weights, then what ``Schedule.apply`` does, then what Slapo's users expect of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import broadcast
from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.splits import tensor_of
from megatron_sp.schedule.apply.undo import whole_or_not_at_all
from megatron_sp.schedule.check.decision import decide
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.placements import NotFollowed
from megatron_sp.schedule.slapo.first_pass import FirstPass
from megatron_sp.schedule.slapo.methods import method_of
from megatron_sp.schedule.slapo.older import is_by_channels
from megatron_sp.schedule.slapo.schedule import SlapoSchedule
from megatron_sp.schedule.slapo.weights import fill
from megatron_sp.utils.errors import ConfigError

Init = bool | Callable[..., Any] | None
_OLDER = {"init_required": "init_weights", "param_init_fn": "init_weights"}


def build(sch: SlapoSchedule, target: str | None = None, init_weights: Init = None, **kwargs: Any) -> tuple[nn.Module, None]:
    """Apply a schedule.

    Args:
        sch: of the whole model.
        target: engines of others are refused.
        init_weights: None: weights stay, rank 0's count, and what has no contents yet (``init_empty_weights``) is drawn; True: the whole
            model's weights are drawn anew before they are split, by the modules' own methods; a function of (module) or (module, path): by
            that; False: nothing is drawn nor sent. Slapo's default is True, which loses weights that have been loaded.
        kwargs: ``init_required`` and ``param_init_fn``, as early versions say it.
    Returns:
        (the model, None): the optimizer is yours to make, of the parameters that are there now.
    Raises:
        ConfigError: a line that cannot be; a target; weights that nobody draws.
    """
    for name in [name for name in _OLDER if name in kwargs]:
        init_weights = kwargs.pop(name)
    if target is not None or kwargs:
        what = f"target={target!r}" if target is not None else ", ".join(kwargs)
        raise ConfigError(f"build() knows no {what}: train the model it returns in a loop of yours, or in the project's (docs/schedule.md)")
    if sch.path:
        raise ConfigError(f"build() takes the schedule of the whole model, not of {sch.path}")
    owner = sch.schedule
    owner.directives = without_empty_sums(sch)
    with suppress(NotFollowed):  # before any weight is drawn
        decide(sch.mod, owner.directives, owner.mesh, owner.seq_dim)
    first = FirstPass(sch.mod, owner.directives, owner.mesh, owner.seq_dim)
    first.look()
    try:
        with whole_or_not_at_all(sch.mod):
            model = _built(sch, init_weights)
    except BaseException:
        owner.applied = None
        raise
    first.watch(model)
    return model, None


def _built(sch: SlapoSchedule, init_weights: Init) -> nn.Module:
    settle_weights(sch.mod, init_weights, sch.group)
    lines = [(path, d.args) for d in sch.schedule.directives if d.do == "shard" for path in expand(sch.mod, d.on)]
    split = [(sch[path] if path else sch, args["tensor"], args["axis"]) for path, args in lines]
    _follow(split, "preproc", sch.world_size)
    model = sch.schedule.apply(guess=True)  # the defaults are Slapo's, and written down (docs/schedule.md)
    assert sch.schedule.applied is not None
    _follow(split, "postproc", 1)
    _note_shapes(sch.schedule.applied)
    sch.schedule.applied = _complete(sch.schedule.applied)
    return model


def settle_weights(model: nn.Module, init: Init, group: Group) -> None:
    """All parameters and buffers have contents, the same on every rank of the group."""
    if init is False:
        return
    fill(model, group, init)
    for tensor in (*model.parameters(), *model.buffers()):
        given = tensor.detach()
        if given.is_contiguous():
            broadcast(given, group)
        else:
            given.copy_(broadcast(given.contiguous(), group))


def without_empty_sums(sch: SlapoSchedule) -> list[Directive]:
    """The lines but for sums of a gradient where each channel is its own: ranks have different ones, and Slapo's own test adds them up."""
    lines = sch.schedule.directives
    shards = {path for d in lines if d.do == "shard" for path in expand(sch.mod, d.on)}
    by_channel = {path for path in shards if is_by_channels(sch.mod.get_submodule(path))}
    kept = []
    for line in lines:
        sums = line.do == "sync" and (line.args["mode"], line.args["op"]) in (("bwd_post", "all_reduce"), ("fwd_pre", "copy"))
        if sums and line.on in by_channel:
            warnings.warn(
                f"{line.on} is split by channels, so ranks have gradients of different channels: {line.args['op']} ({line.where}) would"
                " add them up, and is left out",
                stacklevel=3,
            )
        else:
            kept.append(line)
    return kept


def _follow(split: list[tuple[SlapoSchedule, str, int]], step: str, ranks: int) -> None:
    """Call preproc or postproc of the methods that are registered for these modules."""
    for sub, name, axis in split:
        tensor = tensor_of(sub.mod, name)
        if tensor is not None and -tensor.ndim <= axis < tensor.ndim:
            getattr(method_of(sub.mod), step)(sub, name, tensor.shape[axis] // ranks, axis)


def _note_shapes(applied: Applied) -> None:
    """``orig_shape`` of split parameters, for which Slapo's users look."""
    for name, parameter in applied.model.named_parameters():
        if name in applied.splits:
            parameter.orig_shape = torch.Size(applied.specs[name].shape)  # type: ignore[attr-defined]


def _complete(applied: Applied) -> Applied:
    """Sum gradients that are parts as they arise, since a loop for Slapo's models does nothing behind backward."""

    def hook(grad: Tensor, name: str) -> Tensor:
        summed = grad.clone()
        applied.sum_parts(name, summed)
        return summed

    for name, parameter in applied.model.named_parameters():
        if applied.specs[name].sums:
            parameter.register_hook(partial(hook, name=name))
    return replace(applied, specs={name: replace(spec, sums=()) for name, spec in applied.specs.items()})
