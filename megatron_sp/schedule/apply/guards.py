"""Guards against uses of a split model that would silently give wrong results.

A copy would compute with the layers of the original; a second schedule would split shares again; transformers' own
``save_pretrained`` would write shares, and ``resize_token_embeddings`` would resize one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from megatron_sp.utils.errors import ConfigError

_SPLIT = "_megatron_sp_split"
_COPY = "copy it before apply(), or give applied.full_state_dict() to a new one"
_INSTEAD = {
    "save_pretrained": "call save_pretrained of the schedule's applied, on every rank: it writes the whole model",
    "push_to_hub": "write the whole model with applied.save_pretrained, and push that",
    "resize_token_embeddings": "do it before apply()",
}


def require_whole(model: nn.Module) -> None:
    """Raise ConfigError if a schedule has been applied to the model, or to a part of it (E15)."""
    if any(_SPLIT in module.__dict__ for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has been split by another schedule already, and its shares would be split again: write all lines into"
            " one schedule, or make the model anew (E15)"
        )


def mark(model: nn.Module) -> None:
    """Mark a model as split, and refuse to copy it.

    Modules without anything of their own are left out: an activation may be one for all models of a process.
    """
    for module in model.modules():
        if not any((module._parameters, module._buffers, module._modules, module._forward_pre_hooks, module._forward_hooks)):
            continue
        module.__dict__[_SPLIT] = True
        module.__dict__["__deepcopy__"] = partial(_refuse, f"{type(module).__name__} has been split, and cannot be copied: {_COPY}")


def guard_shares(model: nn.Module) -> None:
    """Refuse methods that would take this rank's share for the whole model."""
    for name, instead in _INSTEAD.items():
        if callable(getattr(model, name, None)):
            model.__dict__[name] = partial(_refuse, f"{name} of a model of which this rank has a share: {instead}")


def original(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method as the model's class defines it, or None."""
    method = getattr(type(model), name, None)
    return None if method is None else partial(method, model)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(message)
