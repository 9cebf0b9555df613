"""A backward pass of its own in the middle of another one, from gradients that are there already.

``torch.autograd.grad(outputs, leaves, gradients)`` compares shapes by torch's symbolic ones, and for that loads sympy: half a second at the
first step of every process. Here the gradients are handed over by the backward of a scalar, which needs no such comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, allow_unused: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of ``leaves``; with ``allow_unused`` None for one that no output uses.

    Args:
        leaves: each used for one of the outputs, or ``allow_unused``.
        outputs: that require gradients.
        gradients: of the outputs, of their shapes; None where an output has none.
    """
    with torch.enable_grad():  # a backward pass is run without
        seed = _Seed.apply(tuple(gradients), *outputs)
    return torch.autograd.grad(seed, leaves, allow_unused=allow_unused)


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Put gradients into the ``.grad`` of everything behind ``output``."""
    with torch.enable_grad():
        seed = _Seed.apply((gradient,), output)
    torch.autograd.backward(seed)


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *outputs: Tensor) -> Tensor:
        for output, gradient in zip(outputs, gradients, strict=True):
            assert gradient is None or output.shape == gradient.shape, f"{tuple(output.shape)} is not {tuple(gradient.shape)}"
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.gradients
