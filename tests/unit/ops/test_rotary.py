"""Rotary embedding in place: values, the inverse as backward, and what it is for (only distances matter)."""

from __future__ import annotations

import pytest
import torch
from support import reference
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import Inputs, gradients, leaves, randn
from torch import Tensor

from megatron_sp.ops.rotary import RotaryStretch, apply_rotary, rotary_tables

S, B, G, D = 8, 3, 2, 10
BASE = 100.0


def ours(i: Inputs, r: int, rotated: int, positions: Tensor) -> Tensor:
    tables = rotary_tables(positions, rotated, BASE, torch.float64 if i["qkv"].dtype == torch.float64 else torch.float32)
    return apply_rotary(i["qkv"] * 1, *tables, D, heads=r + 2, rotated=r + 1)  # `* 1`: what is rotated in place is never a leaf


def naive(i: Inputs, r: int, rotated: int, positions: Tensor) -> Tensor:
    rows = i["qkv"].reshape(S, B, G, r + 2, D)
    turned = reference.rotate(rows[:, :, :, : r + 1].permute(1, 2, 3, 0, 4), positions, rotated, BASE).permute(3, 0, 1, 2, 4)
    return torch.cat([turned, rows[:, :, :, r + 1 :]], dim=3).reshape(S, B, -1)


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("rotated", [D, 6, 2])
@pytest.mark.parametrize("start", [0, 1_000_000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_is_the_formula_out_of_place(r: int, rotated: int, start: int, dtype: torch.dtype, tolerance: float) -> None:
    qkv, grad = randn(S, B, G * (r + 2) * D, dtype=dtype), randn(S, B, G * (r + 2) * D, seed=1, dtype=dtype)
    positions = torch.arange(start, start + S)
    want = gradients(lambda i: naive(i, r, rotated, positions), leaves(qkv=qkv.double()), grad.double())
    assert_law(gradients(lambda i: ours(i, r, rotated, positions), leaves(qkv=qkv), grad), want, tolerance)


@pytest.mark.parametrize("stretch, published", [
    (RotaryStretch(), 1.0), (RotaryStretch(2.5), 2.5), (RotaryStretch(8.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 8192)),
    (RotaryStretch(32.0, 0.5, 3.0, 100), (32.0, 0.5, 3.0, 100)),
])  # fmt: skip
def test_stretched_frequencies(stretch: RotaryStretch, published: float | reference.Llama3) -> None:
    """Against the formulas as published; of Llama 3.1's three kinds of frequencies all are among these."""
    cos, sin = rotary_tables(torch.tensor([0, 1]), 64, 500000.0, torch.float64, stretch)
    want = torch.tensor([reference.frequency(i, 64, 500000.0, published) for i in range(32)], dtype=torch.float64)
    assert law_error(torch.atan2(sin[1], cos[1]), want) <= FP64
    if stretch.original_length > 1:
        plain = torch.tensor([reference.frequency(i, 64, 500000.0) for i in range(32)], dtype=torch.float64)
        slow = plain / stretch.factor
        assert (want == plain).any() and (want == slow).any() and ((want < plain) & (want > slow)).any()


def test_values_and_the_rest_of_each_head_are_untouched() -> None:
    qkv = randn(S, B, G * 5 * D)
    out = ours({"qkv": qkv}, 3, 6, torch.arange(S)).view(S, B, G, 5, D)
    assert torch.equal(out[:, :, :, 4], qkv.view(S, B, G, 5, D)[:, :, :, 4])
    assert torch.equal(out[..., 6:], qkv.view(S, B, G, 5, D)[..., 6:])
    assert torch.equal(out[0], qkv.view(S, B, G, 5, D)[0])  # position 0 does not turn
    assert not torch.equal(out[1, ..., :4, :6], qkv.view(S, B, G, 5, D)[1, ..., :4, :6])


def test_a_far_position_is_as_exact_as_a_near_one() -> None:
    """In fp32 the angle of position 2^24 + 1 would be that of 2^24: wrong by a radian."""
    cos, _ = rotary_tables(torch.tensor([2**24 + 1]), 2, BASE)
    assert float(cos) == pytest.approx(float(torch.tensor(2.0**24 + 1, dtype=torch.float64).cos()), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    qkv, grad, positions = randn(S, B, G * 5 * D, dtype=dtype), randn(S, B, G * 5 * D, seed=1, dtype=dtype), torch.arange(500, 500 + S)
    want = gradients(lambda i: naive(i, 3, D, positions), leaves(qkv=qkv.double()), grad.double())
    got = gradients(lambda i: ours(i, 3, D, positions), leaves(qkv=qkv), grad)
    assert_law(got, want, torch.finfo(dtype).eps / 2)


def test_the_gradient_handed_over_is_not_written_to() -> None:
    """Autograd may give the same tensor to another consumer."""
    qkv, grad = leaves(qkv=randn(S, B, G * 3 * D)), randn(S, B, G * 3 * D, seed=1)
    before = grad.clone()
    ours(qkv, 1, D, torch.arange(S)).backward(grad)
    assert torch.equal(grad, before)


def test_a_strided_gradient() -> None:
    grad = randn(B, S, G * 3 * D).transpose(0, 1)
    want = gradients(lambda i: naive(i, 1, D, torch.arange(S)), leaves(qkv=randn(S, B, G * 3 * D)), grad)
    assert_law(gradients(lambda i: ours(i, 1, D, torch.arange(S)), leaves(qkv=randn(S, B, G * 3 * D)), grad), want, FP64)


def test_it_is_in_place() -> None:
    qkv = randn(S, B, G * 3 * D)
    assert apply_rotary(qkv, *rotary_tables(torch.arange(S), D, BASE, torch.float64), D, heads=3, rotated=2).data_ptr() == qkv.data_ptr()
