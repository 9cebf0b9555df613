"""Activation recomputation: torch's non-reentrant checkpointing, as a rule without random state to save.

Dropout masks are hashes (``ops/dropout.py``), so a recomputed forward pass is the same without stashing generators. The exception is
attention dropout inside a fused kernel, which draws from torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(fn: Callable[..., Any], *args: Any, draws_random: bool = False) -> Any:
    """Call ``fn(*args)`` without keeping its intermediate tensors; backward calls it again (arXiv:1604.06174).

    Args:
        draws_random: ``fn`` uses torch's generators; their state is kept, so that it draws the same numbers again.
    """
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=draws_random)
