"""Random numbers in a forward pass of one's own, as Slapo has them: alike on all ranks, and inside ``fork()`` different on each.

A fork keeps no state: it draws one seed from torch's generator and mixes the rank into it (``schedule/apply/randomness.py``), on CPU and
GPU. So whatever restores torch's generators, such as a recomputation, restores it, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_sp.comm.groups import Group, world_group
from megatron_sp.schedule.apply.randomness import Streams


@dataclass(frozen=True)
class RngTracker:
    """Over one group."""

    group: Group

    def fork(self) -> AbstractContextManager[None]:
        """Inside, each rank draws numbers of its own; torch's generators must be alike on all ranks, as ``set_random_seed`` leaves them."""
        return Streams().differ(self.group)


def get_cuda_rng_tracker(group: Group | None = None) -> RngTracker:
    """Of a group (default: everybody); the name is Slapo's, the CPU's generator is forked as well."""
    return RngTracker(group or world_group())


def set_random_seed(seed: int = 2013, dp_rank: int | None = None, pp_rank: int | None = None, tp_rank: int | None = None) -> int:
    """Seed Python, torch, and numpy if it is in use: alike over tp, differently over dp and pp.

    Args:
        tp_rank: Slapo wants it; ``fork()`` asks its group instead.
    Returns:
        The seed of this rank.
    """
    seed += 100 * (pp_rank or 0) + 10 * (dp_rank or 0)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, computed again in backward with the same random numbers, those of ``fork()`` included."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
