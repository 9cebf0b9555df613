"""Exchanges of q, k and v that start as soon as each has been projected, and run under the projections of the others.

    before:  q = x Wq    k = x Wk    v = x Wv    rotate    [ exchange q, k, v ]    attention
    now:     q = x Wq    k = x Wk    v = x Wv    rotate    [ what is left of v ]   attention
                   [ exchange q          ][ exchange k ]

Backward likewise: the gradients of v, k and q leave together, and those of v's projection are computed under the exchanges of the others.

The projections hand the module a stand-in of one head, for what it does between them and the attention (reshape, rotate) is done here
already, on all of them: transformers' own ``apply_rotary_pos_emb``, with the cosines and sines that the module was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.early_exchange import Flight
from megatron_sp.schedule.sequences import Heads
from megatron_sp.utils.errors import ConfigError

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


class EarlyExchanges:
    """Of all attention modules of a model that project q, k and v separately.

    Args:
        model: of transformers.
        group: the sp ranks.
        where: who asked.
    Raises:
        ConfigError: there are none, or one does something to q or k that is not known here.
    """

    def __init__(self, model: nn.Module, group: Group, where: str) -> None:
        self.group = group
        self._away: WeakKeyDictionary[nn.Module, dict[str, tuple[Flight, Tensor]]] = WeakKeyDictionary()
        for path, names, size in projecting(model, where):
            self._wrap(path, model.get_submodule(path), names, size)

    def handles(self, module: nn.Module) -> bool:
        """Whether what this module's attention is given are stand-ins."""
        return module in self._away

    def land(self, module: nn.Module) -> tuple[Tensor, ...]:
        """q, k and v of some heads and all positions, padding included: [b, n/sp, s, d]."""
        away, self._away[module] = self._away[module], {}
        if len(away) != 3:
            raise RuntimeError(f"{type(module).__name__} reached its attention with {', '.join(away) or 'nothing'} of q, k, v on its way")
        return tuple(_joined(flight.land(token)) for flight, token in (away[part] for part in "qkv"))

    def _wrap(self, path: str, module: nn.Module, names: tuple[str, ...], size: int) -> None:
        self._away[module] = {}
        rotation: dict[str, Any] = {}
        heads = Heads(self.group, 1, 2, path)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotation["by"] = kwargs.get("position_embeddings")
            rotation["queries"] = 0

        def launch(part: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(_: nn.Module, args: Any, y: Tensor) -> Tensor:
                x = y.unflatten(-1, (-1, size))  # [b, s/sp, n, d]
                rotation["queries"] = x.shape[2] if part == "q" else rotation["queries"]
                sent = x if part == "v" or rotation["by"] is None else _rotated(module, x, rotation["by"])
                assert rotation["queries"], f"{path} projects its keys before its queries"
                sent = heads.spread(sent, rotation["queries"])
                flight = Flight(self.group)
                self._away[module][part] = flight, flight.launch(_by_rank(sent, self.group.size()))
                return x[:, :, 0].detach()

            return hook

        module.register_forward_pre_hook(before, with_kwargs=True)
        for part, name in zip("qkv", names, strict=True):
            getattr(module, name).register_forward_hook(launch(part))


def projecting(model: nn.Module, where: str) -> list[tuple[str, tuple[str, ...], int]]:
    """(path, names of its projections, width of a head) of all attention modules whose exchanges can start early.

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
    """Of a head. Raises ConfigError: see ``projecting``."""
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


def _rotated(module: nn.Module, x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """[b, s/sp, n, d], rotated as the module would do it."""
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        raise ConfigError(f"overlap_qkv: it is not known how {type(module).__name__} rotates its heads: leave overlap_qkv out")
    heads = x.transpose(1, 2)
    rotated: Tensor = rotate(heads, heads[:, :1], *by)[0]
    return rotated.transpose(1, 2)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[b, s/sp, n, d] -> [ranks, b, s/sp, n/ranks, d]."""
    return x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()


def _joined(x: Tensor) -> Tensor:
    """[ranks, b, s/sp, m, d] -> [b, m, s, d]."""
    return x.permute(1, 3, 0, 2, 4).flatten(2, 3)
