"""Activation recomputation of modules (arXiv:1604.06174), whatever their inputs and outputs are.

It uses torch's non-reentrant checkpoint: keyword inputs, results that are no tensors and several uses of one tensor are
fine, and parameter names stay. Ranks recompute the same modules in the same order, so their collectives match.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_sp.parallel.regions import KeptResults
from megatron_sp.schedule.apply.randomness import Streams
from megatron_sp.utils.errors import ConfigError

POLICIES = ("full", "keep_gathered")


def recompute(module: nn.Module, path: str, policy: str, where: str, streams: Streams) -> None:
    """Replace a module's forward by one that is recomputed in backward.

    Args:
        streams: of the model: the random numbers that its ranks share are the same in the recomputation.
        policy: full: recompute everything; keep_gathered: all but results of all-gathers, which are kept: more memory,
            less communication.
    Raises:
        ConfigError: an unknown policy.
    """
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
    """Return None for a key/value cache, which training does not need and a recomputation would fill a second time."""
    return None if hasattr(value, "get_seq_length") and hasattr(value, "update") else value


def _nothing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _keeping() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept = KeptResults()
    return kept.recording(), kept.replaying()
