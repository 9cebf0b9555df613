"""Hooks that change one input or one output of a module and leave all others as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import copy_to, gather_from, overridable, reduce_from, reduce_scatter_to, scatter_to
from megatron_sp.utils.errors import ConfigError

Change = Callable[[Tensor], Tensor]


def change_input(
    module: nn.Module, path: str, arg: str | int | None, change: Change, where: str, *, first: bool = False
) -> None:
    """Register a hook that applies ``change`` to one input of a module."""
    names = parameter_names(module)
    place, name = _place(names, path, arg, where, module)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name is not None and name in kwargs:
            return args, {**kwargs, name: _changed(kwargs[name], change, path, name)}
        if place is not None and place < len(args):
            return (*args[:place], _changed(args[place], change, path, name or str(place)), *args[place + 1 :]), kwargs
        raise ConfigError(
            f"{path} was called without {name or f'input {place}'}, on which ranks must talk ({where}): give it by name"
        )

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)


def input_name(module: nn.Module, path: str, arg: str | int | None, where: str) -> str:
    """Return the name of an input, or its index if the signature does not name it. Raises ConfigError if there is none (E13)."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # a split layer's forward has other names
    place, name = _place(names, path, arg, where, module)
    return name or str(place)


def change_output(module: nn.Module, path: str, out: int | str | None, change: Change, where: str) -> None:
    """Register a hook that applies ``change`` to one output of a module."""

    def hook(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return _with_changed(result, out, change, path, where)

    module.register_forward_hook(hook)


def _with_changed(result: Any, out: int | str | None, change: Change, path: str, where: str) -> Any:
    if isinstance(result, Tensor) and out is None:
        return change(result)
    if isinstance(result, (tuple, list)) and (out is None or isinstance(out, int)):
        place = out or 0
        if -len(result) <= place < len(result):
            items = list(result)
            items[place] = _changed(items[place], change, path, f"output {place}")
            return type(result)(items) if type(result) in (tuple, list) else type(result)(*items)
    if isinstance(result, dict):  # transformers' outputs are dicts, and keep their order
        key = out if isinstance(out, str) else list(result)[out or 0]
        if key in result:
            result[key] = _changed(result[key], change, path, key)
            return result
    found = (
        list(result)
        if isinstance(result, dict)
        else f"{len(result)} outputs"
        if isinstance(result, (tuple, list))
        else "one output"
    )
    raise ConfigError(
        f"{path} has no output {out!r}, but {found} of type {type(result).__name__}: give out= ({where}, E13)"
    )


def _changed(value: Any, change: Change, path: str, name: str) -> Any:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{path}: {name} is a {type(value).__name__}, and ranks can talk about a tensor only: give arg= or out= (E13)"
        )
    return change(value)


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a forward's inputs, in order; empty if its signature is not available."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _place(
    names: list[str], path: str, arg: str | int | None, where: str, module: nn.Module
) -> tuple[int | None, str | None]:
    # (index, name) of an input; either may be None if the signature does not give it
    if arg is None or isinstance(arg, int):
        place = arg or 0
        if names and place >= len(names):
            raise ConfigError(
                f"{path} has no input {place}: {type(module).__name__}.forward takes {', '.join(names)} ({where}, E13)"
            )
        return place, names[place] if names else None
    if names and arg not in names:
        raise ConfigError(
            f"{path} has no input {arg!r}: {type(module).__name__}.forward takes {', '.join(names)} ({where}, E13)"
        )
    return (names.index(arg) if arg in names else None), arg


MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_gather", "reduce_scatter", "scatter", "all_reduce", "copy")


def make_change(args: dict[str, Any], group: Group, seq_dim: int, path: str, where: str) -> Callable[[Tensor], Tensor]:
    """Convert the arguments of a sync to the function that is applied to the tensor."""
    mode, op = args["mode"], args["op"]
    if mode not in MODES:
        raise ConfigError(f"sync on {path}: mode {mode!r} is not known, only {', '.join(MODES)} ({where})")
    if callable(op):
        return lambda x: own_exchange(x, group, op, args.get("layouts"))
    if mode == "bwd_post":
        if op != "all_reduce":
            raise ConfigError(f"sync on {path}: bwd_post knows all_reduce alone, not {op!r} ({where})")
        return lambda x: copy_to(x, group)
    if op not in OPS:
        raise ConfigError(f"sync on {path}: {op!r} is not known, only {', '.join(OPS)}, or a function ({where})")
    dim, grad = args.get("axis", seq_dim), args.get("grad", "reduce_scatter" if mode == "fwd_pre" else "slice")
    if hasattr(grad, "choose"):
        grad = partial(grad.choose, path)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda x: gather_from(x, group, dim, grad),
        "reduce_scatter": lambda x: reduce_scatter_to(x, group, dim),
        "scatter": lambda x: scatter_to(x, group, dim),
        "all_reduce": lambda x: reduce_from(x, group),
        "copy": lambda x: copy_to(x, group),
    }
    return _explained(changes[op], op, path, where, dim if op in ("all_gather", "reduce_scatter", "scatter") else None)


@overridable
def own_exchange(x: Tensor, group: Group, function: Callable[[Tensor, Group], Tensor], layouts: str | None) -> Tensor:
    """Call a user's function, of which ``cost()`` believes that it does what ``layouts`` says, such as "S(1)->R"."""
    return function(x, group)


def _explained(
    change: Callable[[Tensor], Tensor], op: str, path: str, where: str, dim: int | None
) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        if dim is not None and not -x.ndim <= dim < x.ndim:
            raise ConfigError(f"{op} at {path}: axis {dim} of {list(x.shape)} does not exist ({where}, E13)")
        try:
            return change(x)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(
                f"{op} at {path}: {error}; pad the batch, or choose another number of ranks ({where}, E12)"
            ) from None

    return changed
