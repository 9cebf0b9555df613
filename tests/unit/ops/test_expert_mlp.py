"""Grouped products of experts against one after another: results, every gradient, experts without rows; bits that repeat."""

from __future__ import annotations

import pytest
import torch
from support.expert_rows import ROWS, E, H, K, made, run

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import Choices, experts_forward, is_grouped


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
