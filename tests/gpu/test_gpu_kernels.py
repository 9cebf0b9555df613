"""Triton's kernels on a GPU: the checks that run everywhere under the interpreter, and whole layers with them and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels import checks
from kernels.test_interpreted import CHECKS
from support.op_checks import randn
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.custom_backward import gradients_of
from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
from megatron_sp.ops.kernels import launch
from megatron_sp.ops.kernels.launch import using_triton
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel.linear import column_linear, row_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not availability.find("triton").available, reason="Triton is not installed: torch's CUDA wheels for Linux have it"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "launcher", launch._run)
    with CUDA:
        yield


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: "-".join(map(str, check)))
def test_the_check_of_the_interpreter(check: tuple[Any, ...]) -> None:
    getattr(checks, check[0])(*check[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_they_are_chosen(kind: Any, dtype: torch.dtype) -> None:
    chosen = choose_fused_kernels("triton", KernelUse(CUDA, dtype, norm=NormSpec(kind, 1e-5)))
    assert [kernel.name for kernel in chosen.chosen] == ["torch", "triton", "triton"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_an_mlp(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Norm, fc1, SwiGLU, fc2 and the residual at a width of real models, against plain torch in fp64."""

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [randn(64, 2, 1024), randn(1024, seed=1), randn(5504, 1024, seed=2) / 32, randn(1024, 2752, seed=3) / 52]
        leaves = [t.to(CUDA, given).to(dtype).requires_grad_() for t in leaves]
        x, weight, w1, w2 = leaves
        bias = torch.zeros(1024, dtype=dtype) if kind == "LayerNorm" else None
        wide, x = column_linear(x, w1, norm=NormInFront(NormSpec(kind, 1e-5), weight, bias))
        out = row_linear(wide, w2, activation=Activation("swiglu"), residual=x)
        return [out.detach(), *gradients_of(leaves, [out], [randn(64, 2, 1024, seed=4).to(CUDA, given).to(dtype)])]

    given = dtype
    with using_triton():
        got = run(dtype)
    for g, w in zip(got, run(torch.float64), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=0, atol=tolerance * float(w.abs().max()))
