"""Which random numbers the ranks of a group share: dropout of what every rank has whole must be the same, of what is split must differ.

A module that is to differ draws one seed from torch's generator, which all ranks have alike, mixes its rank into it, computes with the
generators seeded so, and puts them back. There is no state beside torch's own, so whatever restores that (a recomputation, a resumed run)
restores everything. Inside of such a module another can be told to be the same on all ranks again: dropout behind a row layer's sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_sp.comm.groups import Group

_LIMIT = 2**63 - 1


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
