"""Early exchanges of q, k and v, which start as soon as each has been projected, and overlap with the projections of the others.

    before:  q = x Wq    k = x Wk    v = x Wv    rotate    [ exchange q, k, v ]    attention
    now:     q = x Wq    k = x Wk    v = x Wv    rotate    [ what is left of v ]   attention
                   [ exchange q          ][ exchange k ]

Backward likewise: the exchanges of the gradients of v, k and q start together, and the gradients of v's projection are
computed during those of the others.

The projections hand the module a stand-in of one head, because what it does between them and the attention (reshape,
rotate) is done here already, on all heads: by transformers' own ``apply_rotary_pos_emb``, with the cosines and sines
that the module was given. The first pass of each module, and ``check()``, verify that it does this and nothing else
(``check/op_trace.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from einops import rearrange
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.early_exchange import EarlyExchange
from megatron_sp.schedule.check.op_trace import OpTrace
from megatron_sp.schedule.core.placements import PlacementError
from megatron_sp.schedule.core.sequences import Heads
from megatron_sp.utils.errors import ConfigError

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
        self._passages: WeakKeyDictionary[nn.Module, OpTrace] = WeakKeyDictionary()  # running modules that have not reached their attention
        self._known: WeakSet[nn.Module] = WeakSet()
        self._away: WeakKeyDictionary[nn.Module, dict[str, tuple[EarlyExchange, Tensor]]] = WeakKeyDictionary()
        for path, names, size in projecting(model, where):
            self._wrap(path, model.get_submodule(path), names, size)

    def handles(self, module: nn.Module) -> bool:
        """Return whether the inputs of this module's attention are stand-ins."""
        return module in self._away and not self.only_looks

    def require_same(self, module: nn.Module, *qkv: Tensor) -> None:
        """Check at attention what was done to q, k and v. Raises PlacementError if it is not what is done here."""
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
            raise RuntimeError(f"{type(module).__name__} reached its attention with {', '.join(away) or 'nothing'} of q, k, v on its way")
        return tuple(_joined(flight.land(token)) for flight, token in (away[part] for part in "qkv"))

    def _rotated(self, path: str, module: nn.Module, x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [b, s/sp, n, d] as the module would do it. Raises PlacementError if it is not known how."""
        rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        heads = x.transpose(1, 2)
        try:
            if rotate is None:
                raise RuntimeError("its file has no apply_rotary_pos_emb")
            rotated: Tensor = rotate(heads, heads[:, :1], *by)[0]
        except RuntimeError as error:  # for instance if only a part of each head is rotated
            raise PlacementError(
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
                    raise PlacementError(
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
        module.register_forward_hook(lambda *_: self._end(module) and None, always_call=True)  # if it fails before its attention
        for part, name in zip("qkv", names, strict=True):
            getattr(module, name).register_forward_hook(launch(part))


def projecting(model: nn.Module, where: str) -> list[tuple[str, tuple[str, ...], int]]:
    """Return (path, names of its projections, width of a head) of all attention modules whose exchanges can start early.

    Raises:
        ConfigError: there are none, or one does something to q or k that is not known here.
    """
    found: list[tuple[str, tuple[str, ...], int]] = []
    for path, module in model.named_modules():
        names = next((names for names in PROJECTIONS if all(isinstance(getattr(module, n, None), nn.Module) for n in names)), None)
        if names is not None:
            found.append((path, names, _width(path, module, where)))
    if not found:
        raise ConfigError(
            f"overlap_qkv: {type(model).__name__} has no separate projections of q, k and v ({' / '.join(PROJECTIONS[0])}, or"
            f" {' / '.join(PROJECTIONS[1])}), so there is nothing to exchange early: leave overlap_qkv out ({where})"
        )
    return found


def _width(path: str, module: nn.Module, where: str) -> int:
    """Return the width of a head. Raises ConfigError as ``projecting`` does."""
    changed = [n for n, _ in module.named_children() if "norm" in n.lower()]
    if changed:
        raise ConfigError(
            f"overlap_qkv: {path} has {', '.join(changed)} between its projections and its attention, which has to come before"
            f" an exchange: leave overlap_qkv out ({where})"
        )
    size = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"overlap_qkv: {path} does not say how wide its heads are (head_dim): leave overlap_qkv out ({where})")
    return size


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Group heads by rank: [b, s/sp, n, d] -> [ranks, b, s/sp, n/ranks, d]."""
    # torch's own functions, not einops: they run while ``OpTrace`` records
    return x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()


def _joined(x: Tensor) -> Tensor:
    """Join the positions of all ranks: [ranks, b, s/sp, m, d] -> [b, m, s, d]."""
    return rearrange(x, "ranks b s m d -> b m (ranks s) d")
