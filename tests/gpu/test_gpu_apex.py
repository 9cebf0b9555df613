"""NVIDIA apex's kernels on the GPU against torch's, where apex is installed; the choice and its reasons everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.errors import FP32, assert_law, law_error
from support.op_checks import gradients, leaves, randn
from torch import nn

from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.ops import availability
from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
from megatron_sp.ops.norm import NormSpec, norm
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.optimizer import FlatOptimizer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TRITON = availability.find("triton").available
LACK = "; ".join(k.reason for name in availability.APEX_EXTENSIONS if not (k := availability.find(name)).available)
needs_apex = pytest.mark.skipif(bool(LACK), reason=LACK or "apex is installed")
# 16 bits: apex rounds 1 + weight, and LayerNorm's result three times, torch once more: five times half an eps, 2^-8 or
# 2^-11
DTYPES = [(torch.float32, FP32), (torch.bfloat16, 5 * 2**-8), (torch.float16, 5 * 2**-11)]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_choice_has_a_reason(kind: Any) -> None:
    use = KernelUse(CUDA, torch.float32, norm=NormSpec(kind, 1e-5))
    chosen = choose_fused_kernels("auto", use)
    assert chosen.adamw is not None and chosen.norm is not None and chosen.elementwise is not None
    assert chosen.adamw.name == ("torch" if LACK else "apex")
    assert chosen.norm.name == ("triton" if TRITON else chosen.adamw.name), "Triton's come before apex's"
    assert chosen.elementwise.name == ("triton" if TRITON else "torch")
    if LACK:
        with pytest.raises(RuntimeError, match="--fused-kernels apex cannot be used for AdamW"):
            choose_fused_kernels("apex", use)


@needs_apex
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", [6, 64, 1000, 4096])
@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_norms_are_torchs(kind: Any, zero_centered: bool, width: int, dtype: torch.dtype, tolerance: float) -> None:
    spec = NormSpec(kind, 1e-3, zero_centered)
    inputs = {"x": randn(37, 3, width) * 0.3 + 0.5, "weight": randn(width, seed=1)}
    inputs |= {"bias": randn(width, seed=2)} if kind == "LayerNorm" else {}
    inputs, grad = {n: t.to(CUDA, dtype) for n, t in inputs.items()}, randn(37, 3, width, seed=3).to(CUDA, dtype)
    found = []
    for kernel in ("torch", "apex"):
        chosen = replace(spec, kernel=kernel)  # type: ignore[arg-type]
        found.append(gradients(lambda i, s=chosen: norm(i["x"], i["weight"], i.get("bias"), s), leaves(**inputs), grad))  # type: ignore[misc]
    assert_law(found[1], found[0], tolerance)


@needs_apex
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_adamw_is_torchs(dtype: torch.dtype, beta2: float) -> None:
    """Equal but for 1 - beta2 in fp32, which apex has only to 2^-24 / (1 - beta2), and for rounding of the weights in every step."""
    changes, steps = [], 5
    for kernel in ("torch", "apex"):
        params = [nn.Parameter(randn(*shape).to(CUDA, dtype)) for shape in ((300, 700), (65_537,), (5,))]
        unit = FlatUnit("unit", [(f"p{i}", p) for i, p in enumerate(params)])
        optimizer = FlatOptimizer([unit], OptimizerConfig(clip_grad=0.0, adam_beta2=beta2), kernel=kernel)  # type: ignore[arg-type]
        before = unit.master.clone()
        for step in range(steps):
            unit.grads.copy_(randn(unit.numel, seed=step))
            optimizer.step(1e-2, 0.1, 1.0)
        changes.append(unit.master - before)
    rounding = 2 * steps * 2**-24 * unit.master.abs().max() / changes[0].abs().max()
    assert law_error(changes[1], changes[0]) <= 2**-24 / (1 - beta2) + rounding
