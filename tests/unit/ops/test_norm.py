"""LayerNorm and RMSNorm: values and all gradients against the formula and against torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import reference
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import Inputs, PoisonedSink, gradients, in_blocks, leaves, randn
from torch import Tensor

from megatron_sp.ops import norm as norm_module
from megatron_sp.ops.norm import NormSpec, norm, norm_backward, norm_forward

__all__ = ["in_blocks"]
pytestmark = pytest.mark.usefixtures("in_blocks")
KINDS, EPS = ("layer", "rms"), 1e-3  # a large eps, so that its place in the formula matters


def tensors(kind: str, shape: tuple[int, ...] = (8, 3, 5), dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = {"x": randn(*shape, dtype=dtype) * 0.3 + 0.5, "weight": randn(shape[-1], seed=1, dtype=dtype)}
    return made | ({"bias": randn(shape[-1], seed=2, dtype=dtype)} if kind == "layer" else {})


def ours(i: Inputs, zero_centered: bool = False, main_grad: PoisonedSink | None = None, eps: float = EPS) -> Tensor:
    spec = NormSpec("LayerNorm" if "bias" in i else "RMSNorm", eps, zero_centered)
    return norm(i["x"], i["weight"], i.get("bias"), spec, main_grad=main_grad)


def naive(i: Inputs, zero_centered: bool = False) -> Tensor:
    return reference.norm(i["x"], i["weight"], i.get("bias"), EPS, zero_centered)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(8, 3, 5), (7, 4), (2, 3, 4, 6), (3, 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_is_the_formula(kind: str, zero_centered: bool, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    inputs, grad = tensors(kind, shape, dtype), randn(*shape, seed=3, dtype=dtype)
    want = gradients(lambda i: naive(i, zero_centered), leaves(**{k: v.double() for k, v in inputs.items()}), grad.double())
    if shape == (3, 1):
        tolerance *= 1e3  # one channel: the output hardly depends on x, and the gradient is a difference of nearly equal numbers
    assert_law(gradients(lambda i: ours(i, zero_centered), leaves(**inputs), grad), want, tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("bias",), ("weight", "bias"), ("x", "weight")])
@pytest.mark.parametrize("with_main_grad", [True, False])
def test_frozen_inputs_get_no_gradient(kind: str, frozen: tuple[str, ...], with_main_grad: bool) -> None:
    if kind == "rms" and "bias" in frozen:
        frozen = tuple(k for k in frozen if k != "bias") or ("x",)
    if kind == "rms" and set(frozen) == {"x", "weight"}:
        frozen = ("x",)
    inputs, grad = leaves(frozen, **tensors(kind)), randn(8, 3, 5, seed=3)
    held = [k for k in inputs if k not in (*frozen, "x")]
    main_grad = PoisonedSink(*(inputs[k] for k in held)) if with_main_grad else None
    want = gradients(naive, leaves(frozen, **tensors(kind)), grad)
    got = gradients(lambda i: ours(i, False, main_grad), inputs, grad)
    assert_law(got | {k: main_grad.of(inputs[k]) for k in held if main_grad is not None}, want, FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_main_grad_is_overwritten_once_then_added_to(kind: str) -> None:
    inputs = leaves(**tensors(kind))
    held = [k for k in inputs if k != "x"]
    main_grad, total = PoisonedSink(*(inputs[k] for k in held)), dict.fromkeys(held, 0.0)
    for micro_batch in range(3):
        grad = randn(8, 3, 5, seed=3 + micro_batch)
        want = gradients(naive, leaves(**tensors(kind)), grad)
        got = gradients(lambda i: ours(i, False, main_grad), inputs, grad)
        assert all(got[k] is None for k in held)
        total = {k: total[k] + want[k] for k in held}  # type: ignore[operator]
        assert_law({k: main_grad.of(inputs[k]) for k in held}, total, FP64)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind: str) -> None:
    inputs, grad = tensors(kind), randn(5, 8, 3, seed=3).permute(1, 2, 0)
    inputs["x"] = randn(3, 5, 8).permute(2, 0, 1) * 0.3 + 0.5
    want = gradients(naive, leaves(**inputs), grad)
    assert_law(gradients(ours, leaves(**inputs), grad), want, FP64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_wide_statistics_and_gradient_sums(kind: str, dtype: torch.dtype) -> None:
    inputs, grad = tensors(kind, (64, 8, 32), dtype), randn(64, 8, 32, seed=3, dtype=dtype)
    want = gradients(naive, leaves(**{k: v.double() for k, v in inputs.items()}), grad.double())
    held = leaves(**inputs)
    main_grad = PoisonedSink(*(v for k, v in held.items() if k != "x"), dtype=torch.float32)
    got = gradients(lambda i: ours(i, False, main_grad), held, grad)
    eps = torch.finfo(dtype).eps
    assert law_error(got["out"], want["out"]) <= eps  # type: ignore[arg-type]
    assert law_error(got["x"], want["x"]) <= eps  # type: ignore[arg-type]
    for name in [k for k in inputs if k != "x"]:
        assert law_error(main_grad.of(held[name]), want[name]) <= FP32, name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_huge_values_and_no_tokens(kind: str) -> None:
    inputs = tensors(kind)
    zero = gradients(ours, leaves(**inputs | {"x": torch.zeros(8, 3, 5, dtype=torch.float64)}), randn(8, 3, 5))
    assert all(torch.isfinite(t).all() for t in zero.values() if t is not None)
    huge = tensors(kind, dtype=torch.float32)
    huge["x"] *= 1e17  # squares stay below fp32's largest number, barely
    assert torch.isfinite(ours(leaves(**huge))).all()
    empty = leaves(**inputs | {"x": torch.empty(0, 3, 5, dtype=torch.float64)})
    main_grad = PoisonedSink(*(v for k, v in empty.items() if k != "x"))
    got = gradients(lambda i: ours(i, False, main_grad), empty, torch.empty(0, 3, 5, dtype=torch.float64))
    assert got["out"].shape == got["x"].shape == (0, 3, 5)  # type: ignore[union-attr]
    assert all(not main_grad.of(v).any() for k, v in empty.items() if k != "x")


# ------------------------------------------------------------------------------------------- torch's own RMSNorm on a GPU


@pytest.fixture
def torchs_rms_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel as it is used on a GPU; its backward, which the CPU does not have, is played with its signature and dtypes."""

    def backward(grad: Tensor, x: Tensor, shape: tuple[int, ...], rstd: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Any, Any]:
        assert grad.is_contiguous() and x.is_contiguous() and shape == (x.shape[-1],) and rstd.shape == (*x.shape[:-1], 1)
        normed, g = x.float() * rstd, grad.float() * weight.float()
        grad_x = (rstd * (g - normed * (g * normed).mean(-1, keepdim=True))).to(x.dtype)
        return (grad_x if mask[0] else None), ((grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype) if mask[1] else None)

    original = norm_module._is_for_torchs_rms_norm
    assert not original(torch.ones(2, 3), NormSpec("RMSNorm", 1e-5)), "on the CPU ours is faster"

    def on_gpu(x: Tensor, spec: NormSpec) -> bool:
        return original(cast(Tensor, SimpleNamespace(is_cuda=True, dtype=x.dtype, numel=x.numel)), spec)

    monkeypatch.setattr(norm_module, "_is_for_torchs_rms_norm", on_gpu)
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm_backward", backward)


