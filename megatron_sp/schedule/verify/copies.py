"""Copies of a model for comparison: without dropout, in float64, and without what does not exist in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Float64Mode(TorchFunctionMode):
    """Mode in which float64 replaces float32."""

    # for models that cast to it inside (norms, rotary angles, softmax): the cast rounds a rank's part of a gradient
    # differently from the whole gradient, and correct schedules differ by 1e-7

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double(**named)
        if func is not Tensor.view:  # which takes a dtype to read the same bits otherwise
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            named = {name: torch.float64 if value is torch.float32 else value for name, value in named.items()}
        return func(*args, **named)


class WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func.__name__ == "scaled_dot_product_attention":
            if args[4:]:
                args = (*args[:4], 0.0, *args[5:])
            else:
                named["dropout_p"] = 0.0
        elif "dropout" in func.__name__:
            return args[0] if args else named["input"]
        return func(*args, **named)


def deterministic_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model in ``dtype``, without dropout."""
    copied = copy.deepcopy(model).to(dtype)
    # dropout draws other numbers in shares of a model than in the whole one
    for holder, name in list(_dropout_rates(copied)):
        setattr(holder, name, 0.0)
    if dtype is torch.float64:  # in which their grouped product does not exist
        one_expert_at_a_time(copied)
    return copied


def drops(model: nn.Module) -> bool:
    return any(m.training for m in model.modules()) and next(_dropout_rates(model), None) is not None


def _dropout_rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    # (module, or configuration that modules read; name of an attribute)
    modules: list[Any] = list(model.modules())
    configs = {id(c): c for m in modules if (c := m.__dict__.get("config")) is not None}
    for holder in [*modules, *configs.values()]:
        is_dropout = "drop" in type(holder).__name__.lower()
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            if isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name == "p")):
                yield holder, name


def one_expert_at_a_time(model: nn.Module) -> None:
    """Let models of transformers compute experts in a loop."""
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) not in (None, "eager"):
            config._experts_implementation = "eager"
