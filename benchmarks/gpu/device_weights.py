"""Initial weights drawn on the device: billions of them on the CPU take minutes, and a benchmark does not look at their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def drawn_on(device: Any) -> Iterator[None]:
    """Models of ours that are built inside have weights of the right spread, in bf16, which are those of no seed."""
    import torch

    from megatron_sp.parallel import layers

    def draw(shape: tuple[int, ...], std: float, seed: int, name: str) -> Any:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(std)

    before = layers.draw_normal
    layers.draw_normal = draw  # type: ignore[assignment]
    try:
        yield
    finally:
        layers.draw_normal = before