@pytest.mark.parametrize("needs", [(True, True, False), (True, False, False), (False, True, False)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_torchs_rms_norm_and_the_residuals_gradient(torchs_rms_norm: None, dtype: torch.dtype, rtol: float, needs: Any) -> None:
    x, grad, add = (randn(5, 3, 32, seed=i).to(dtype) for i in range(3))
    weight, spec = randn(32, seed=4).to(dtype), NormSpec("RMSNorm", 1e-5)
    y, stats = norm_forward(x, weight, None, spec)
    got = [y, *norm_backward(grad, x, weight, None, stats, spec, needs, add)]
    wide = [t.double() for t in (x, weight, grad, add)]
    y, stats = norm_forward(wide[0], wide[1], None, spec)
    want = [y, *norm_backward(wide[2], wide[0], wide[1], None, stats, spec, needs, wide[3])]
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None and w is not None:
            assert g.dtype == dtype
            torch.testing.assert_close(g.double(), w, rtol=rtol, atol=rtol * float(w.abs().max()))


def test_torchs_rms_norm_does_not_round_1_plus_the_weight(torchs_rms_norm: None) -> None:
    """A zero-centered weight of 1e-3 would be lost in bf16."""
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.full((64,), 3e-3, dtype=torch.bfloat16)
    spec = NormSpec("RMSNorm", 0.0, zero_centered=True)
    assert not norm_module._is_for_torchs_rms_norm(x, spec) and norm_module._is_for_torchs_rms_norm(x.float(), spec)
    y, _ = norm_forward(x.float(), weight.float(), None, spec)
    torch.testing.assert_close(y, torch.full_like(y, 1.003), rtol=1e-4, atol=0)
