"""Application of a schedule in Slapo's API: weights, then ``Schedule.apply``, then what Slapo's users expect in addition."""

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
        sch: schedule of the whole model.
        target: must be None; other engines are not supported.
        init_weights: None: existing weights are broadcast from rank 0, and empty ones (``init_empty_weights``) are
            initialised; True: all weights of the whole model are initialised before they are split, by the modules' own
            methods; a function of (module) or (module, path): by that function; False: nothing is initialised or
            broadcast. Slapo's default True loses loaded weights.
        kwargs: ``init_required`` and ``param_init_fn``, the names of ``init_weights`` in early versions.
    Returns:
        (the model, None): create the optimizer yourself, from the parameters that the model has now.
    Raises:
        ConfigError: a line is invalid, there is a target, or some weights cannot be initialised.
    """
    for name in [name for name in _OLDER if name in kwargs]:
        init_weights = kwargs.pop(name)
    if target is not None or kwargs:
        what = f"target={target!r}" if target is not None else ", ".join(kwargs)
        raise ConfigError(
            f"build() knows no {what}: train the model it returns in your own loop, or in the project's (docs/how-to/schedule.md)"
        )
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
    model = sch.schedule.apply(guess=True)  # the defaults are Slapo's, and written down (docs/how-to/schedule.md)
    assert sch.schedule.applied is not None
    _follow(split, "postproc", 1)
    _note_shapes(sch.schedule.applied)
    sch.schedule.applied = _complete(sch.schedule.applied)
    return model


def settle_weights(model: nn.Module, init: Init, group: Group) -> None:
    """Initialise weights and broadcast parameters and buffers, so that they are equal on every rank of the group; see ``build``."""
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
    """Return the lines without gradient sums at layers split by channels, which would add up different channels; Slapo's test has one."""
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
    """Call preproc or postproc of the shard methods of these modules."""
    for sub, name, axis in split:
        tensor = tensor_of(sub.mod, name)
        if tensor is not None and -tensor.ndim <= axis < tensor.ndim:
            getattr(method_of(sub.mod), step)(sub, name, tensor.shape[axis] // ranks, axis)


def _note_shapes(applied: Applied) -> None:
    """Set ``orig_shape`` of split parameters, which Slapo's users rely on."""
    for name, parameter in applied.model.named_parameters():
        if name in applied.splits:
            parameter.orig_shape = torch.Size(applied.specs[name].shape)  # type: ignore[attr-defined]


def _complete(applied: Applied) -> Applied:
    """Sum partial gradients as soon as they are computed, since training loops for Slapo's models do nothing after backward."""

    def hook(grad: Tensor, name: str) -> Tensor:
        summed = grad.clone()
        applied.sum_parts(name, summed)
        return summed

    for name, parameter in applied.model.named_parameters():
        if applied.specs[name].sums:
            parameter.register_hook(partial(hook, name=name))
    return replace(applied, specs={name: replace(spec, sums=()) for name, spec in applied.specs.items()})
