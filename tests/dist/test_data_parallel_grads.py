"""Data parallel: gradients are those of one process whoever has how many loss tokens, with frozen units, and as soon as they may be.

Layouts, models and recomputation are in test_equality_grid.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import tiny
from support.errors import FP64, assert_law
from support.ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer

CONFIG = tiny.shape(hidden_dropout=0.2, attention_dropout=0.1)


def share(rank: int, step: int) -> list[tiny.Batch]:
    """Micro-batches of one rank: other tokens, another number of loss tokens on each, and on rank 1 none at all."""
    mask = 0.0 if rank == 1 else 0.3 + 0.2 * rank
    return [tiny.make_batch(CONFIG, seed=100 * step + 10 * rank + i, mask=mask) for i in range(2)]


def _steps(overlap: bool) -> None:
    """Two steps; each step's loss, gradients and norm, and the weights at the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = ParallelGroups.create(torch.device("cpu"))
    sharded, alone = tiny.make_model(CONFIG), tiny.make_model(CONFIG)
    ours, reference = tiny.flatten(sharded, groups.dp_cp_sp, overlap), tiny.flatten(alone)
    settings = OptimizerConfig(optimizer="sgd", clip_grad=0.05)  # momentum, decay and clipping all on
    optimizers = FlatOptimizer(ours.units, settings), FlatOptimizer(reference.units, settings)
    for step in range(2):
        whole = [batch for of_rank in range(world_size) for batch in share(of_rank, step)]
        scale = 1 / float(sum(batch["loss_mask"].sum() for batch in whole))
        want = tiny.reference_step(alone, whole, scale)
        got = tiny.run_step(sharded, ours, share(rank, step), scale)
        dist.all_reduce(got["loss"])  # type: ignore[arg-type]
        assert_law(got, want, FP64)
        tiny.run_step(alone, reference, whole, scale)
        for optimizer in optimizers:
            norm = float(optimizer.grad_norm())
            assert norm > 0.05  # it is clipped
            optimizer.step(0.05, 0.1, norm)
        assert_law(dict(sharded.named_parameters()), dict(alone.named_parameters()), FP64)
    _same_bits_everywhere(ours)


def _same_bits_everywhere(gradients: FlatGradients) -> None:
    for unit in gradients.units:
        for buffer in (unit.params, unit.grads):
            parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, buffer)
            assert all(torch.equal(p, buffer) for p in parts)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_steps_are_those_of_one_process(tmp_path: Path, overlap: bool) -> None:
    run_ranks(_steps, 3, tmp_path, overlap)


def _frozen(frozen: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = tiny.make_model(tiny.BASE)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    gradients = tiny.flatten(model, ParallelGroups.create(torch.device("cpu")).dp_cp_sp)
    for step in range(2):
        whole = [tiny.make_batch(seed=10 * step + r) for r in range(world_size)]
        got = tiny.run_step(model, gradients, [whole[rank]])
        dist.all_reduce(got["loss"])  # type: ignore[arg-type]
        assert_law(got, tiny.reference_step(model, whole), FP64)


@pytest.mark.parametrize("frozen", ["decoder.layers.1.", "bias"])
def test_frozen_parameters_and_units(tmp_path: Path, frozen: str) -> None:
    run_ranks(_frozen, 2, tmp_path, frozen)


def _collectives_are_in_flight_together() -> None:
    """With overlap a unit's sum starts in backward, before the next unit's gradients exist."""
    model = tiny.make_model(tiny.BASE)
    gradients = tiny.flatten(model, ParallelGroups.create(torch.device("cpu")).dp_cp_sp)
    gradients.start_step()
    loss = tiny.loss_of(model, tiny.make_batch(seed=dist.get_rank()), gradients.unit_done)
    gradients.last_micro_batch()
    loss.backward()
    assert list(gradients._handles) == [4, 3, 2, 1]
    gradients.finish_step()
    assert not gradients._handles


def test_sums_start_under_backward(tmp_path: Path) -> None:
    run_ranks(_collectives_are_in_flight_together, 2, tmp_path)
