"""Checks for NaN and infinity beyond a step's own: skipped steps, weights after an update, validation, a run's end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.optim.flat import squared_norm
from megatron_sp.utils.errors import NumericsError
from megatron_sp.utils.files import atomic_write_text

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_sp.training.parts import Run
    from megatron_sp.training.step import StepResult

WAY_OUT = "Lower --lr, give it a warm-up, or resume an earlier checkpoint with --ckpt-step"


def count_bad_step(run: Run, result: StepResult) -> None:
    """Count a step that was not finite, and dump it. Collective. Raises NumericsError for too many in a row."""
    # an ordinary fp16 overflow is none
    context, progress = run.context, run.state.progress
    limit = context.config.precision.max_bad_steps
    if result.updated:
        progress.bad_steps = 0
        return
    progress.skipped_steps += 1
    if result.overflow:
        return
    progress.bad_steps += 1
    dump = dump_bad_step(run, result)
    context.console.line(
        f"warning: step {progress.step} is not finite (loss {result.losses[0]}, grad norm {result.grad_norm}): skipped,"
        f" the weights are unchanged; {progress.bad_steps} in a row; samples and norms in {dump}"
    )
    if progress.bad_steps > limit:
        raise NumericsError(
            f"{progress.bad_steps} non-finite steps in a row (--max-bad-steps {limit}): stopped at step"
            f" {progress.step}. The weights are those of the last finite step. The sample ids and the norm of every"
            f" layer's gradient are in {dump}. Lower --lr, look at these samples, or resume an earlier checkpoint with"
            " --ckpt-step."
        )


def dump_bad_step(run: Run, result: StepResult) -> Path:
    groups, optimizer, step = run.context.groups, run.parts.optimizer, run.state.progress.step
    path = run.context.run_dir / f"nonfinite-step-{step:06d}.json"
    squares: dict[str, Tensor] = {}
    for unit in optimizer.counted_units:
        for slot, part in unit.counted(unit.grad_shard):
            square = squared_norm(part)
            squares[slot.name] = squares[slot.name] + square if slot.name in squares else square
    own_names = [slot.name for unit in optimizer.units for slot in unit.slots]
    # a rank of a pipeline has some of the parameters
    names = list(dict.fromkeys(name for of_rank in gather_json(own_names, groups.control) for name in of_rank))
    nothing = torch.zeros((), dtype=torch.float64, device=optimizer.units[0].device)
    summed = all_reduce(torch.stack([squares.get(name, nothing) for name in names]), optimizer.holders)
    if groups.rank != 0:
        return path
    norms = {name: str(math.sqrt(square)) for name, square in zip(names, summed.tolist(), strict=True)}
    record = {
        "step": step, "loss": [str(v) for v in result.losses], "grad_norm": str(result.grad_norm),
        "sample_ids": result.sample_ids, "layer_grad_norms": norms,
    }  # fmt: skip
    try:
        atomic_write_text(path, json.dumps(record, indent=1))
    except OSError as error:
        print(f"warning: {path} cannot be written: {error}", file=sys.stderr)
    return path


def require_finite_weights(weights: Iterable[Tensor], groups: ParallelGroups, step: int) -> None:
    """Raise NumericsError on every rank if any rank's weights are not finite. Collective."""
    # an update can overflow even if its gradients are finite
    finite = []
    for part in weights:
        if part.numel():  # the extremes are NaN if any element is
            low, high = torch.aminmax(part.detach())
            finite.append(torch.isfinite(low) & torch.isfinite(high))
    bad = bool(finite) and not bool(torch.stack(finite).all())  # one sync with the device, however many units there are
    if bool(all_reduce(torch.tensor([float(bad)]), groups.control, "max") > 0):
        raise NumericsError(
            f"the weights are not finite after step {step}: an update overflowed. Nothing is saved of them; older"
            f" checkpoints are as they were. {WAY_OUT}."
        )
