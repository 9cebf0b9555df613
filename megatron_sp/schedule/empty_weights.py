"""Models without weights: made without memory for them, and initialised when they are built, alike on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_modules

from megatron_sp.comm.collectives import broadcast
from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.plan import names_of
from megatron_sp.utils.errors import ConfigError

Init = bool | Callable[..., Any] | None
_META = torch.device("meta")


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Give modules that are created inside parameters without contents (meta device); ``build()`` initialises them."""

    def without_contents(_: nn.Module, __: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.is_meta:
            return None  # stays as it is, so that tied ones stay tied
        empty = tensor.detach().to(_META)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    hook: Any = without_contents
    handles = [hooks_of_modules.register_module_parameter_registration_hook(hook)] if enable else []
    if enable and include_buffers:
        handles.append(hooks_of_modules.register_module_buffer_registration_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def settle_weights(model: nn.Module, init: Init, group: Group) -> None:
    """Initialise what has no contents, then take rank 0's parameters and buffers on every rank.

    ``init``: None: what has none; True, or a function of (module) or (module, path): all weights; False: do nothing.
    """
    if init is False:
        return
    empty = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if empty or init:
        _initialise(model, init, {name.rpartition(".")[0] for name in empty}, group)
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        unmarked = lambda t: t.dtype != torch.bool and not bool((t.isnan() | (t == _mark(t))).any())
        if missing := [name for name in empty if not unmarked(tensors[name])]:
            more = ", ..." if len(missing) > 6 else ""
            raise ConfigError(
                f"{', '.join(missing[:6])}{more} have no contents, and their modules have no reset_parameters()"
                " that gives them some: build(sch, init_weights=function of (module, path))"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        given = tensor.detach()
        whole = broadcast(given.contiguous(), group)
        if not given.is_contiguous():
            given.copy_(whole)


def device_of(group: Group) -> torch.device:
    """Return the device of a group's tensors: this rank's GPU with NCCL, else the CPU."""
    on_gpu = torch.cuda.is_available() and "nccl" in str(getattr(group, "name", lambda: "")()).lower()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _mark(t: Tensor) -> float:
    # a value that no initialisation leaves: what still has it was not initialised (of bool there is none)
    if t.is_floating_point() or t.is_complex():
        return float("nan")
    return 0 if t.dtype == torch.bool else torch.iinfo(t.dtype).min


def _initialise(model: nn.Module, init: Init, empty: set[str], group: Group) -> None:
    # give empty tensors contents: marks first, then, in these modules (in all, with ``init``), what the module draws
    device = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None)
    device = device or device_of(group)
    for names in names_of(model).values():
        old = model.get_parameter(names[0])
        if old.is_meta:
            new = nn.Parameter(torch.empty_like(old, device=device).fill_(_mark(old)), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            for path, _, last in (name.rpartition(".") for name in names):
                model.get_submodule(path)._parameters[last] = new
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device).fill_(_mark(buffer))
    own, takes_path = getattr(model, "_init_weights", None), False
    if callable(init):
        with suppress(TypeError, ValueError):  # builtins have no signature
            needed = [p for p in inspect.signature(init).parameters.values() if p.default is p.empty]
            takes_path = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed) > 1
    with torch.no_grad():
        for path, module in model.named_modules():
            owns = any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
            if not owns or (not init and path not in empty):
                continue
            if callable(init):
                init(module, path) if takes_path else init(module)
            elif own is not None:
                own(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()
