"""Guards against uses of a split model that would silently give wrong results.

A copy would compute with the layers of the original; a second schedule would split shares again; transformers' own
``save_pretrained`` would write shares, and ``resize_token_embeddings`` would resize one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import nn

from megatron_sp.schedule.apply import hf_attention
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
    """Mark a model as split, and refuse to copy it."""
    for module in model.modules():
        if not any(
            (module._parameters, module._buffers, module._modules, module._forward_pre_hooks, module._forward_hooks)
        ):
            continue
        module.__dict__[_SPLIT] = True
        module.__dict__["__deepcopy__"] = partial(
            _refuse, f"{type(module).__name__} has been split, and cannot be copied: {_COPY}"
        )


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


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def whole_or_not_at_all(*roots: nn.Module) -> Iterator[None]:
    """Restore these modules, and all inside, if anything is raised while they are changed, including an interrupt."""
    before = _Before(module for root in roots for module in root.modules())
    try:
        yield
    except BaseException:
        before.put_back()
        raise


class _Before:
    """State of modules before a change."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list({id(module): module for module in modules}.values())
        self.attributes = [dict(module.__dict__) for module in self.modules]
        self.registries = [_contents(module.__dict__) for module in self.modules]
        tensors = (p for module in self.modules for p in module._parameters.values() if p is not None)
        self.parameters = [_Parameter(p) for p in {id(p): p for p in tensors}.values()]
        self.exchanges = hf_attention.exchanges_of(self.modules)

    def put_back(self) -> None:
        for module, attributes, registries in zip(self.modules, self.attributes, self.registries, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for (
                registry,
                contents,
            ) in registries:  # the same objects, so that handles of hooks registered earlier still remove them
                _fill(registry, contents)
        for parameter in self.parameters:
            parameter.put_back()
        hf_attention.put_back(self.modules, self.exchanges)


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [
        (value, value.copy())
        for value in attributes.values()
        if isinstance(value, (dict, list, set)) and hasattr(value, "copy")
    ]


def _fill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)


class _Parameter:
    """State of one parameter before a change."""

    def __init__(self, p: nn.Parameter) -> None:
        self.p, self.data, self.grad, self.requires_grad = p, p.data, p.grad, p.requires_grad
        self.notes = dict(p.__dict__)
        held: list[tuple[str, Any]] = [(name, getattr(p, name)) for name in _HOOKS if hasattr(p, name)]
        self.hooks = {name: (hooks, None if hooks is None else dict(hooks)) for name, hooks in held}
        self.grad_dtype = getattr(p, "grad_dtype", None)

    def put_back(self) -> None:
        p = self.p
        p.grad = None  # its shape may not fit the former contents
        p.data = self.data
        if self.grad_dtype is not None and p.grad_dtype != self.grad_dtype:
            p.grad_dtype = self.grad_dtype
        p.requires_grad = self.requires_grad
        p.grad = self.grad
        p.__dict__.clear()
        p.__dict__.update(self.notes)
        for name, (hooks, contents) in self.hooks.items():
            if getattr(p, name) is not hooks:
                setattr(p, name, hooks)
            if hooks is not None:
                _fill(hooks, contents)
