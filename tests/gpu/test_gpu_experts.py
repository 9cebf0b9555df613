"""Experts on one GPU: products of all as one, ties, and a whole step, in which the host waits once for each layer's counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_step import CUDA, Found, gpu_step, moved
from support import tiny
from support.errors import FP32, assert_law, law_error
from support.expert_rows import made, run

from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.expert_mlp import is_grouped, runs_grouped
from megatron_sp.ops.routing import RoutingSpec, choose
from megatron_sp.parallel.forward_context import ForwardContext

pytestmark = pytest.mark.gpu
LLAMA = {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
TWO_OF_FOUR = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "biases": TWO_OF_FOUR, "llama": {**LLAMA, **TWO_OF_FOUR}, "in some layers": {**TWO_OF_FOUR, "moe_layer_freq": "[1,0,1]"},
    "sigmoid": {**LLAMA, **TWO_OF_FOUR, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "grouped"), [(torch.float32, 1e-5, False), (torch.bfloat16, 3e-2, False), (torch.bfloat16, 3e-2, True)]
)
def test_one_after_another_and_all_as_one_are_what_the_cpu_computes(
    dtype: torch.dtype, tolerance: float, grouped: bool, bias: bool
) -> None:
    got, want = run(dtype, bias=bias, grouped=grouped, device="cuda"), run(torch.float64, bias=bias, grouped=False)
    for name, value in want.items():
        assert law_error(got[name].cpu(), value) < tolerance, name
    assert not got["w1"][2].any(), "an expert without rows has a gradient of zero"


@pytest.mark.parametrize("grouped", [False, True])
def test_bits_repeat(grouped: bool) -> None:
    first, *others = (run(torch.bfloat16, bias=True, grouped=grouped, device="cuda") for _ in range(4))
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())


def test_they_are_one_where_the_kernel_runs() -> None:
    x, _, _, params = made(torch.bfloat16, bias=False, device="cuda")
    assert is_grouped(x, params) == runs_grouped(x.device)
    if torch.cuda.get_device_capability() == (9, 0):  # torch's kernel is built for these
        assert runs_grouped(x.device)
    x, _, _, params = made(torch.float32, bias=False, device="cuda")
    assert not is_grouped(x, params)


@pytest.mark.parametrize("spec", [RoutingSpec(128, 8), RoutingSpec(64, 6, "sigmoid", num_groups=8, group_top_k=3)])
def test_ties_are_the_cpus(spec: RoutingSpec) -> None:
    logits = torch.randint(0, 4, (512, spec.num_experts), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(choose(logits.to(CUDA), spec).cpu(), choose(logits, spec))


def step(model: Any, batches: list[tiny.Batch]) -> tuple[Found, int]:
    """Loss and every gradient of a step on the GPU, and how often the host waited for it."""
    contexts = [ForwardContext(AttentionMask(), kernel="sdpa") for _ in batches]
    return gpu_step(model, tiny.flatten(model), moved(batches), contexts, "warn")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_is_the_references_and_the_host_waits_for_the_counts_alone(name: str, recompute: str) -> None:
    config = tiny.shape(**SHAPES[name])
    model = tiny.make_model(config, dtype=torch.float32, **tiny.RECOMPUTE[recompute])
    batches = [tiny.make_batch(config, seed=seed) for seed in range(2)]
    want = tiny.reference_step(model, batches)
    got, waits = step(model.to(CUDA), batches)
    assert_law(got, want, FP32)
    layers = len(config.expert_layers(tiny.LAYERS))
    # a recomputation outside a training loop has nobody to tell it the counts of its first pass
    assert waits == layers * len(batches) * (1 + (recompute == "full"))


@pytest.mark.parametrize("name", ["biases", "llama"])
def test_bf16_is_the_reference_to_its_rounding(name: str) -> None:
    """All four experts of each token: no rounding can change a choice."""
    config = tiny.shape(**{**SHAPES[name], "kv_channels": 8, "hidden_size": 16, "moe_router_topk": 4})
    model = tiny.make_model(config, dtype=torch.bfloat16)
    batches = [tiny.make_batch(config, seed=seed) for seed in range(2)]
    want = tiny.reference_step(model, batches)
    got, _ = step(model.to(CUDA), batches)
    assert law_error(got["loss"], want["loss"]) < 2e-2  # type: ignore[arg-type]
    flat = [torch.cat([t.double().reshape(-1) for n, t in sorted(side.items()) if n != "loss" and t is not None]) for side in (got, want)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.998  # three layers of roundings at 2^-9
