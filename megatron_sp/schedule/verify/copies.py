"""Copies of a model for comparison: without random operations, in float64, and without what float64 does not support.

Dropout draws different numbers in the whole model and in shares of it, so it is off in both. transformers' grouped
matrix multiplication of experts does not exist in float64; its loop over experts does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_BITS = (Tensor.view,)  # these take a dtype to read the same bits otherwise


class Float64Mode(TorchFunctionMode):
    """Function mode in which float64 replaces float32, for models that cast to it inside (norms, rotary angles, softmax).

    Without it, the cast rounds a rank's part of a gradient differently from the whole gradient, and correct schedules
    differ by 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double(**named)
        if func not in _BITS:
            args = tuple(_wider(a) for a in args)
            named = {name: _wider(value) for name, value in named.items()}
        return func(*args, **named)


class WithoutDropout(TorchFunctionMode):
    """Function mode in which dropout does nothing, also where its rate is no attribute that ``without_dropout`` knows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.__name__ == "scaled_dot_product_attention":
            return func(
                *args[:4], *(0.0 for _ in args[4:5]), *args[5:], **{**named, **({} if args[4:] else {"dropout_p": 0.0})}
            )
        if "dropout" in func.__name__:
            return args[0] if args else named["input"]
        return func(*args, **named)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def deterministic_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model in ``dtype``, without dropout."""
    made = copy.deepcopy(model).to(dtype)
    without_dropout(made)
    if dtype is torch.float64:
        one_expert_at_a_time(made)
    return made


def drops(model: nn.Module) -> bool:
    """Return whether a model has any dropout that is on."""
    return any(m.training for m in model.modules()) and any(_rates(holder) for holder in _holders(model))


def without_dropout(model: nn.Module) -> None:
    """Turn all dropout off, in modules and in the configurations that they read; training mode is otherwise unchanged."""
    for holder in _holders(model):
        for name in _rates(holder):
            setattr(holder, name, 0.0)


def _holders(model: nn.Module) -> list[Any]:
    modules: list[Any] = list(model.modules())
    configs = {id(c): c for m in modules if (c := m.__dict__.get("config")) is not None}
    return modules + list(configs.values())


def _rates(holder: Any) -> list[str]:
    is_dropout = "drop" in type(holder).__name__.lower()
    values = vars(holder).items() if hasattr(holder, "__dict__") else ()
    return [
        name
        for name, v in values
        if isinstance(v, float) and v > 0 and ("drop" in name or (is_dropout and name == "p"))
    ]


def one_expert_at_a_time(model: nn.Module) -> None:
    """Make transformers' models compute experts in a loop."""
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) not in (None, "eager"):
            config._experts_implementation = "eager"
