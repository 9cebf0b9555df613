"""Collective backends available in this build of torch."""

from __future__ import annotations

import torch.distributed as dist


def available_backends() -> dict[str, bool]:
    """Return ``{"gloo": bool, "nccl": bool}``; all False if torch was built without distributed support."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
