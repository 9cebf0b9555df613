"""A few steps of the training program in this process: its losses, and the gradients of the first step.

It is the whole program, from the flags on, as ``pretrain_gpt.py`` and ``pretrain_bert.py`` start it, on one rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_sp.comm.groups import destroy_process_group
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.tasks.bert import bert_task
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.loop import _pretrain
from megatron_sp.training.setup import RunStatus
from megatron_sp.training.step import TrainStep
from megatron_sp.utils.launch import Launch


@dataclass
class Steps:
    """What came of some steps.

    Attributes:
        losses: of each step, its terms.
        grad_norms: of each step.
        grads: of the first step that updates, by parameter, fp64 on the host; the norm is that of the whole.
    """

    losses: list[list[float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)


def take_steps(family: Literal["gpt", "bert"], flags: Sequence[str], device: Literal["cpu", "cuda"]) -> Steps:
    """Train as the flags say and return what came of it.

    Raises:
        ReportedError, RuntimeError: as the program does.
    """
    found = Steps()
    config = parse_config([*flags, "--device", device], prog="first_light", family=family)
    before = os.getcwd()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with tempfile.TemporaryDirectory() as folder, _watched(found), _one_rank():
        os.chdir(folder)  # its run folder
        try:
            launch = Launch.from_env()
            code = _pretrain(config, GPT if family == "gpt" else bert_task(config), launch, RunStatus(launch.rank))
        finally:
            os.chdir(before)
            torch.set_float32_matmul_precision(precision)
            destroy_process_group()
    if code:
        raise RuntimeError(f"the program ended with exit code {code}")
    return found


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Have the program find one rank, wherever this process itself was started."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def _watched(found: Steps) -> Iterator[None]:
    original = TrainStep.run

    def run(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        if not found.grads:
            self.before_update = lambda: found.grads.update(_gradients(self))
        result = original(self, *args, **kwargs)
        self.before_update = lambda: None
        found.losses.append(result.losses)
        found.grad_norms.append(result.grad_norm)
        return result

    TrainStep.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainStep.run = original  # type: ignore[method-assign]


def _gradients(step: TrainStep) -> dict[str, Tensor]:
    """Return each parameter's gradient, without the loss scale."""
    scale, found = step.scaler.scale, {}
    for unit in step.gradients.units:
        whole = unit.gathered(unit.grad_shard)
        found |= {slot.name: slot.view(whole).detach().to("cpu", torch.float64) / scale for slot in unit.slots}
    return found


def law_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest error of any gradient, and the parameter's name: max|a - b| / (max|b| + 1e-3 * rms of all gradients)."""
    total = sum(float(g.square().sum()) for g in want.values())
    rms = math.sqrt(total / max(1, sum(g.numel() for g in want.values())))
    errors = []
    for name, grad in want.items():
        difference = (
            float((got[name] - grad).abs().max()) if name in got and got[name].shape == grad.shape else math.inf
        )
        errors.append(
            (math.inf if math.isnan(difference) else difference / (float(grad.abs().max()) + 1e-3 * rms + 1e-300), name)
        )
    return max(errors, default=(math.inf, "no gradient"))


def cosine(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the cosine between all gradients of two sides; 0 if one has none, or others."""
    if not want or got.keys() != want.keys():
        return 0.0
    a, b = (torch.cat([side[name].reshape(-1) for name in sorted(want)]) for side in (got, want))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0)) if a.shape == b.shape else 0.0
