"""Float64 for models that cast to float32 inside (norms, rotary angles, softmax), for comparisons in float64.

Without it, the cast rounds a rank's part of a gradient differently from the whole gradient, and correct schedules
differ by 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BITS = (Tensor.view,)  # these take a dtype to read the same bits otherwise


class Float64Mode(TorchFunctionMode):
    """Function mode in which float64 replaces float32."""

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


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
