"""Which random numbers the ranks of a group share: dropout of what every rank has whole must be the same, of what is split must differ.

A module that is to differ draws one seed from torch's generator, which all ranks have alike, mixes its rank into it, computes with the
generators seeded so, and puts them back. There is no state beside torch's own, so whatever restores that (a recomputation, a resumed run)
restores everything. Inside of such a module another can be told to be the same on all ranks again: dropout behind a row layer's sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import Group

_LIMIT = 2**63 - 1
_DRAWS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli", "bernoulli_"}


class Streams:
    """Of one model: the seeds that its tp ranks share at the moment, the innermost last. Backward may recompute in a thread of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def shared(self) -> list[torch.Generator]:
        """Generators that are alike on all ranks, of the modules that are being computed."""
        if not hasattr(self._local, "shared"):
            self._local.shared = []
        found: list[torch.Generator] = self._local.shared
        return found

    @contextmanager
    def differ(self, group: Group, over_tp: bool = True) -> Iterator[None]:
        """Inside, each rank of the group draws numbers of its own; outside, nothing but one draw has happened.

        Args:
            over_tp: these are tp's ranks, which ``same`` is about; those of other axes never have anything in common.
        """
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
        """Inside, ranks draw the same numbers, though they stand in a module where they differ."""
        if not self.shared:
            yield
            return
        with _seeded(int(torch.randint(_LIMIT, (), dtype=torch.int64, generator=self.shared[-1]))):
            yield

    def again(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A function for one recomputation: when it is called for the second time, in backward, ranks share what they shared at the first.

        Torch's checkpoint brings its own generators back, and knows nothing of these.
        """
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
    """From now on the module's forward, if it trains, runs inside of what ``enter`` returns; a recomputation that ends early leaves it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        with enter():
            return inner(*args, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    module.forward = forward  # type: ignore[method-assign]


def dropping(model: nn.Module) -> Iterator[str]:
    """Modules that draw: a rate of dropout above 0 is among their attributes, or their forward names a function that draws."""
    for path, module in model.named_modules():
        if any(rate > 0 for rate in _rates(module)):
            yield path


def draws(model: nn.Module) -> bool:
    """Whether some module may draw random numbers."""
    return any(True for _ in dropping(model))


def _rates(module: nn.Module) -> list[float]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return [module.p]
    floats = {name: value for name, value in vars(module).items() if isinstance(value, float)}
    named = [value for name, value in floats.items() if "drop" in name]
    code = getattr(type(module).forward, "__code__", None)
    # a submodule of that name tells its rate itself
    if named or code is None or not any(not hasattr(module, name) for name in _DRAWS.intersection(code.co_names)):
        return named
    return list(floats.values()) or [1.0]  # whatever it is called, or a number that is written down
