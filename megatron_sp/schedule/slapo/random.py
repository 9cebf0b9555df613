"""Slapo's random numbers for custom forward passes: the same on all ranks, and different on each inside ``fork()``.

A fork has no state: it draws one seed from torch's generator and mixes the rank into it
(``schedule/apply/randomness.py``), on CPU and GPU. So whatever restores torch's generators, such as recomputation,
restores its numbers, too.
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
    """Random number tracker of one group."""

    group: Group

    def fork(self) -> AbstractContextManager[None]:
        """Draw different numbers on each rank inside; torch's generators must be equal on all ranks, as after ``set_random_seed``."""
        return Streams().differ(self.group)


def get_cuda_rng_tracker(group: Group | None = None) -> RngTracker:
    """Return the tracker of a group (default: all ranks); despite Slapo's name, it also forks the CPU's generator."""
    return RngTracker(group or world_group())


def set_random_seed(seed: int = 2013, dp_rank: int | None = None, pp_rank: int | None = None, tp_rank: int | None = None) -> int:
    """Seed Python, torch, and numpy if it is imported: equally over tp, differently over dp and pp.

    Args:
        tp_rank: a part of Slapo's API that is ignored; ``fork()`` uses its group instead.
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
    """Call a function, and recompute it in backward with the same random numbers, including those of ``fork()``."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
