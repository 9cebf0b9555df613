"""Changes of one tensor among a module's inputs, its outputs, or a nested result; everything else stays as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.mappings import copy_to, gather_from, overridable, reduce_from, reduce_scatter_to, scatter_to
from megatron_sp.utils.errors import ConfigError

Change = Callable[[Tensor], Tensor]
Name = str | int | None  # of an input or an output: its name or key, or its index; None: the first
MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_gather", "reduce_scatter", "scatter", "all_reduce", "copy")
# optional records of a transformers result, of which a rank has shares: of positions, and of heads
HIDDEN = ("hidden_states", "encoder_hidden_states")
HEADS = ("attentions", "encoder_attentions")


def change_input(module: nn.Module, path: str, arg: Name, change: Change, where: str, *, first: bool = False) -> None:
    """Register a hook that applies ``change`` to one input of a module."""
    place, name = _place(parameter_names(module), path, arg, where, module)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name is not None and name in kwargs:
            return args, {**kwargs, name: _changed(kwargs[name], change, path, name)}
        if place is not None and place < len(args):
            return (*args[:place], _changed(args[place], change, path, name or str(place)), *args[place + 1 :]), kwargs
        what = name or f"input {place}"
        raise ConfigError(f"{path} was called without {what}, on which ranks must talk ({where}): give it by name")

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)


def change_output(module: nn.Module, path: str, out: Name, change: Change, where: str) -> None:
    """Register a hook that applies ``change`` to one output of a module."""

    def hook(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, Tensor) and out is None:
            return change(result)
        has: Any = "one output"
        if isinstance(result, (tuple, list)):
            has, place = f"{len(result)} outputs", 0 if out is None else out
            if isinstance(place, int) and -len(result) <= place < len(result):
                items = list(result)
                items[place] = _changed(items[place], change, path, f"output {place}")
                return type(result)(items) if type(result) in (tuple, list) else type(result)(*items)
        if isinstance(result, dict):  # transformers' outputs are dicts, and keep their order
            has = list(result)
            key = out if isinstance(out, str) else has[out or 0]
            if key in result:
                result[key] = _changed(result[key], change, path, key)
                return result
        it = type(result).__name__
        raise ConfigError(f"{path} has no output {out!r}, but {has} of type {it}: give out= ({where}, E13)")

    module.register_forward_hook(hook)


def _changed(value: Any, change: Change, path: str, name: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    what = f"{path}: {name} is a {type(value).__name__}"
    raise ConfigError(f"{what}, and ranks can talk about a tensor only: give arg= or out= (E13)")


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a forward's inputs, in order; empty if its signature is not available."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def input_name(module: nn.Module, path: str, arg: Name, where: str) -> str:
    """Return the name of an input, or its index if the signature does not name it."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # a split layer's forward has other names
    place, name = _place(names, path, arg, where, module)
    return name or str(place)


def _place(names: list[str], path: str, arg: Name, where: str, module: nn.Module) -> tuple[int | None, str | None]:
    # (index, name) of an input; either may be None if the signature does not give it
    place = arg or 0 if arg is None or isinstance(arg, int) else None
    if names and (arg not in names if place is None else place >= len(names)):
        what = repr(arg) if place is None else place
        takes = f"{type(module).__name__}.forward takes {', '.join(names)}"
        raise ConfigError(f"{path} has no input {what}: {takes} ({where}, E13)")
    if place is not None:
        return place, names[place] if names else None
    return (names.index(arg) if arg in names else None), arg  # type: ignore[arg-type,return-value]


def make_change(args: dict[str, Any], group: Group, seq_dim: int, path: str, where: str) -> Change:
    """Return the function that a sync with these arguments applies to its tensor."""
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
    if hasattr(grad, "choose"):  # verify() measures which adjoint is needed
        grad = partial(grad.choose, path)

    def changed(x: Tensor) -> Tensor:
        if op in ("all_reduce", "copy"):
            return reduce_from(x, group) if op == "all_reduce" else copy_to(x, group)
        if not -x.ndim <= dim < x.ndim:
            raise ConfigError(f"{op} at {path}: axis {dim} of {list(x.shape)} does not exist ({where}, E13)")
        try:
            if op == "all_gather":
                return gather_from(x, group, dim, grad)
            return reduce_scatter_to(x, group, dim) if op == "reduce_scatter" else scatter_to(x, group, dim)
        except ConfigError:
            raise
        except ValueError as error:
            way_out = "pad the batch, or choose another number of ranks"
            raise ConfigError(f"{op} at {path}: {error}; {way_out} ({where}, E12)") from None

    return changed


@overridable
def own_exchange(x: Tensor, group: Group, function: Callable[[Tensor, Group], Tensor], layouts: str | None) -> Tensor:
    """Call a user's function, of which ``cost()`` believes that it does what ``layouts`` says, such as "S(1)->R"."""
    return function(x, group)


def tensors_of(result: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a nested result, by path."""
    if isinstance(result, Tensor):
        return {prefix or "result": result}
    items: Any = ()
    if isinstance(result, dict):
        items = result.items()
    elif isinstance(result, (tuple, list)):
        items = enumerate(result)
    elif is_dataclass(result) and not isinstance(result, type):
        items = ((f.name, getattr(result, f.name)) for f in fields(result))
    tensors: dict[str, Tensor] = {}
    for key, value in items:
        tensors |= tensors_of(value, f"{prefix}.{key}" if prefix else str(key))
    return tensors


def map_tensors(result: Any, change: Change) -> Any:
    """Apply ``change`` to the floating point tensors of a nested result; dicts are changed in place."""
    if isinstance(result, Tensor):
        return change(result) if result.is_floating_point() else result
    if isinstance(result, dict):
        for key in list(result):
            if (value := map_tensors(result[key], change)) is not result[key]:
                result[key] = value
        return result
    if isinstance(result, (tuple, list)):
        items = [map_tensors(value, change) for value in result]
        return type(result)(items) if type(result) in (tuple, list) else type(result)(*items)
    return result


def records_of(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the records of these names that a result has; a plain tuple has no names, and none."""
    records = {name: result.get(name) for name in names} if isinstance(result, dict) else {}
    return {name: value for name, value in records.items() if isinstance(value, (Tensor, tuple, list))}


def change_records(result: Any, names: tuple[str, ...], change: Change) -> None:
    """Apply ``change`` to the tensors of these records of a transformers result."""
    for name, value in records_of(result, names).items():
        one = isinstance(value, Tensor)
        result[name] = change(value) if one else tuple(change(t) if isinstance(t, Tensor) else t for t in value)
