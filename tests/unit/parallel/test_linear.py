"""The linear op: values, all gradients, the activation before, the residual after, and the main_grad."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import reference
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import Inputs, PoisonedSink, gradients, in_blocks, leaves, randn
from torch import Tensor

from megatron_sp.config.schema_model import ActivationName
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel.linear import column_linear, row_linear

__all__ = ["in_blocks"]
pytestmark = pytest.mark.usefixtures("in_blocks")
S, B, IN, OUT = 8, 3, 5, 7
NAMES: tuple[ActivationName, ...] = ("gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu")


def tensors(width_factor: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        "x": randn(S, B, IN * width_factor, dtype=dtype), "weight": randn(OUT, IN, dtype=dtype),
        "bias": randn(OUT, dtype=dtype), "residual": randn(S, B, OUT, dtype=dtype),
    }  # fmt: skip


def naive_linear(i: Inputs, name: str | None) -> Tensor:
    a = i["x"] if name is None else reference.activation(name, i["x"])
    y = torch.einsum("...i,oi->...o", a, i["weight"])
    return y + i.get("bias", 0.0) + i.get("residual", 0.0)


def ours(i: Inputs, name: ActivationName | None = None, main_grad: PoisonedSink | None = None) -> Tensor:
    activation = None if name is None else Activation(name)
    return row_linear(i["x"], i["weight"], i.get("bias"), activation=activation, residual=i.get("residual"), main_grad=main_grad)


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_is_the_formula(name: ActivationName | None, bias: bool, residual: bool, dtype: torch.dtype, tolerance: float) -> None:
    inputs = tensors(1 if name is None else Activation(name).width_factor, dtype)
    kept = {k: v for k, v in inputs.items() if (bias or k != "bias") and (residual or k != "residual")}
    grad = randn(S, B, OUT, seed=3, dtype=dtype)
    want = gradients(lambda i: naive_linear(i, name), leaves(**kept), grad)
    assert_law(gradients(lambda i: ours(i, name), leaves(**kept), grad), want, tolerance)


@pytest.mark.parametrize(
    "frozen", [("x",), ("weight",), ("bias",), ("residual",), ("x", "residual"), ("weight", "bias"), ("x", "weight", "bias")]
)
@pytest.mark.parametrize("with_main_grad", [True, False])
def test_frozen_inputs_get_no_gradient(frozen: tuple[str, ...], with_main_grad: bool) -> None:
    inputs, grad = leaves(frozen, **tensors()), randn(S, B, OUT, seed=3)
    want = gradients(lambda i: naive_linear(i, "gelu"), leaves(frozen, **tensors()), grad)
    main_grad = PoisonedSink(*(inputs[k] for k in ("weight", "bias") if k not in frozen)) if with_main_grad else None
    got = gradients(lambda i: ours(i, "gelu", main_grad), inputs, grad)
    if main_grad is not None:
        got |= {k: main_grad.of(inputs[k]) for k in ("weight", "bias") if k not in frozen}
    assert_law(got, want, FP64)


def test_the_main_grad_is_overwritten_once_then_added_to() -> None:
    inputs, held = leaves(**tensors()), ("weight", "bias")
    main_grad = PoisonedSink(*(inputs[k] for k in held))
    total: dict[str, Tensor] = {}
    for micro_batch in range(3):
        grad = randn(S, B, OUT, seed=3 + micro_batch)
        want = gradients(lambda i: naive_linear(i, "gelu"), leaves(**tensors()), grad)
        got = gradients(lambda i: ours(i, "gelu", main_grad), inputs, grad)
        assert got["weight"] is None and got["bias"] is None
        assert_law({k: got[k] for k in ("out", "x", "residual")}, {k: want[k] for k in ("out", "x", "residual")}, FP64)
        total = {k: want[k] + total.get(k, 0.0) for k in held}  # type: ignore[operator]
        assert_law({k: main_grad.of(inputs[k]) for k in held}, total, FP64)
    assert main_grad.claims == [True, True, False, False, False, False]


def test_a_parameter_that_the_main_grad_does_not_hold_goes_through_autograd() -> None:
    inputs, grad = leaves(**tensors()), randn(S, B, OUT, seed=3)
    main_grad = PoisonedSink(inputs["bias"])
    got = gradients(lambda i: ours(i, None, main_grad), inputs, grad)
    want = gradients(lambda i: naive_linear(i, None), leaves(**tensors()), grad)
    assert_law(got | {"bias": main_grad.of(inputs["bias"])}, want, FP64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_half_precision_accumulates_in_an_fp32_main_grad(dtype: torch.dtype, micro_batches: int) -> None:
    inputs = leaves(**tensors(dtype=dtype))
    main_grad = PoisonedSink(inputs["weight"], inputs["bias"], dtype=torch.float32)
    want_weight, want_bias = torch.zeros(OUT, IN), torch.zeros(OUT)
    for micro_batch in range(micro_batches):
        grad = randn(S, B, OUT, seed=3 + micro_batch, dtype=dtype)
        want = gradients(lambda i: naive_linear(i, None), leaves(**{k: v.detach().double() for k, v in inputs.items()}), grad.double())
        want_weight, want_bias = want_weight + want["weight"], want_bias + want["bias"]
        got = gradients(lambda i: ours(i, None, main_grad), inputs, grad)
        # one rounding of GEMM plus residual, then one of the bias added to it
        assert law_error(got["out"], want["out"]) <= 3 * torch.finfo(dtype).eps  # type: ignore[arg-type]
        assert law_error(got["x"], want["x"]) <= torch.finfo(dtype).eps  # type: ignore[arg-type]
    # on CPU each micro-batch's product is rounded once to 16 bits; sums of them are fp32
    assert law_error(main_grad.of(inputs["weight"]), want_weight) <= torch.finfo(dtype).eps
    assert law_error(main_grad.of(inputs["bias"]), want_bias) <= FP32


def test_strides_of_inputs_and_gradient_do_not_matter() -> None:
    plain = tensors()
    odd = {
        "x": randn(B, IN, S).permute(2, 0, 1), "weight": randn(IN, OUT).t(), "bias": randn(OUT, 2)[:, 0],
        "residual": randn(B, S, OUT).transpose(0, 1),
    }  # fmt: skip
    assert all(odd[k].shape == plain[k].shape and not odd[k].is_contiguous() for k in plain)
    grad = randn(B, OUT, S, seed=5).permute(2, 0, 1)
    want = gradients(lambda i: naive_linear(i, "gelu"), leaves(**odd), grad)
    inputs = leaves(**odd)
    main_grad = PoisonedSink(inputs["weight"], inputs["bias"])
    assert_law(gradients(lambda i: ours(i, "gelu"), leaves(**odd), grad), want, FP64)
    got = gradients(lambda i: ours(i, "gelu", main_grad), inputs, grad)
    assert_law(got | {k: main_grad.of(inputs[k]) for k in ("weight", "bias")}, want, FP64)


def test_neither_inputs_nor_gradient_are_written_to() -> None:
    inputs, grad = leaves(**tensors()), randn(S, B, OUT, seed=3)
    before = {k: v.detach().clone() for k, v in inputs.items()} | {"grad": grad.clone()}
    gradients(ours, inputs, grad)
    assert all(torch.equal({**inputs, "grad": grad}[k], v) for k, v in before.items())


@pytest.mark.parametrize("shape", [(0, 3, IN), (S, 0, IN), (1, 1, IN), (IN,), (2, IN)])
def test_few_or_no_tokens_and_other_ranks(shape: tuple[int, ...]) -> None:
    def made() -> Inputs:
        return leaves(x=randn(*shape), weight=randn(OUT, IN), bias=randn(OUT))

    inputs, grad = made(), randn(*shape[:-1], OUT, seed=2)
    main_grad = PoisonedSink(inputs["weight"], inputs["bias"])
    want = gradients(lambda i: F.linear(i["x"], i["weight"], i["bias"]), made(), grad)
    assert_law(gradients(ours, made(), grad), want, FP64)
    got = gradients(lambda i: ours(i, None, main_grad), inputs, grad)
    assert_law(got | {k: main_grad.of(inputs[k]) for k in ("weight", "bias")}, want, FP64)


def test_the_result_may_be_modified_in_place() -> None:
    """As rotary embedding does; autograd forbids it for a view made inside a function of ours."""
    inputs = leaves(x=randn(S, B, IN), weight=randn(OUT, IN))
    row_linear(inputs["x"], inputs["weight"]).mul_(2).sum().backward()
    want = leaves(x=randn(S, B, IN), weight=randn(OUT, IN))
    (F.linear(want["x"], want["weight"]) * 2).sum().backward()
    assert_law({k: v.grad for k, v in inputs.items()}, {k: v.grad for k, v in want.items()}, FP64)


NORM_EPS = 1e-3


def norm_tensors(kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Inputs of norm_linear, and a factor ``branch`` on the residual branch that makes its gradient differ from element to element."""
    made = {k: v for k, v in tensors(dtype=dtype).items() if k != "residual"}
    made |= {"norm_weight": randn(IN, seed=4, dtype=dtype), "branch": randn(S, B, IN, seed=6, dtype=dtype)}
    return made | ({"norm_bias": randn(IN, seed=5, dtype=dtype)} if kind == "LayerNorm" else {})


