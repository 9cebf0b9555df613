"""Rows that choose experts, one of whom nobody chooses, and what the MLPs of experts make of them, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import Choices, ExpertGrads, ExpertWeights, experts_backward, experts_forward, sum_dtype

H, F, E, ROWS, K = 16, 8, 5, 33, 3


def made(dtype: torch.dtype, *, bias: bool, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Choices, ExpertWeights]:
    """Rows, a gradient of the results, choices (the third expert is nobody's) and weights."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cpu").to(device, dtype)

    numbers = torch.stack([torch.tensor([0, 1, 3, 4], device="cpu")[torch.randperm(4, generator=g, device="cpu")[:K]] for _ in range(ROWS)])
    numbers[::4, 1] = E  # choices of other ranks' experts
    places = numbers.flatten().sort(stable=True).indices[: int((numbers < E).sum())]
    counts = torch.bincount(numbers.flatten(), minlength=E + 1)[:E].tolist()
    weights = torch.rand(len(places), generator=g, device="cpu")
    choices = Choices((places // K).to(device), places.to(device), counts, weights.to(device), K)
    biases = (draw(E, 2 * F), draw(E, H)) if bias else (None, None)
    return draw(ROWS, H), draw(ROWS, H), choices, ExpertWeights(draw(E, 2 * F, H), biases[0], draw(E, H, F), biases[1])


def run(dtype: torch.dtype, *, bias: bool, grouped: bool | None, device: str = "cpu", times: int = 1) -> dict[str, Tensor]:
    """Results and every gradient; with ``times`` backward passes of the same rows added up."""
    x, grad, choices, params = made(dtype, bias=bias, device=device)
    activation = Activation("swiglu")
    out, grad_x = (torch.zeros(ROWS, H, dtype=sum_dtype(dtype), device=device) for _ in range(2))
    wide = experts_forward(x, choices, params, activation, out, grouped=grouped)
    grads = ExpertGrads(params, (True, bias, True, bias), None)
    for _ in range(times):
        of_weights = experts_backward(grad, x, wide.clone(), choices, params, activation, grads, grad_x, grouped=grouped)
    named: dict[str, Any] = dict(zip(("w1", "b1", "w2", "b2"), grads.results(), strict=True))
    return {"out": out, "x": grad_x, "weights": of_weights, **{name: g for name, g in named.items() if g is not None}}
