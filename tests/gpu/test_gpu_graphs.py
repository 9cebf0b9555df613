"""Captured steps on a GPU: the bits of eager ones with deterministic kernels, and what a capture that fails leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import tiny
from torch import Tensor

from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
from megatron_sp.config.schema import Config, KernelConfig, OptimizerConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.cuda_graphs import CudaGraphs
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.graphs import StepGraphs, deterministic_kernels
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.step import StepOptions, StepParts, StepResult, TrainStep

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
ALONE = cast(
    "ParallelGroups",
    SimpleNamespace(
        rank=0, world=SINGLE_RANK, tp_rank=0, dp_rank=0, dp_size=1, is_first_of_replica=True, cp=SINGLE_RANK, pp=SINGLE_RANK,
        control=None,
    ),
)  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_step(dtype: torch.dtype, kernel: Any = "sdpa", dropout: float = 0.1) -> TrainStep:
    shape = replace(tiny.BASE, hidden_size=64, kv_channels=16, hidden_dropout=dropout, attention_dropout=dropout)

    def build(config: Config, layout: ParallelContext, on_unit: Any = None) -> GPTModel:
        return GPTModel(shape, KernelConfig(), seed=5, dtype=dtype, layout=layout, on_unit=on_unit)

    sharded = build_sharded(build, Config(), ParallelContext(), None, CUDA)
    optimizer = FlatOptimizer(sharded.units, OptimizerConfig(adam_eps=1e-3, clip_grad=0.05))
    scaler = LossScaler(enabled=dtype == torch.float16, fixed=None, initial=2.0**19, minimum=1.0, window=2, hysteresis=1)
    parts = StepParts(sharded.model, sharded.weights, sharded.gradients, optimizer, scaler)
    return TrainStep(parts, GPT.loss, ALONE, StepOptions(7, dropout > 0, kernel))


def capture(step: TrainStep, **more: Any) -> list[str]:
    told: list[str] = []
    given: dict[str, Any] = {"mode": "on", "warmup": 1, "is_eager": lambda _: False, "tell": told.append}
    step.graphs = StepGraphs(step, lambda: CudaGraphs(CUDA), **(given | more))
    return told


def take(step: TrainStep, number: int, count: int) -> StepResult:
    made = [tiny.make_batch(seed=10 * number + i) for i in range(count)]
    batches = [{name: (t.float() if t.is_floating_point() else t).to(CUDA) for name, t in batch.items()} for batch in made]
    return step.run(batches, number, lr=0.01 / number, weight_decay=0.1)


def assert_alike(step: TrainStep, other: TrainStep) -> None:
    for got, want in zip(step.optimizer.units, other.optimizer.units, strict=True):
        for one, other_one in ((got.master, want.master), (got.grads, want.grads)):
            assert torch.equal(one.view(torch.int32), other_one.view(torch.int32)), got.name  # of an overflow NaN, too


@pytest.fixture(autouse=True)
def synchronized() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_steps_have_the_bits_of_eager_ones(dtype: torch.dtype, count: int) -> None:
    """In fp16 with overflows, whose steps are skipped; attention's kernel draws from the generator that the graphs know."""
    step, other = make_step(dtype), make_step(dtype)
    told = capture(step)
    with deterministic_kernels(step):
        for number in range(1, 7):
            got, want = take(step, number, count), take(other, number, count)
            assert (got.losses, str(got.grad_norm), got.updated) == (want.losses, str(want.grad_norm), want.updated)
    assert_alike(step, other)
    assert told == ["captured steps: used from step 2 on (--cuda-graphs on)"]


def test_auto_finds_equal_bits() -> None:
    step = make_step(torch.bfloat16)
    told = capture(step, mode="auto")
    for number in range(1, 4):
        take(step, number, 3)
    (line,) = told
    assert "the bits of an eager step" in line or "slower: " in line


def test_what_a_failed_capture_leaves_behind() -> None:
    """Eager steps go on, with the bits of a run without a trial."""

    def reading_host(model: Any, batch: tiny.Batch, *rest: Any) -> list[Tensor]:
        return [term * (float(batch["loss_mask"].sum()) > 0) for term in GPT.loss.sums(model, batch, *rest)]

    step, other = make_step(torch.bfloat16), make_step(torch.bfloat16)
    told = capture(step, mode="auto")
    step.loss = other.loss = replace(GPT.loss, sums=reading_host)
    with deterministic_kernels(step):
        for number in range(1, 5):
            assert take(step, number, 2).losses == take(other, number, 2).losses
    assert_alike(step, other)
    assert len(told) == 1 and told[0].startswith("captured steps: not used, the capture failed: ")
