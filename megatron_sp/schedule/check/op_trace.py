"""Trace of what an attention module does to q, k and v before its attention, to verify that early exchanges do the same.

An exchange that starts at the projection sends tensors that the module has not processed yet, so ``early.py`` must
process them before: rotary embedding, and nothing else. Models differ: OPT scales its queries there, OLMo clips, Cohere
2 and SmolLM 3 rotate in some layers only, and their names do not show it. So the torch functions applied to q, k and v
are recorded, and must be those that ``early.py`` applies. Each module is recorded once: what it does does not depend on
values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from megatron_sp.schedule.core.placement_steps import tensors_in
from megatron_sp.schedule.core.placements import PlacementError

_WORDS = {"q": "queries", "k": "keys", "v": "values"}
#: the same numbers in another shape
_MOVES = {
    "view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten", "unsqueeze", "squeeze", "expand", "detach",
    "swapaxes", "movedim", "clone", "T", "mT",
}  # fmt: skip


class OpTrace(TorchFunctionMode):
    """Trace of one module in one pass: ``begin`` with what its projections return, then ``require`` with what its attention gets.

    Args:
        path: of the module.
        where: file and line that asked for early exchanges.
    """

    def __init__(self, path: str, where: str) -> None:
        super().__init__()
        self.path, self.where = path, where
        self._steps: Any = WeakIdKeyDictionary()  # tensor -> what has been done to it
        self._own: dict[str, Counter[str]] = {}

    def begin(self, x: Tensor) -> Tensor:
        """Start recording what is done to a tensor."""
        self._steps[x] = Counter()
        return x

    def sent(self, part: str, x: Tensor) -> None:
        """Record what was done to the tensor exchanged in place of q, k or v; the module must do the same."""
        self._own[part] = self._steps.get(x, Counter())

    def require(self, *qkv: Tensor) -> None:
        """Raise PlacementError if the module does something else to q, k or v before its attention gets them."""
        for part, x in zip("qkv", qkv, strict=True):
            found, own = self._steps.get(x), self._own.get(part, Counter())
            if found is None:
                self._refuse(f"does what cannot be followed to its {_WORDS[part]}")
            if more := found - own:
                self._refuse(f"does this to its {_WORDS[part]}, and no exchange may start before that: {', '.join(more)}")
            if own - found:
                self._refuse(f"does not rotate its {_WORDS[part]}, though it is given angles (position_embeddings)")

    def _refuse(self, what: str) -> NoReturn:
        raise PlacementError(f"overlap_qkv: between projections and attention {self.path} {what}; leave overlap_qkv out ({self.where})")

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [t for t in tensors_in(result) if t.is_floating_point()]
        given = list(tensors_in((args, kwargs)))
        from_qkv = [self._steps[t] for t in given if t in self._steps]
        if made and from_qkv:
            done: Counter[str] = sum(from_qkv, Counter())
            if (step := _told(func, args, kwargs, given, made)) is not None:
                done = done + Counter([step])
            for t in made:
                self._steps[t] = done
        return result


def _told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]) -> str | None:
    """Return a function, with the numbers passed to it, as text; None if it only moves values."""
    name = func.__name__ if func.__name__ != "__get__" else getattr(func.__self__, "__name__", "")
    name = name.strip("_")
    if name in _MOVES or (name in ("to", "type_as", "float") and made[0].dtype == given[0].dtype):
        return None
    words = [_shown(x) for x in (*args, *kwargs.values()) if not any(True for _ in tensors_in(x))]
    learned = ["a parameter"] if any(isinstance(t, torch.nn.Parameter) for t in given) else []
    return " ".join([name, *words, *learned])


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
