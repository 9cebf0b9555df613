"""Models with empty weights, which take no memory while a schedule is written, and their initialisation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.splits import names_of
from megatron_sp.utils.errors import ConfigError

META = torch.device("meta")


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Give modules that are created inside parameters without contents (meta device); ``build()`` initialises them.

    Args:
        enable: False: no effect.
        include_buffers: also make buffers empty.
    """

    def empty(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == META:
            return None  # stays as it is, so that tied ones stay tied
        return nn.Parameter(parameter.detach().to(META), requires_grad=parameter.requires_grad)

    def no_buffer(_: nn.Module, __: str, buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else buffer.to(META)

    handles = [register_module_parameter_registration_hook(empty)] if enable else []  # type: ignore[arg-type]
    if enable and include_buffers:
        handles.append(register_module_buffer_registration_hook(no_buffer))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fill(model: nn.Module, group: Group, init: bool | Callable[..., Any] | None) -> None:
    """Initialise empty weights, in full on every rank; with ``init``, initialise all weights.

    Args:
        init: a function of (module) or (module, path); True or None: the modules' own ``_init_weights`` or
            ``reset_parameters``.

    Raises:
        ConfigError: some weights have no initialiser; names them.
    """
    empty = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.device == META]
    if not empty and not init:
        return
    _materialise(model, _device(model, group))
    _draw(model, init or True, None if init else {name.rpartition(".")[0] for name in empty})
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if missing := [name for name in empty if _is_marked(tensors[name])]:
        raise ConfigError(
            f"{', '.join(missing[:6])}{', ...' if len(missing) > 6 else ''} have no contents, and their modules have no reset_parameters()"
            " that gives them some: build(sch, init_weights=function of (module, path))"
        )


def _device(model: nn.Module, group: Group) -> torch.device:
    found = [t.device for t in (*model.parameters(), *model.buffers()) if t.device != META]
    if found:
        return found[0]
    backend = str(getattr(group, "name", lambda: "")()) if torch.cuda.is_available() else ""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend.lower() else torch.device("cpu")


def _mark(t: Tensor) -> Tensor:
    """Fill a tensor with a value that no initialiser draws."""
    return t.fill_(float("nan") if t.is_floating_point() or t.is_complex() else 0 if t.dtype == torch.bool else torch.iinfo(t.dtype).min)


def _is_marked(t: Tensor) -> bool:
    if t.is_floating_point() or t.is_complex():
        return bool(torch.isnan(t).any())
    return t.dtype == torch.bool or bool((t == torch.iinfo(t.dtype).min).any())


def _materialise(model: nn.Module, device: torch.device) -> None:
    for names in names_of(model).values():
        path, _, last = names[0].rpartition(".")
        old = model.get_submodule(path)._parameters[last]
        if old is None or old.device != META:
            continue
        new = nn.Parameter(_mark(torch.empty_like(old, device=device)), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for name in names:
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._parameters[last] = new
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device == META:
                module._buffers[name] = _mark(torch.empty_like(buffer, device=device))


def _draw(model: nn.Module, init: bool | Callable[..., Any], only: set[str] | None) -> None:
    own = getattr(model, "_init_weights", None)
    with torch.no_grad():
        for path, module in model.named_modules():
            owns = any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
            if not owns or (only is not None and path not in only):
                continue
            if callable(init):
                init(*(module, path)[: _arguments(init)])
            elif own is not None:
                own(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _arguments(function: Callable[..., Any]) -> int:
    """Return the number of arguments to pass: 1, or 2 if the function takes the path as well."""
    try:
        kinds = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return 1
    return 2 if len([p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 1 else 1