def both_outputs(y: Tensor, x: Tensor, branch: Tensor) -> Tensor:
    return torch.cat([y, x * branch], dim=-1)


def naive_norm_linear(i: Inputs) -> Tensor:
    normed = reference.norm(i["x"], i["norm_weight"], i.get("norm_bias"), NORM_EPS, False)
    return both_outputs(torch.einsum("...i,oi->...o", normed, i["weight"]) + i["bias"], i["x"], i["branch"])


def our_norm_linear(i: Inputs, main_grad: PoisonedSink | None = None) -> Tensor:
    kind = "LayerNorm" if "norm_bias" in i else "RMSNorm"
    norm = NormInFront(NormSpec(kind, NORM_EPS), i["norm_weight"], i.get("norm_bias"))  # type: ignore[arg-type]
    return both_outputs(*column_linear(i["x"], i["weight"], i["bias"], norm=norm, main_grad=main_grad), i["branch"])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_a_norm_in_front_and_the_residual_branch_are_the_formula(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs, grad = norm_tensors(kind, dtype), randn(S, B, OUT + IN, seed=3, dtype=dtype)
    want = gradients(naive_norm_linear, leaves(**inputs), grad)
    assert_law(gradients(our_norm_linear, leaves(**inputs), grad), want, tolerance)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    "frozen", [("x",), ("weight",), ("norm_weight",), ("weight", "bias"), ("weight", "bias", "norm_weight", "norm_bias")]
)
@pytest.mark.parametrize("with_main_grad", [True, False])
def test_frozen_inputs_of_a_norm_in_front_get_no_gradient(kind: str, frozen: tuple[str, ...], with_main_grad: bool) -> None:
    inputs, grad = leaves(frozen, **norm_tensors(kind)), randn(S, B, OUT + IN, seed=3)
    want = gradients(naive_norm_linear, leaves(frozen, **norm_tensors(kind)), grad)
    held = [k for k in inputs if k not in ("x", "branch", *frozen)]
    main_grad = PoisonedSink(*(inputs[k] for k in held)) if with_main_grad else None
    got = gradients(lambda i: our_norm_linear(i, main_grad), inputs, grad)
    if main_grad is not None:
        got |= {k: main_grad.of(inputs[k]) for k in held}
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
    assert_law({k: v for k, v in got.items() if v is not None}, {k: v for k, v in want.items() if v is not None}, FP64)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_two_outputs_of_a_norm_in_front_is_used(used: int) -> None:
    inputs = norm_tensors("LayerNorm")
    part = slice(0, OUT) if used == 0 else slice(OUT, None)

    def theirs(i: Inputs) -> Tensor:
        return naive_norm_linear(i)[..., part]

    def ours_alone(i: Inputs) -> Tensor:
        norm = NormInFront(NormSpec("LayerNorm", NORM_EPS), i["norm_weight"], i["norm_bias"])
        y, x = column_linear(i["x"], i["weight"], i["bias"], norm=norm)
        return y if used == 0 else x * i["branch"]

    grad = randn(S, B, OUT if used == 0 else IN, seed=3)
    want, got = gradients(theirs, leaves(**inputs), grad), gradients(ours_alone, leaves(**inputs), grad)
    zeros = {k: torch.zeros_like(v) for k, v in inputs.items()}  # no gradient and a gradient of zeros are the same here
    assert_law({k: zeros[k] if v is None else v for k, v in got.items()}, {k: zeros[k] if v is None else v for k, v in want.items()}, FP64)
