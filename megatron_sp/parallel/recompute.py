"""Activation recomputation: torch's non-reentrant checkpointing, without random state to save.

Dropout masks are hashes (``ops/dropout.py``), so a recomputed forward pass is the same without stashing generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)`` without keeping its intermediate tensors; backward calls it again (arXiv:1604.06174)."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
