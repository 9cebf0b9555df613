"""Wrapper around the attention of transformers models, which they all look up in one table.

A model's attention calls ``ALL_ATTENTION_FUNCTIONS.get_interface(...)`` for the function that computes it, and looks up
the one that makes its mask in ``ALL_MASK_ATTENTION_FUNCTIONS``. Modules of a model that is split over sp get those
functions with exchanges around them, and masks of whole sequences; all other models get the originals. transformers is
not imported here: whoever has such a model has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_WRAPPED = "_megatron_sp_wrapped"
_OPERANDS = ("query", "key", "value", "attention_mask")


class Exchanges(Protocol):
    """Interface of what a split model does around its attention and its masks."""

    def attend(
        self, function: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any
    ) -> Any:
        """Compute the attention of a module."""

    def mask(self, function: Callable[..., Any], **more: Any) -> Any:
        """Return a mask for it."""


_SPLIT: WeakKeyDictionary[nn.Module, Exchanges] = WeakKeyDictionary()
_RUNNING: ContextVar[Exchanges | None] = ContextVar("model in its forward pass", default=None)


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def looks_up_attention(model: nn.Module) -> bool:
    """Return whether any module looks its attention up in that table; if none does, the attention cannot be wrapped."""
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def take_over(model: nn.Module, exchanges: Exchanges) -> None:
    """Route all attention inside this model through ``exchanges``."""
    attention, masks = sys.modules["transformers.modeling_utils"], sys.modules["transformers.masking_utils"]
    _wrap_attention(attention.ALL_ATTENTION_FUNCTIONS)
    _wrap_masks(masks.ALL_MASK_ATTENTION_FUNCTIONS)
    for module in model.modules():
        _SPLIT[module] = exchanges


def exchanges_of(modules: list[nn.Module]) -> list[Exchanges | None]:
    """Return the exchanges that the attention of each module goes through at present."""
    return [_SPLIT.get(module) for module in modules]


def put_back(modules: list[nn.Module], exchanges: list[Exchanges | None]) -> None:
    """Restore the exchanges that modules had before ``take_over``."""
    for module, before in zip(modules, exchanges, strict=True):
        if before is None:
            _SPLIT.pop(module, None)
        else:
            _SPLIT[module] = before


def running(exchanges: Exchanges | None) -> None:
    """Set the exchanges of the model whose forward pass begins (None: it has ended), for which masks are made."""
    _RUNNING.set(exchanges)


def _wrap_attention(table: Any) -> None:
    original = table.get_interface
    if getattr(original, _WRAPPED, False):
        return

    @wraps(original)
    def get_interface(*args: Any, **kwargs: Any) -> Any:
        return partial(_attend, original(*args, **kwargs))

    setattr(get_interface, _WRAPPED, True)
    table.get_interface = get_interface


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    exchanges = _SPLIT.get(module)
    if exchanges is None:
        return function(module, *args, **kwargs)
    named = [kwargs.pop(name, None) for name in _OPERANDS[len(args) :]]  # some models pass the mask by its name
    return exchanges.attend(function, module, *args, *named, **kwargs)


def _wrap_masks(table: Any) -> None:
    for key in list(table):
        original = table[key]
        if getattr(original, _WRAPPED, False):
            continue
        wrapped = wraps(original)(partial(_mask, original))
        setattr(wrapped, _WRAPPED, True)
        table[key] = wrapped


def _mask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    exchanges = _RUNNING.get()
    return function(*args, **kwargs) if exchanges is None or args else exchanges.mask(function, **kwargs)


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Disable what transformers finds out from the values of whole rows: packed sequences (positions that restart) and padding."""
    masking, models = sys.modules.get("transformers.masking_utils"), sys.modules.get("transformers.modeling_utils")
    places = (
        (masking, "find_packed_sequence_indices", lambda position_ids: None),
        (getattr(models, "PreTrainedModel", None), "warn_if_padding_and_no_attention_mask", lambda *_: None),
    )
    before = [
        (holder, name, getattr(holder, name), instead) for holder, name, instead in places if hasattr(holder, name)
    ]
    for holder, name, _, instead in before:
        setattr(holder, name, instead)
    try:
        yield
    finally:
        for holder, name, looks, _ in before:
            setattr(holder, name, looks)


def global_positions(model: nn.Module, first: Tensor, mask: Tensor | None) -> Tensor:
    """Return the position ids of a whole sequence."""
    counter: Any = next((m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")), None)
    if counter is not None and first.ndim == 2:
        made: Tensor = counter.create_position_ids_from_input_ids(first, counter.padding_idx)
        return made
    if getattr(getattr(model, "config", None), "model_type", "") == "opt" and mask is not None and mask.ndim == 2:
        return mask.long().cumsum(1) * mask.long() - 1
    return torch.arange(first.shape[1], device=first.device)[None]
