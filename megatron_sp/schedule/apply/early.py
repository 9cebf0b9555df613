"""Early exchanges of q, k and v, which start as soon as each has been projected, and overlap with the projections of the others.

    before:  q = x Wq    k = x Wk    v = x Wv    rotate    [ exchange q, k, v ]    attention
    now:     q = x Wq    k = x Wk    v = x Wv    rotate    [ what is left of v ]   attention
                   [ exchange q          ][ exchange k ]

Backward likewise: the exchanges of the gradients of v, k and q start together, and the gradients of v's projection are
computed during those of the others.

The projections hand the module a stand-in of one head, because what it does between them and the attention (reshape,
rotate) is done here already, on all heads: by transformers' own ``apply_rotary_pos_emb``, with the cosines and sines
that the module was given. The first pass of each module verifies that it does this and nothing else
(``OpTrace``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.early_exchange import EarlyExchange
from megatron_sp.schedule.core.records import tensors_of
from megatron_sp.schedule.core.sequences import Heads
from megatron_sp.utils.errors import ConfigError

_WORDS = {"q": "queries", "k": "keys", "v": "values"}
#: the same numbers in another shape
_MOVES = {
    "view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten", "unsqueeze", "squeeze", "expand", "detach",
    "swapaxes", "movedim", "clone", "T", "mT",
}  # fmt: skip


class OpTrace(TorchFunctionMode):
    """Trace of what one module does to q, k and v in a pass: ``begin`` with what it projects, ``require`` with what its attention gets.

    Models differ: OPT scales its queries there, OLMo clips, Cohere 2 and SmolLM 3 rotate in some layers only, and their
    names do not show it. So the torch functions applied to q, k and v are recorded, and must be those that are applied
    here. Each module is recorded once: what it does does not depend on values.

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
        """Raise ConfigError if the module does something else to q, k or v before its attention gets them."""
        for part, x in zip("qkv", qkv, strict=True):
            found, own = self._steps.get(x), self._own.get(part, Counter())
            if found is None:
                self._refuse(f"does what cannot be followed to its {_WORDS[part]}")
            if more := found - own:
                self._refuse(
                    f"does this to its {_WORDS[part]}, and no exchange may start before that: {', '.join(more)}"
                )
            if own - found:
                self._refuse(f"does not rotate its {_WORDS[part]}, though it is given angles (position_embeddings)")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"overlap_qkv: between projections and attention {self.path} {what}; leave overlap_qkv out ({self.where})"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [t for t in tensors_of(result).values() if t.is_floating_point()]
        given = list(tensors_of([*args, kwargs]).values())
        from_qkv = [self._steps[t] for t in given if t in self._steps]
        if made and from_qkv:
            done: Counter[str] = sum(from_qkv, Counter())
            if (step := _told(func, args, kwargs, given, made)) is not None:
                done = done + Counter([step])
            for t in made:
                self._steps[t] = done
        return result


def _told(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]
) -> str | None:
    # a function, with the numbers passed to it, as text; None if it only moves values
    name = func.__name__ if func.__name__ != "__get__" else getattr(func.__self__, "__name__", "")
    name = name.strip("_")
    if name in _MOVES or (name in ("to", "type_as", "float") and made[0].dtype == given[0].dtype):
        return None
    words = [_shown(x) for x in (*args, *kwargs.values()) if not tensors_of(x)]
    learned = ["a parameter"] if any(isinstance(t, torch.nn.Parameter) for t in given) else []
    return " ".join([name, *words, *learned])


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


