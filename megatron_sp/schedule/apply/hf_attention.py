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
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.mappings import AsyncAllToAll
from megatron_sp.schedule.apply.sequences import Heads
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.utils.errors import ConfigError

_WRAPPED = "_megatron_sp_wrapped"
Names = tuple[str, ...]

_OPERANDS = ("query", "key", "value", "attention_mask")
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_WORDS = {"q": "queries", "k": "keys", "v": "values"}
# the same numbers in another shape
_MOVES = {
    "view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten", "unsqueeze", "squeeze", "expand",
    "detach", "swapaxes", "movedim", "clone", "T", "mT",
}  # fmt: skip


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


class OpTrace(TorchFunctionMode):
    """Trace of what one module does in a pass between its projections (``begin``) and its attention (``require``)."""

    # Models differ: OPT scales its queries there, OLMo clips, Cohere 2 and SmolLM 3 rotate in some layers only, and
    # their names do not show it. So the torch functions applied to q, k and v are recorded, and must be those that are
    # applied before an early exchange. Each module is recorded once: what it does does not depend on values.

    def __init__(self, path: str, where: str) -> None:
        super().__init__()
        self.path, self.where = path, where
        self._steps: Any = WeakIdKeyDictionary()  # tensor -> what has been done to it
        self._own: dict[str, Counter[str]] = {}

    def begin(self, x: Tensor) -> Tensor:
        self._steps[x] = Counter()
        return x

    def sent(self, part: str, x: Tensor) -> None:
        # what was done to the tensor exchanged in place of q, k or v; the module must do the same
        self._own[part] = self._steps.get(x, Counter())

    def require(self, *qkv: Tensor) -> None:
        """Raise ConfigError if the module does something else to q, k or v before its attention gets them."""
        for part, x in zip("qkv", qkv, strict=True):
            steps, own, word = self._steps.get(x), self._own.get(part, Counter()), _WORDS[part]
            what = ""
            if steps is None:
                what = f"does what cannot be followed to its {word}"
            elif more := steps - own:
                what = f"does this to its {word}, and no exchange may start before that: {', '.join(more)}"
            elif own - steps:
                what = f"does not rotate its {word}, though it is given angles (position_embeddings)"
            if what:
                between = f"between projections and attention {self.path} {what}"
                raise ConfigError(f"overlap_qkv: {between}; leave overlap_qkv out ({self.where})")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = [t for t in tensors_of(result).values() if t.is_floating_point()]
        operands = list(tensors_of([*args, kwargs]).values())
        from_qkv = [self._steps[t] for t in operands if t in self._steps]
        if not results or not from_qkv:
            return result
        steps: Counter[str] = sum(from_qkv, Counter())
        name = func.__name__ if func.__name__ != "__get__" else getattr(func.__self__, "__name__", "")
        name = name.strip("_")
        same_dtype = name in ("to", "type_as", "float") and results[0].dtype == operands[0].dtype
        if name not in _MOVES and not same_dtype:
            # the function, with the numbers passed to it
            numbers = [x for x in (*args, *kwargs.values()) if not tensors_of(x)]
            words = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in numbers]
            learned = ["a parameter"] if any(isinstance(t, nn.Parameter) for t in operands) else []
            steps = steps + Counter([" ".join([name, *words, *learned])])
        for t in results:
            self._steps[t] = steps
        return result


