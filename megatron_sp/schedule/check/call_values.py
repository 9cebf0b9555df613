"""Values that pass through a call: tensors in nested containers, real or on the meta device, and function names in all their spellings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.schedule.check.rules.elementwise import ELEMENTWISE
from megatron_sp.schedule.core.placement_steps import is_mask, tensors_in, walk_index

Shapes = list[tuple[int, ...]]
# functions with numbers that are no sizes: places, factors, values
_NUMBERS = {
    *ELEMENTWISE, "full", "new_full", "fill", "setitem", "getitem", "select", "tril", "triu", "roll", "kthvalue", "scatter", "index_add",
    "addmm", "baddbmm", "quantile", "nanquantile", "std", "var", "std_mean", "var_mean", "norm", "normalize", "cumsum", "pad",
}  # fmt: skip
_OPERATORS = {
    "imatmul": "matmul",
    "itruediv": "truediv",
    "radd": "add",
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "rand": "and",
    "ror": "or",
}


class Seen(NamedTuple):
    """Record of a call, to compare the whole model with the split one: shapes of its results, and the numbers it computes with."""

    name: str
    shapes: Shapes
    factors: list[float]
    sizes: list[float]

    @classmethod
    def of(cls, name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
        """Record of a call: shapes of its result, factors, and numbers among its arguments."""
        return cls(name, shapes(result), factors(name, args, kwargs), _numbers((*args, *kwargs.values()), (int, float)))


def in_place(func: Any) -> bool:
    """Return whether a function works in place, by its name."""
    return bool(func.__name__.endswith("_")) and not func.__name__.startswith("__")


def plain(name: str) -> str:
    """Return the base name of a function: add for ``__add__``, ``add_`` and ``__iadd__``."""
    bare = name.strip("_") if name.startswith("__") else name.rstrip("_") if name not in ("requires_grad_",) else name
    return _OPERATORS.get(bare, bare)


def shapes(value: Any) -> Shapes:
    """Shapes of all tensors in a value."""
    return [tuple(t.shape) for t in tensors_in(value)]


def on_meta(value: Any) -> Any:
    """Copy a value with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to("meta")
    if isinstance(value, (tuple, list)):
        items = [on_meta(v) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    return {k: on_meta(v) for k, v in value.items()} if isinstance(value, dict) else value


def numbered(index: Any, shape: tuple[int, ...]) -> Any:
    """Replace masks that have values by the indices they select; how many a mask without values selects is unknown.

    Raises:
        IndexError: a mask is not as large as what it selects from.
    """
    for i in walk_index(index, len(shape)):
        if is_mask(i.item) and tuple(i.item.shape) != shape[i.dim : i.dim + i.width]:
            raise IndexError(f"a mask of {list(i.item.shape)} picks from dims {i.dim} and on of {list(shape)}")
    made: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        made += item.nonzero(as_tuple=True) if is_mask(item) and not item.is_meta else [item]
    return tuple(made) if isinstance(index, tuple) or len(made) > 1 else made[0]


def factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Return the numbers that are used as values; integers are left out where they may be sizes, which shapes of results show."""
    given = [*args, *kwargs.values()]
    if name in ("getitem", "setitem"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        given = [*(i.start or 0 if isinstance(i, slice) else i for i in index), *args[2:]]
    elif name in ("roll", "pad"):
        given = [n for v in given for n in (v if isinstance(v, (tuple, list)) else [v])]
    return _numbers(given, (int, float) if name in _NUMBERS else float)


def _numbers(given: Iterable[Any], kinds: Any) -> list[float]:
    return [float(v) for v in given if isinstance(v, kinds) and not isinstance(v, bool)]


def converted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor of ``x.to(...)`` with only its dtype changed."""
    given = [*args[1:], *kwargs.values()]
    dtype = next((v for v in given if isinstance(v, torch.dtype)), next((v.dtype for v in given if isinstance(v, Tensor)), None))
    x: Tensor = args[0]
    return x if dtype is None or dtype == x.dtype else x.to(dtype)


def integers(value: Any) -> Iterator[int]:
    """All integers in nested tuples and lists."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)) or type(value).__name__ == "Size":
        for item in value:
            yield from integers(item)


def named(result: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a result with names: keys, fields, or places."""
    if isinstance(result, Tensor):
        yield prefix or "0", result
    items: Any = result.items() if isinstance(result, dict) else enumerate(result) if isinstance(result, (tuple, list)) else ()
    if is_dataclass(result) and not isinstance(result, (dict, type)):
        items = ((place.name, getattr(result, place.name)) for place in fields(result))
    for key, value in items:
        yield from named(value, f"{prefix}.{key}" if prefix else str(key))
