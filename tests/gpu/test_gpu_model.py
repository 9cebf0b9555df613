"""The tiny model on one GPU: a whole step against the plain reference, half precision, recomputation, no waiting host, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_step import CUDA, Found, moved
from gpu_step import gpu_step as run_gpu_step
from support import tiny
from support.errors import FP32, assert_law, law_error
from torch import Tensor

from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.models.attention import SelfAttention
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.dropout import DropoutKeys
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import Norm
from megatron_sp.parallel.parallel_context import ParallelContext

pytestmark = pytest.mark.gpu
ROPE, GROUPED = {"position_embedding_type": "rope"}, {"group_query_attention": True, "num_query_groups": 2}
LLAMA = {**ROPE, **GROUPED, "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {**LLAMA, "untie_embeddings_and_output_weights": True},
    "qk norm": {**ROPE, "qk_layernorm": True},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.1},
}


def gpu_step(model: GPTModel, gradients: FlatGradients, batches: list[tiny.Batch]) -> Found:
    """A step without anything that makes the host wait."""
    there = moved(batches)
    return run_gpu_step(model, gradients, there, [context(model, batch) for batch in there])[0]


def context(model: GPTModel, batch: tiny.Batch) -> ForwardContext:
    config, keys = model.config, None
    if config.hidden_dropout or config.attention_dropout:
        keys = DropoutKeys.create(7, 3, batch["sample_ids"], torch.arange(tiny.S, device=CUDA))
    return ForwardContext(AttentionMask(), kernel="reference" if config.attention_dropout else "sdpa", dropout=keys)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_step_is_the_references_and_the_host_never_waits(name: str, recompute: str) -> None:
    config = tiny.shape(**SHAPES[name])
    model = tiny.make_model(config, dtype=torch.float32, **tiny.RECOMPUTE[recompute])
    batches = [tiny.make_batch(config, seed=seed) for seed in range(2)]
    want = tiny.reference_step(model, batches)
    model.to(CUDA)
    assert_law(gpu_step(model, tiny.flatten(model), batches), want, FP32)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_bf16_is_the_reference_to_its_rounding(name: str) -> None:
    config = tiny.shape(**{**SHAPES[name], "kv_channels": 8, "hidden_size": 16, "ffn_hidden_size": 24})
    model = tiny.make_model(config, dtype=torch.bfloat16)
    batches = [tiny.make_batch(config, seed=seed) for seed in range(2)]
    want = tiny.reference_step(model, batches)
    model.to(CUDA)
    got = gpu_step(model, tiny.flatten(model), batches)
    assert all(g is not None and g.dtype == torch.float32 for n, g in got.items() if n != "loss")
    assert law_error(got["loss"], want["loss"]) < 2e-2  # type: ignore[arg-type]
    flat = [torch.cat([t.double().reshape(-1) for n, t in sorted(side.items()) if n != "loss" and t is not None]) for side in (got, want)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.998  # three layers of roundings at 2^-9


def test_training_goes_down_and_its_updates_are_those_of_the_cpu() -> None:
    config = tiny.shape(**LLAMA)
    batches = [tiny.make_batch(config, seed=1)]
    weights: list[dict[str, Tensor]] = []
    losses: list[float] = []
    for device in ("cpu", "cuda"):
        model = tiny.make_model(config, dtype=torch.float32).to(device)
        gradients = tiny.flatten(model)
        optimizer = FlatOptimizer(gradients.units, OptimizerConfig(lr=0.05, optimizer="sgd", clip_grad=0.5))
        for _ in range(3):
            found = tiny.run_step(model, gradients, batches) if device == "cpu" else gpu_step(model, gradients, batches)
            assert found["loss"] is not None
            losses.append(float(found["loss"]))
            optimizer.step(0.05, 0.1, float(optimizer.grad_norm()))
        weights.append({n: p.detach().cpu().clone() for n, p in model.named_parameters()})
    assert losses[5] < losses[3] and losses[5] == pytest.approx(losses[2], rel=1e-5)
    assert_law(weights[1], weights[0], FP32)


@pytest.mark.parametrize("mode, chunks", [("none", 1), ("split-qkv", 1), ("chunked", 2)])
def test_the_attention_block_is_captured_in_a_graph(mode: Any, chunks: int) -> None:
    config = tiny.shape(**{**ROPE, "num_attention_heads": 4, "kv_channels": 64, "hidden_size": 64})
    layout = ParallelContext(mode=mode, num_chunks=chunks)
    attention = SelfAttention(config, 0, "block", 5, torch.bfloat16, layout).to(CUDA)
    norm = Norm(config, 64, torch.bfloat16, layout).to(CUDA)
    x, grad = (torch.randn(tiny.S, 3, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    params = [attention.linear_qkv.weight, attention.linear_proj.weight, norm.weight]
    from megatron_sp.ops.rotary import rotary_tables

    tables = rotary_tables(torch.arange(tiny.S, device=CUDA), config.rotary_dim, config.rotary_base)
    ctx = ForwardContext(AttentionMask(), length=tiny.S, rotary=tables)

    def once() -> list[Tensor]:
        y, _ = attention(x, ctx, norm.in_front(), None)
        return [y.detach(), *torch.autograd.grad(y, [x, *params], grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            want = [t.clone() for t in once()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    for t in captured:
        t.fill_(float("nan"))
    graph.replay()
    for got, expected in zip(captured, want, strict=True):
        assert law_error(got, expected) < 1e-2


def test_memory_is_flat_over_steps() -> None:
    config = tiny.shape(**LLAMA)
    model = tiny.make_model(config, dtype=torch.bfloat16).to(CUDA)
    gradients, batches = tiny.flatten(model), [tiny.make_batch(config, seed=1)]
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        gpu_step(model, gradients, batches)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] == peaks[2] == peaks[3]
