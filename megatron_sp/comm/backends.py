"""Which collective backends this build of torch has."""

from __future__ import annotations

import torch.distributed as dist


def available_backends() -> dict[str, bool]:
    """``{"gloo": ..., "nccl": ...}``; all False where torch was built without distributed support."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