class EarlyExchanges:
    """Early exchanges of all attention modules of a model that project q, k and v separately.

    Args:
        model: of transformers.
        group: the sp ranks.
        where: file and line that asked for it.
        only_looks: exchange nothing, only check whether exchanges could start early.
    Raises:
        ConfigError: there are no such modules, or one does something to q or k that is not known here.
    """

    def __init__(self, model: nn.Module, group: Group, where: str, *, only_looks: bool = False) -> None:
        self.group, self.where, self.only_looks = group, where, only_looks
        self._passages: WeakKeyDictionary[nn.Module, OpTrace] = (
            WeakKeyDictionary()
        )  # running modules that have not reached their attention
        self._known: WeakSet[nn.Module] = WeakSet()
        self._away: WeakKeyDictionary[nn.Module, dict[str, tuple[EarlyExchange, Tensor]]] = WeakKeyDictionary()
        for path, names, size in projecting(model, where):
            self._wrap(path, model.get_submodule(path), names, size)

    def handles(self, module: nn.Module) -> bool:
        """Return whether the inputs of this module's attention are stand-ins."""
        return module in self._away and not self.only_looks

    def require_same(self, module: nn.Module, *qkv: Tensor) -> None:
        """Check at attention what was done to q, k and v. Raises ConfigError if it is not what is done here."""
        passage = self._end(module)
        if passage is not None:
            passage.require(*qkv)
            self._known.add(module)

    def _begin(self, path: str, module: nn.Module) -> None:
        self._end(module)
        if module not in self._known and not torch.compiler.is_compiling():  # a function mode cannot be compiled
            self._passages[module] = OpTrace(path, self.where).__enter__()

    def _end(self, module: nn.Module) -> OpTrace | None:
        passage = self._passages.pop(module, None)
        if passage is not None:
            passage.__exit__(None, None, None)
        return passage

    def land(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return q, k and v of some heads and all positions, padding included: [b, n/sp, s, d]."""
        away, self._away[module] = self._away[module], {}
        if len(away) != 3:
            raise RuntimeError(
                f"{type(module).__name__} reached its attention with {', '.join(away) or 'nothing'} of q, k, v on its way"
            )
        return tuple(_joined(flight.land(token)) for flight, token in (away[part] for part in "qkv"))

    def _rotated(self, path: str, module: nn.Module, x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
        # rotate [b, s/sp, n, d] as the module would do it. Raises ConfigError if it is not known how
        rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        heads = x.transpose(1, 2)
        try:
            if rotate is None:
                raise RuntimeError("its file has no apply_rotary_pos_emb")
            rotated: Tensor = rotate(heads, heads[:, :1], *by)[0]
        except RuntimeError as error:  # for instance if only a part of each head is rotated
            raise ConfigError(
                f"overlap_qkv: it is not known how {path} ({type(module).__name__}) rotates its heads ({error}): leave overlap_qkv out"
                f" ({self.where})"
            ) from None
        return rotated.transpose(1, 2)

    def _wrap(self, path: str, module: nn.Module, names: tuple[str, ...], size: int) -> None:
        self._away[module] = {}
        rotation: dict[str, Any] = {}
        heads = Heads(self.group, 1, 2, path)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotation["by"] = kwargs.get("position_embeddings")
            rotation["queries"] = 0
            self._begin(path, module)

        def launch(part: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(_: nn.Module, args: Any, y: Tensor) -> Tensor:
                x = y.unflatten(-1, (-1, size))  # [b, s/sp, n, d]
                rotation["queries"] = x.shape[2] if part == "q" else rotation["queries"]
                if not rotation["queries"]:
                    raise ConfigError(
                        f"overlap_qkv: {path} projects its keys before its queries, which tell how many heads there are: leave overlap_qkv"
                        f" out ({self.where})"
                    )
                passage = self._passages.get(module)
                if passage is not None:
                    passage.begin(x)
                sent = x if part == "v" or rotation["by"] is None else self._rotated(path, module, x, rotation["by"])
                if passage is not None:
                    passage.sent(part, sent)
                if self.only_looks:
                    return y if passage is None else passage.begin(y)
                sent = heads.spread(sent, rotation["queries"])
                flight = EarlyExchange(self.group)
                self._away[module][part] = flight, flight.launch(_by_rank(sent, self.group.size()))
                stand_in = x[:, :, 0].detach()
                return stand_in if passage is None else passage.begin(stand_in)

            return hook

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(
            lambda *_: self._end(module) and None, always_call=True
        )  # if it fails before its attention
        for part, name in zip("qkv", names, strict=True):
            getattr(module, name).register_forward_hook(launch(part))


def projecting(model: nn.Module, where: str) -> list[tuple[str, tuple[str, ...], int]]:
    found: list[tuple[str, tuple[str, ...], int]] = []
    for path, module in model.named_modules():
        names = next(
            (names for names in PROJECTIONS if all(isinstance(getattr(module, n, None), nn.Module) for n in names)),
            None,
        )
        if names is not None:
            found.append((path, names, _width(path, module, where)))
    if not found:
        raise ConfigError(
            f"overlap_qkv: {type(model).__name__} has no separate projections of q, k and v ({' / '.join(PROJECTIONS[0])}, or"
            f" {' / '.join(PROJECTIONS[1])}), so there is nothing to exchange early: leave overlap_qkv out ({where})"
        )
    return found


def _width(path: str, module: nn.Module, where: str) -> int:
    # the width of a head. Raises ConfigError as ``projecting`` does
    changed = [n for n, _ in module.named_children() if "norm" in n.lower()]
    if changed:
        raise ConfigError(
            f"overlap_qkv: {path} has {', '.join(changed)} between its projections and its attention, which has to come before"
            f" an exchange: leave overlap_qkv out ({where})"
        )
    size = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"overlap_qkv: {path} does not say how wide its heads are (head_dim): leave overlap_qkv out ({where})"
        )
    return size


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    # group heads by rank: [b, s/sp, n, d] -> [ranks, b, s/sp, n/ranks, d]
    # torch's own functions, not einops: they run while ``OpTrace`` records
    return x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()


def _joined(x: Tensor) -> Tensor:
    # join the positions of all ranks: [ranks, b, s/sp, m, d] -> [b, m, s, d]
    return rearrange(x, "ranks b s m d -> b m (ranks s) d")
