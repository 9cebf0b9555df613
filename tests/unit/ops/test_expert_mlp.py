"""Grouped products of experts against one after another: results, every gradient, experts without rows; bits that repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import Choices, ExpertGrads, ExpertWeights, experts_backward, experts_forward, is_grouped, sum_dtype

H, F, E, ROWS, K = 16, 8, 5, 33, 3


def made(dtype: torch.dtype, *, bias: bool, seed: int = 0) -> tuple[Tensor, Tensor, Choices, ExpertWeights]:
    """Rows, a gradient of the results, choices (the third expert is nobody's) and weights."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    numbers = torch.stack([torch.tensor([0, 1, 3, 4])[torch.randperm(4, generator=g)[:K]] for _ in range(ROWS)])
    numbers[::4, 1] = E  # choices of other ranks' experts
    places = numbers.flatten().sort(stable=True).indices[: int((numbers < E).sum())]
    counts = torch.bincount(numbers.flatten(), minlength=E + 1)[:E].tolist()
    choices = Choices(places // K, places, counts, torch.rand(len(places), generator=g), K)
    biases = (draw(E, 2 * F), draw(E, H)) if bias else (None, None)
    return draw(ROWS, H), draw(ROWS, H), choices, ExpertWeights(draw(E, 2 * F, H), biases[0], draw(E, H, F), biases[1])


def run(dtype: torch.dtype, *, bias: bool, grouped: bool) -> dict[str, Tensor]:
    x, grad, choices, params = made(dtype, bias=bias)
    activation = Activation("swiglu")
    out, grad_x = (torch.zeros(ROWS, H, dtype=sum_dtype(dtype)) for _ in range(2))
    wide = experts_forward(x, choices, params, activation, out, grouped=grouped)
    grads = ExpertGrads(params, (True, bias, True, bias), None)
    of_weights = experts_backward(grad, x, wide, choices, params, activation, grads, grad_x, grouped=grouped)
    named: dict[str, Any] = dict(zip(("w1", "b1", "w2", "b2"), grads.results(), strict=True))
    return {"out": out, "x": grad_x, "weights": of_weights, **{name: g for name, g in named.items() if g is not None}}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_grouped_products_are_those_of_one_after_another(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    got, want = (run(dtype, bias=bias, grouped=grouped) for grouped in (True, False))
    for name, value in want.items():
        error = float((got[name].double() - value.double()).abs().max() / value.double().abs().max())
        assert error < tolerance, (name, error)
        assert not got["w1"][2].any(), "an expert without rows has a gradient of zero"


@pytest.mark.parametrize("grouped", [False, True])
def test_bits_repeat(grouped: bool) -> None:
    first, second = (run(torch.float32, bias=True, grouped=grouped) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_cpu_computes_one_after_another() -> None:
    x, _, _, params = made(torch.bfloat16, bias=False)
    assert not is_grouped(x, params)


def test_rows_without_choices() -> None:
    x, _, choices, params = made(torch.float32, bias=True)
    nothing = Choices(choices.rows[:0], choices.places[:0], [0] * E, choices.weights[:0], K)
    out = torch.zeros(ROWS, H)
    assert len(experts_forward(x, nothing, params, Activation("swiglu"), out)) == 0 and not out.any()
