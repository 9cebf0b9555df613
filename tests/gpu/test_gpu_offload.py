"""--offload-optimizer on a GPU: pinned copies on a stream of their own, and the weights of a run without it, to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from support.errors import FP32, assert_law
from torch import Tensor, nn

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.offload import HostCopies
from megatron_sp.optim.optimizer import FlatOptimizer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def trained(layers: nn.ModuleList, stage: int, offload: bool, steps: int = 6) -> tuple[dict[str, Tensor], list[FlatUnit]]:
    """Weights after some steps; one step in the middle is skipped, as one that is not finite."""
    zero = Zero(stage, SINGLE_RANK)
    units = [
        FlatUnit(str(i), ((f"{i}.{n}", p) for n, p in layer.named_parameters()), zero=zero, offload=offload)
        for i, layer in enumerate(layers)
    ]
    host = HostCopies(units) if offload else None
    gradients = FlatGradients(units, SINGLE_RANK, host=host)
    optimizer = FlatOptimizer(units, OptimizerConfig(clip_grad=0.5, adam_eps=1e-3), host=host)
    generator = torch.Generator(CUDA).manual_seed(3)
    for step in range(steps):
        gradients.start_step()
        gradients.last_micro_batch()
        x = torch.randn(64, 1024, generator=generator, device=CUDA).to(units[0].dtype)
        for layer in layers:
            x = layer(x).tanh()
        x.float().square().sum().backward()
        for index in reversed(range(len(units))):
            gradients.unit_done(index)
        gradients.finish_step()
        norm = float(optimizer.grad_norm())
        if step != 2:
            optimizer.step(1e-2, 0.1, norm)
    torch.cuda.synchronize()
    return {slot.name: slot.view(unit.master.cpu()).clone() for unit in units for slot in unit.slots}, units


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_weights_of_a_run_without_it(dtype: torch.dtype, stage: int) -> None:
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4)).to(CUDA, dtype)
    want, _ = trained(copy.deepcopy(layers), stage, offload=False)
    got, units = trained(layers, stage, offload=True)
    if dtype == torch.float32:
        assert_law(got, want, FP32)
    else:  # 16-bit products: a last bit of a weight moves the next step's gradients by a thousandth of themselves
        assert_law(got, want, 2e-3)
    for unit in units:
        assert unit.master.device.type == "cpu" and unit.local_params.device.type == "cuda"
        assert torch.equal(unit.local_params.cpu(), unit.master.to(dtype)), "what came back is what the host has, rounded"


def test_nothing_is_left_on_the_gpu() -> None:
    """Beside parameters and gradients: no master weights, no moments."""
    before = torch.cuda.memory_allocated()
    layers = nn.ModuleList(nn.Linear(1024, 1024, device=CUDA, dtype=torch.bfloat16) for _ in range(8))
    _, units = trained(layers, 1, offload=True)
    numel = sum(unit.numel for unit in units)
    assert torch.cuda.memory_allocated() - before < (2 + 4 + 1) * numel
    assert all(unit.master.is_pinned() or unit.is_16_bit for unit in units)
