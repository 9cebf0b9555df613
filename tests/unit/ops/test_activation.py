"""Activations: values and hand-written gradients against naive formulas."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from support import reference
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import gradients, in_blocks, leaves, randn

from megatron_sp.config.schema_model import ActivationName
from megatron_sp.ops.activation import Activation

__all__ = ["in_blocks"]
pytestmark = pytest.mark.usefixtures("in_blocks")
NAMES: tuple[ActivationName, ...] = ("gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu_tanh", "geglu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_values_and_gradients_are_the_formula(name: ActivationName, dtype: torch.dtype, tolerance: float) -> None:
    activation = Activation(name)
    u, grad = randn(8, 3, 5 * activation.width_factor, dtype=dtype) * 2, randn(8, 3, 5, seed=1, dtype=dtype)
    strided = u.clone().transpose(0, 1).contiguous().transpose(0, 1)
    want = gradients(lambda i: reference.activation(name, i["u"]), leaves(u=u), grad)
    for given in (u, strided):
        before = given.clone()
        assert_law({"out": activation.forward(given), "u": activation.backward_(grad.clone(), given)}, want, tolerance)
        assert torch.equal(given, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_the_backward_pass_of_weighted_rows(name: ActivationName, dtype: torch.dtype, tolerance: float) -> None:
    activation = Activation(name)
    u, grad, weights = randn(24, 5 * activation.width_factor, dtype=dtype) * 2, randn(24, 5, seed=1, dtype=dtype), randn(24, 1, dtype=dtype)
    want = gradients(lambda i: i["weights"] * reference.activation(name, i["u"]), leaves(u=u, weights=weights), grad)
    grad_u, out, of_weights = activation.weighted_backward_(grad.clone(), u, weights)
    assert_law({"out": out, "u": grad_u, "weights": of_weights[:, None]}, want, tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only(name: ActivationName, dtype: torch.dtype) -> None:
    activation = Activation(name)
    u, grad = randn(64, 8 * activation.width_factor, dtype=dtype), randn(64, 8, seed=1, dtype=dtype)
    want = gradients(lambda i: reference.activation(name, i["u"]), leaves(u=u.double()), grad.double())
    tolerance = 4 * torch.finfo(dtype).eps  # at most three roundings (silu, product, gradient) relative to the largest element
    assert law_error(activation.forward(u), want["out"]) <= tolerance
    assert law_error(activation.backward_(grad.clone(), u), want["u"]) <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: ActivationName) -> None:
    activation = Activation(name)
    u = torch.empty(0, 3, 4 * activation.width_factor)
    assert activation.forward(u).shape == (0, 3, 4)
    assert activation.backward_(torch.empty(0, 3, 4), u).shape == u.shape


def test_every_name_is_known() -> None:
    assert set(NAMES) == set(get_args(ActivationName))
