"""Random numbers shared by the ranks of a group: dropout must be the same for what every rank has whole, and differ for what is split.

A module that is to differ draws one seed from torch's generator, whose state is the same on all ranks, mixes its rank
into it, computes with generators seeded that way, and restores them. There is no state beside torch's own, so whatever
restores that (a recomputation, a resumed run) restores everything. Inside such a module another can be made the same on
all ranks again: dropout after a row layer's sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import KeptResults
from megatron_sp.utils.errors import ConfigError

_LIMIT = 2**63 - 1
_DRAWS = {
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "bernoulli",
    "bernoulli_",
}


class Streams:
    """Random streams of one model: a stack of generators that its tp ranks share. One per thread: backward may recompute in its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def shared(self) -> list[torch.Generator]:
        """Generators with the same state on all ranks, one for each module being computed, the innermost last."""
        if not hasattr(self._local, "shared"):
            self._local.shared = []
        found: list[torch.Generator] = self._local.shared
        return found

    @contextmanager
    def differ(self, group: Group, over_tp: bool = True) -> Iterator[None]:
        """Draw different numbers on each rank of the group inside; outside, torch's generator has advanced by one draw."""
        seed = int(torch.randint(_LIMIT, (), dtype=torch.int64))
        if not over_tp:
            with _seeded((seed + 1 + group.rank()) % _LIMIT):
                yield
            return
        self.shared.append(torch.Generator().manual_seed(seed))
        try:
            with _seeded((seed + 1 + group.rank()) % _LIMIT):
                yield
        finally:
            self.shared.pop()

    @contextmanager
    def same(self) -> Iterator[None]:
        """Draw the same numbers on all tp ranks inside, though a module around makes them differ."""
        if not self.shared:
            yield
            return
        with _seeded(int(torch.randint(_LIMIT, (), dtype=torch.int64, generator=self.shared[-1]))):
            yield

    def again(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function for one recomputation: its second call, in backward, shares the streams that the first one shared."""
        kept: list[Tensor] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not kept:
                kept.extend(generator.get_state() for generator in self.shared)
                return inner(*args, **kwargs)
            with self._sharing(kept):
                return inner(*args, **kwargs)

        return run

    @contextmanager
    def _sharing(self, states: Sequence[Tensor]) -> Iterator[None]:
        before = self.shared
        self._local.shared = [torch.Generator().set_state(state) for state in states]
        try:
            yield
        finally:
            self._local.shared = before


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def around(module: nn.Module, enter: Callable[[], Any]) -> None:
    """Run a module's forward, in training mode, in the context that ``enter`` returns; a recomputation that stops early exits it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        with enter():
            return inner(*args, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    module.forward = forward  # type: ignore[method-assign]


def dropping(model: nn.Module) -> Iterator[str]:
    """Yield the paths of modules that draw: they have a dropout rate above 0 as an attribute, or their forward names a drawing function."""
    for path, module in model.named_modules():
        if any(rate > 0 for rate in _rates(module)):
            yield path


def draws(model: nn.Module) -> bool:
    """Return whether some module may draw random numbers."""
    return any(True for _ in dropping(model))


def _rates(module: nn.Module) -> list[float]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return [module.p]
    floats = {name: value for name, value in vars(module).items() if isinstance(value, float)}
    named = [value for name, value in floats.items() if "drop" in name]
    code = getattr(type(module).forward, "__code__", None)
    # a submodule of that name is visited itself, and has its own rate
    if named or code is None or not any(not hasattr(module, name) for name in _DRAWS.intersection(code.co_names)):
        return named
    return list(floats.values()) or [1.0]  # the rate may have any name, or be hard-coded


POLICIES = ("full", "keep_gathered")


def recompute(module: nn.Module, path: str, policy: str, where: str, streams: Streams) -> None:
    """Replace a module's forward by one that is recomputed in backward."""
    if policy not in POLICIES:
        raise ConfigError(f"{path}: checkpoint knows the policies {', '.join(POLICIES)}, not {policy!r} ({where})")
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = tuple(_no_cache(a) for a in args), {name: _no_cache(a) for name, a in kwargs.items()}
        contexts = _keeping if policy == "keep_gathered" else _nothing
        return checkpoint(streams.again(inner), *args, use_reentrant=False, context_fn=contexts, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    module.forward = forward  # type: ignore[method-assign]


def _no_cache(value: Any) -> Any:
    return None if hasattr(value, "get_seq_length") and hasattr(value, "update") else value


def _nothing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _keeping() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept = KeptResults()
    return kept.recording(), kept.replaying()
