"""Random numbers of ranks: dropout is the same for what every rank has whole, and differs for what is split.

A module that is to differ draws one seed from torch's generator, which is alike on all ranks, mixes its rank into it,
and computes with generators seeded that way. There is no state beside torch's own, so whatever restores that (a
recomputation, a resumed run) restores everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.mappings import KeptResults
from megatron_sp.utils.errors import ConfigError

POLICIES = ("full", "keep_gathered")
_LIMIT = 2**63 - 1
_DRAWS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli",
    "bernoulli_",
}  # fmt: skip


class Streams:
    """Random streams of one model: a stack of generators that its tp ranks share."""

    def __init__(self) -> None:
        self._local = threading.local()  # backward may recompute in a thread of its own

    @property
    def shared(self) -> list[torch.Generator]:
        # generators with the same state on all ranks, one for each module being computed, the innermost last
        return self._local.__dict__.setdefault("shared", [])  # type: ignore[no-any-return]

    @contextmanager
    def differ(self, group: Group, over_tp: bool = True) -> Iterator[None]:
        """Draw different numbers on each rank of the group; torch's generator advances by one draw."""
        seed = int(torch.randint(_LIMIT, (), dtype=torch.int64))
        if over_tp:
            self.shared.append(torch.Generator().manual_seed(seed))
        try:
            with _seeded((seed + 1 + group.rank()) % _LIMIT):
                yield
        finally:
            if over_tp:
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
        """Wrap a function for one recomputation, which shares the streams that the first call shared."""
        states: list[Tensor] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not states:
                states.extend(generator.get_state() for generator in self.shared)
                return inner(*args, **kwargs)
            before = self.shared
            self._local.shared = [torch.Generator().set_state(state) for state in states]
            try:
                return inner(*args, **kwargs)
            finally:  # also if the recomputation stops early
                self._local.shared = before

        return run


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def around(module: nn.Module, enter: Callable[[], Any]) -> None:
    """Run a module's forward, in training mode, in the context that ``enter`` returns."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with enter() if module.training else nullcontext():
            return inner(*args, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    module.forward = forward  # type: ignore[method-assign]


def dropping(model: nn.Module) -> Iterator[str]:
    """Yield the paths of modules that draw random numbers, as their rates or their code show."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates = [module.p]
        else:
            floats = {name: value for name, value in vars(module).items() if isinstance(value, float)}
            rates = [value for name, value in floats.items() if "drop" in name]
            code = getattr(type(module).forward, "__code__", None)
            called = set() if code is None else _DRAWS.intersection(code.co_names)
            # a submodule of such a name is visited itself, and has its own rate
            if not rates and any(not hasattr(module, name) for name in called):
                rates = list(floats.values()) or [1.0]  # the rate may have any name, or be hard-coded
        if any(rate > 0 for rate in rates):
            yield path


def recompute(module: nn.Module, path: str, policy: str, where: str, streams: Streams) -> None:
    """Recompute a module's forward in backward. Raises ConfigError: the policy is unknown."""
    if policy not in POLICIES:
        raise ConfigError(f"{path}: checkpoint knows the policies {', '.join(POLICIES)}, not {policy!r} ({where})")
    inner = module.forward

    def without_cache(value: Any) -> Any:  # which the recomputation would fill a second time
        return None if hasattr(value, "get_seq_length") and hasattr(value, "update") else value

    def contexts() -> tuple[Any, Any]:
        kept = KeptResults()
        return (kept.recording(), kept.replaying()) if policy == "keep_gathered" else (nullcontext(), nullcontext())

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = tuple(map(without_cache, args)), {name: without_cache(a) for name, a in kwargs.items()}
        return checkpoint(streams.again(inner), *args, use_reentrant=False, context_fn=contexts, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    module.forward = forward  # type: ignore[method-assign]
