"""Backward pass inside another one, from given gradients (Megatron-LM's custom_backward)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *,
    allow_unused: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of ``leaves``, given those of outputs."""
    with torch.enable_grad():  # a backward pass is run without
        seed = _Seed.apply(tuple(gradients), *outputs)
    # called as Megatron-LM calls it: ``seed.backward`` would fill the gradient of the scalar itself
    grads: tuple[Tensor, ...] = _ENGINE.run_backward(
        (seed,), (seed.detach(),), False, False, tuple(leaves), allow_unreachable=allow_unused, accumulate_grad=False
    )
    return grads


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Backpropagate ``gradient`` from ``output``, accumulating into the ``.grad`` of its leaves."""
    with torch.enable_grad():
        seed = _Seed.apply((gradient,), output)
    _ENGINE.run_backward((seed,), (seed.detach(),), False, False, (), allow_unreachable=True, accumulate_grad=True)


_ENGINE = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class _Seed(torch.autograd.Function):
    # ``torch.autograd.grad(outputs, leaves, gradients)`` imports sympy to compare shapes: half a second in the first
    # step of every process. Here the backward of a scalar passes the gradients on
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *outputs: Tensor) -> Tensor:
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                assert output.shape == gradient.shape, f"{tuple(output.shape)} is not {tuple(gradient.shape)}"
        ctx.gradients = gradients
        return outputs[0].new_empty(())  # nobody reads it

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.gradients