class EarlyExchange:
    """Early exchange of one attention module of transformers that projects q, k and v separately.

    With ``only_looks`` nothing is exchanged, only checked whether it could start early.
    """

    # The projections hand the module a stand-in of one head, because what it does between them and the attention
    # (reshape, rotate) is done here already, on all heads: by transformers' own ``apply_rotary_pos_emb``, with the
    # cosines and sines that the module was given. The first pass of each module verifies that it does this and nothing
    # else (``OpTrace``).

    def __init__(self, path: str, module: nn.Module, names: Names, group: Group, where: str, only_looks: bool) -> None:
        norms = [name for name, _ in module.named_children() if "norm" in name.lower()]
        size = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
        if norms or not isinstance(size, int):
            between = "between its projections and its attention, which has to come before an exchange"
            what = f"has {', '.join(norms)} {between}" if norms else "does not say how wide its heads are (head_dim)"
            raise ConfigError(f"overlap_qkv: {path} {what}: leave overlap_qkv out ({where})")
        self.path, self.size, self.group, self.where, self.only_looks = path, size, group, where, only_looks
        self.heads = Heads(group, 1, 2, path)
        self.kind, self.is_verified = type(module), False
        # of this pass: the trace until the attention is reached, the angles, the number of query heads, and what flies
        self.trace: OpTrace | None = None
        self.angles: tuple[Tensor, Tensor] | None = None
        self.queries = 0
        self.flights: dict[str, tuple[AsyncAllToAll, Tensor]] = {}
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        # also if the module fails before its attention
        module.register_forward_hook(lambda *_: self._end_trace() and None, always_call=True)
        for part, name in zip("qkv", names, strict=True):
            getattr(module, name).register_forward_hook(partial(self._launch, part))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end_trace()
        self.angles, self.queries = kwargs.get("position_embeddings"), 0
        if not self.is_verified and not torch.compiler.is_compiling():  # a function mode cannot be compiled
            self.trace = OpTrace(self.path, self.where).__enter__()

    def _end_trace(self) -> OpTrace | None:
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
        return trace

    def _launch(self, part: str, _: nn.Module, args: Any, y: Tensor) -> Tensor:
        x = y.unflatten(-1, (-1, self.size))  # [b, s/sp, n, d]
        self.queries = x.shape[2] if part == "q" else self.queries
        if not self.queries:
            order = "its keys before its queries, which tell how many heads there are"
            raise ConfigError(f"overlap_qkv: {self.path} projects {order}: leave overlap_qkv out ({self.where})")
        begin = self.trace.begin if self.trace is not None else lambda x: x
        begin(x)
        sent = x if part == "v" or self.angles is None else self._rotated(x, self.angles)
        if self.trace is not None:
            self.trace.sent(part, sent)
        if self.only_looks:
            return begin(y)
        sent = self.heads.spread(sent, self.queries)
        # [b, s/sp, n, d] -> [ranks, b, s/sp, n/ranks, d]; torch's own functions, as ``OpTrace`` records them
        by_rank = sent.unflatten(2, (self.group.size(), -1)).movedim(2, 0).contiguous()
        flight = AsyncAllToAll(self.group)
        self.flights[part] = flight, flight.launch(by_rank)
        return begin(x[:, :, 0].detach())

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

    def land(self, *qkv: Tensor) -> tuple[Tensor, ...] | None:
        """Return q, k and v of some heads and all positions, padding included: [b, n/sp, s, d]; None: not exchanged.

        Raises ConfigError if the module has done something else to its own ``qkv``.
        """
        if (trace := self._end_trace()) is not None:
            trace.require(*qkv)
            self.is_verified = True
        if self.only_looks:
            return None
        flights, self.flights = self.flights, {}
        if len(flights) != 3:
            what = f"{', '.join(flights) or 'nothing'} of q, k, v on its way"
            raise RuntimeError(f"{self.kind.__name__} reached its attention with {what}")
        landed = (flight.land(token) for flight, token in (flights[part] for part in "qkv"))
        return tuple(rearrange(x, "ranks b s m d -> b m (ranks s) d") for x in landed)


def early_exchanges(model: nn.Module, group: Group, where: str, only_looks: bool) -> Mapping[nn.Module, EarlyExchange]:
    """Let the attention modules of a model exchange early. Raises ConfigError: none of them can."""
    early: WeakKeyDictionary[nn.Module, EarlyExchange] = WeakKeyDictionary()
    for path, module in model.named_modules():
        for names in _PROJECTIONS:
            if all(isinstance(getattr(module, name, None), nn.Module) for name in names):
                early[module] = EarlyExchange(path, module, names, group, where, only_looks)
                break
    if not early:
        either = " / ".join(_PROJECTIONS[0]), " / ".join(_PROJECTIONS[1])
        has = f"has no separate projections of q, k and v ({', or '.join(either)})"
        nothing = "so there is nothing to exchange early: leave overlap_qkv out"
        raise ConfigError(f"overlap_qkv: {type(model).__name__} {has}, {nothing} ({where})")
    return early
