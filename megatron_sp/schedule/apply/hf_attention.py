"""Exchanges around the attention of transformers models, which they all look up in one table, and before it.

A model's attention looks up the function that computes it, and the one that makes its mask. Modules of a model that is
split over sp get those with exchanges around them; all other models get the originals. transformers is not imported
here. With ``overlap_qkv``, the exchange of q, k and v starts as soon as each has been projected, in backward likewise:

    before:  q = x Wq    k = x Wk    v = x Wv    rotate    [ exchange q, k, v ]    attention
    now:     q = x Wq    k = x Wk    v = x Wv    rotate    [ what is left of v ]   attention
                   [ exchange q          ][ exchange k ]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from einops import rearrange
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.mappings import AsyncAllToAll
from megatron_sp.schedule.apply.sequences import Heads
from megatron_sp.utils.errors import ConfigError

_WRAPPED = "_megatron_sp_wrapped"
_OPERANDS = ("query", "key", "value", "attention_mask")
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


# whose ``attend`` computes the attention of the modules of a split model, in place of the function it is given
EXCHANGES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
# whose ``mask`` makes masks: a mask has no module to tell whose it is, so these are of the model in its forward pass
RUNNING: ContextVar[Any] = ContextVar("model in its forward pass", default=None)


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def take_over(model: nn.Module, exchanges: Any) -> None:
    """Route all attention inside this model through ``exchanges``."""
    table = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    look_up = table.get_interface

    def attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = EXCHANGES.get(module)
        if own is None:
            return function(module, *args, **kwargs)
        named = [kwargs.pop(name, None) for name in _OPERANDS[len(args) :]]  # some models pass the mask by its name
        return own.attend(function, module, *args, *named, **kwargs)

    def mask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = RUNNING.get()
        return function(*args, **kwargs) if running is None or args else running.mask(function, **kwargs)

    if not getattr(look_up, _WRAPPED, False):
        table.get_interface = wraps(look_up)(lambda *args, **kwargs: partial(attend, look_up(*args, **kwargs)))
        setattr(table.get_interface, _WRAPPED, True)
    for key in list(masks):
        if not getattr(masks[key], _WRAPPED, False):
            masks[key] = wraps(masks[key])(partial(mask, masks[key]))
            setattr(masks[key], _WRAPPED, True)
    for module in model.modules():
        EXCHANGES[module] = exchanges


class EarlyExchange:
    """Early exchange of one attention module of transformers that projects q, k and v separately."""

    # The projections hand the module a stand-in of one head, because what it does between them and the attention
    # (reshape, rotate) is done here already, on all heads: by transformers' own ``apply_rotary_pos_emb``, with the
    # cosines and sines that the module was given. Where a module does more (OPT scales its queries, SmolLM 3 rotates in
    # some layers only), verify() finds other numbers; what trained weights alone would show is refused here.

    def __init__(self, path: str, module: nn.Module, group: Group, where: str) -> None:
        norms = [name for name, _ in module.named_children() if "norm" in name.lower()]
        size = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
        clip = getattr(getattr(module, "config", None), "clip_qkv", None)
        what, between = "", "between its projections and its attention, which has to come before an exchange"
        if norms:
            what = f"has {', '.join(norms)} {between}"
        elif clip is not None:
            what = f"clips q, k and v (clip_qkv {clip}) {between}"
        elif not isinstance(size, int):
            what = "does not say how wide its heads are (head_dim)"
        if what:
            raise ConfigError(f"overlap_qkv: {path} {what}: leave overlap_qkv out ({where})")
        self.path, self.size, self.group, self.where = path, size, group, where
        self.heads, self.kind = Heads(group, 1, 2, path), type(module)
        # of this pass: the angles, the number of query heads, and what flies
        self.angles: tuple[Tensor, Tensor] | None = None
        self.queries = 0
        self.flights: dict[str, tuple[AsyncAllToAll, Tensor]] = {}

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.angles, self.queries = kwargs.get("position_embeddings"), 0

    def launch(self, part: str, _: nn.Module, args: Any, y: Tensor) -> Tensor:
        x = y.unflatten(-1, (-1, self.size))  # [b, s/sp, n, d]
        self.queries = x.shape[2] if part == "q" else self.queries
        if not self.queries:
            order = "its keys before its queries, which tell how many heads there are"
            raise ConfigError(f"overlap_qkv: {self.path} projects {order}: leave overlap_qkv out ({self.where})")
        sent = x if part == "v" or self.angles is None else self._rotated(x, self.angles)
        # [b, s/sp, n, d] -> [ranks, b, s/sp, n/ranks, d]
        by_rank = rearrange(self.heads.spread(sent, self.queries), "b s (r n) d -> r b s n d", r=self.group.size())
        flight = AsyncAllToAll(self.group)
        self.flights[part] = flight, flight.launch(by_rank.contiguous())
        return x[:, :, 0].detach()

    def _rotated(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        # rotate [b, s/sp, n, d] as the module would do it. Raises ConfigError if it is not known how
        rotate = getattr(sys.modules[self.kind.__module__], "apply_rotary_pos_emb", None)
        heads = x.transpose(1, 2)
        try:
            if rotate is None:
                raise RuntimeError("its file has no apply_rotary_pos_emb")
            rotated: Tensor = rotate(heads, heads[:, :1], *angles)[0]
        except RuntimeError as error:  # for instance if only a part of each head is rotated
            how = f"it is not known how {self.path} ({self.kind.__name__}) rotates its heads ({error})"
            raise ConfigError(f"overlap_qkv: {how}: leave overlap_qkv out ({self.where})") from None
        return rotated.transpose(1, 2)

    def land(self) -> tuple[Tensor, ...]:
        """Return q, k and v of some heads and all positions, padding included: [b, n/sp, s, d]."""
        flights, self.flights = self.flights, {}
        if len(flights) != 3:
            what = f"{', '.join(flights) or 'nothing'} of q, k, v on its way"
            raise RuntimeError(f"{self.kind.__name__} reached its attention with {what}")
        landed = (flight.land(token) for flight, token in (flights[part] for part in "qkv"))
        return tuple(rearrange(x, "ranks b s m d -> b m (ranks s) d") for x in landed)


def early_exchanges(model: nn.Module, group: Group, where: str, only_looks: bool) -> Mapping[nn.Module, EarlyExchange]:
    """Let the attention modules of a model exchange early. Raises ConfigError: one of them cannot, or there are none.

    With ``only_looks`` they are checked, and go on as they are.
    """
    early: WeakKeyDictionary[nn.Module, EarlyExchange] = WeakKeyDictionary()
    for path, module in model.named_modules():
        projects = lambda names, module=module: all(isinstance(getattr(module, n, None), nn.Module) for n in names)
        if (names := next(filter(projects, _PROJECTIONS), None)) is None:
            continue
        early[module] = exchange = EarlyExchange(path, module, group, where)
        if not only_looks:
            module.register_forward_pre_hook(exchange.begin, with_kwargs=True)
            for part, name in zip("qkv", names, strict=True):
                getattr(module, name).register_forward_hook(partial(exchange.launch, part))
    if not early:
        either = " / ".join(_PROJECTIONS[0]), " / ".join(_PROJECTIONS[1])
        has = f"has no separate projections of q, k and v ({', or '.join(either)})"
        nothing = "so there is nothing to exchange early: leave overlap_qkv out"
        raise ConfigError(f"overlap_qkv: {type(model).__name__} {has}, {nothing} ({where})")
    return {} if only_looks else early
