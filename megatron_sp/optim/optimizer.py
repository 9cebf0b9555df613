"""AdamW and SGD on flat buffers, gradient clipping and unscaling, and the loss scale of fp16.

The update is a fused kernel called as a function, so that the state is ours to save and to shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.ops.adamw import AdamStep, UpdateScalars, adamw_
from megatron_sp.optim.flat import FlatUnit, refresh_params, squared_norm, within

if TYPE_CHECKING:
    from megatron_sp.optim.offload import HostCopies

_BATCH_BYTES = 1 << 28


@dataclass
class UnitState:
    exp_avg: Tensor
    exp_avg_sq: Tensor | None


class FlatOptimizer:
    """Optimizer of the master weights of flat units, from ZeRO stage 1 on of this rank's range of each.

    Args:
        everybody: ranks over which units are split, by tp or into ranges.
        whole: ranks that have the whole model once, over tp and pipeline (default: ``tp``).
        counted_elsewhere: units, by index, that another rank of ``whole`` has, too, and counts in the norm.
    """

    def __init__(
        self, units: list[FlatUnit], config: OptimizerConfig, tp: Group = SINGLE_RANK, everybody: Group = SINGLE_RANK,
        host: HostCopies | None = None, kernel: Literal["torch", "apex"] = "torch", whole: Group | None = None,
        counted_elsewhere: Collection[int] = (), decoupled: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.units, self.config, self.tp, self.host, self.kernel = units, config, tp, host, kernel
        is_sharded = bool(units) and units[0].zero.stage > 0
        self.holders = everybody if is_sharded else whole or tp
        self.counted_units = [unit for i, unit in enumerate(units) if is_sharded or i not in counted_elsewhere]
        self._runs = [_runs(unit, decoupled if config.decoupled_lr is not None else ()) for unit in units]
        # one at a time where the host updates, so that its copies go on meanwhile
        self._batches = _batches(units, 0 if host is not None else _BATCH_BYTES)
        self.num_updates = 0  # successful steps: Adam's bias correction
        self.states = [
            UnitState(torch.zeros_like(u.master), torch.zeros_like(u.master) if config.optimizer == "adam" else None)
            for u in units
        ]

    def grad_norm(self) -> Tensor:
        """Return the norm of all reduced, still scaled gradients: fp64, bitwise equal on all ranks. Collective."""
        units = self.counted_units
        if self.tp.size() == 1:
            parts = [u.grad_shard for u in units if u.slots]
        else:
            parts = [part for u in units for _, part in u.counted(u.grad_shard)]
        squares = squared_norm(*parts) if parts else torch.zeros((), dtype=torch.float64, device=self.units[0].device)
        return all_reduce(squares, self.holders).sqrt()

    def step(
        self, lr: float, weight_decay: float, grad_norm: float, grad_scale: float = 1.0,
        updated: Callable[[int], None] | None = None, decoupled_lr: float | None = None,
    ) -> None:  # fmt: skip
        """Clip and unscale gradients of a finite ``grad_norm``, unscaled, and update; ``updated`` is told each unit."""
        divisor = self._divisor(torch.tensor(grad_norm, dtype=torch.float64), grad_scale)
        self._step((lr, lr if decoupled_lr is None else decoupled_lr), weight_decay, divisor, None, updated)

    @property
    def updates_on_device(self) -> bool:
        # torch's kernels update, where the gradients are
        return self.host is None and self.kernel == "torch" and bool(self.units)

    def step_on_device(
        self, lr: float, weight_decay: float, grad_norm: Tensor, grad_scale: float, skip: Tensor,
        updated: Callable[[int], None] | None = None, decoupled_lr: float | None = None,
    ) -> None:  # fmt: skip
        """Queue ``step`` before the host knows its outcome; ``take_back`` must follow if ``skip`` is true by then."""
        rates = (lr, lr if decoupled_lr is None else decoupled_lr)
        divisor = self._divisor_unless(skip, grad_norm, grad_scale)
        self._step(rates, weight_decay, divisor, skip.float(), updated)

    def step_by_numbers(
        self, rates: Tensor, count: Tensor, weight_decay: float, grad_norm: Tensor, grad_scale: float | Tensor,
        skip: Tensor, updated: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Queue ``step_on_device``, uncounted, with numbers on the device that may change under a captured graph."""
        # rates: of most parameters and of the decoupled ones, fp64; grad_scale: fp64, or a number if it is fixed
        dtype = torch.float64 if rates.device.type == "cpu" else torch.float32  # as torch's kernels read them
        divisor = self._divisor_unless(skip, grad_norm, grad_scale)
        shared = UpdateScalars(rates[0].to(dtype), count.float(), None, skip.float())
        scalars, not_on_host = (shared, replace(shared, lr=rates[1].to(dtype))), (math.nan, math.nan)
        self._update_all(scalars, not_on_host, weight_decay, divisor, updated)

    def _divisor_unless(self, skip: Tensor, grad_norm: Tensor, grad_scale: float | Tensor) -> Tensor | None:
        # the kernels write gradients that they divide back: divided by 1 in a step that is left out, so that who looks
        # for what is not finite finds it as it came
        if self.config.clip_grad <= 0 and not isinstance(grad_scale, Tensor) and grad_scale == 1.0:
            return None
        return self._divisor(grad_norm, grad_scale).masked_fill(skip, 1.0)

    def _divisor(self, grad_norm: Tensor, grad_scale: float | Tensor) -> Tensor:
        # clip coefficient / loss scale, inverted, an fp64 scalar
        clip = self.config.clip_grad
        if clip <= 0:
            return grad_scale if isinstance(grad_scale, Tensor) else torch.full_like(grad_norm, grad_scale)
        divisor = ((grad_norm + 1e-6) / clip).clamp(min=1.0)
        return divisor if not isinstance(grad_scale, Tensor) and grad_scale == 1.0 else divisor * grad_scale

    def _step(
        self, rates: tuple[float, float], weight_decay: float, divisor: Tensor | None, skip: Tensor | None,
        updated: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self.num_updates += 1
        if not self.units:
            return
        device = self.units[0].master.device
        if divisor is not None and not divisor.is_cuda and float(divisor) == 1.0:  # a GPU would have to be waited for
            divisor = None
        # of rates that are the same one copy goes to the device
        scalars = [UpdateScalars.create(rate, self.num_updates, device, skip=skip) for rate in dict.fromkeys(rates)]
        self._update_all((scalars[0], scalars[-1]), rates, weight_decay, divisor, updated)

    def _update_all(
        self, scalars: Sequence[UpdateScalars], rates: tuple[float, float], weight_decay: float, divisor: Tensor | None,
        updated: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        # by kernels that read ``scalars``, or one that takes ``rates``: of most parameters, and of the decoupled ones
        master = self.units[0].master
        # torch's kernels have the divisor in fp32, too little for fp64
        by_kernel = self.kernel == "torch" and master.dtype == torch.float32
        if by_kernel and divisor is not None:
            in_kernel = divisor.to(master.device, torch.float32)
            scalars = [replace(numbers, divisor=in_kernel) for numbers in scalars]
        for batch in self._batches:
            grads = [self.units[i].grad_shard if self.host is None else self.host.grads(i) for i in batch]
            if not by_kernel and divisor is not None:
                for shard in grads:
                    shard.div_(divisor)
            self._update(batch, grads, scalars, rates, weight_decay)
            if self.host is None:
                refresh_params([self.units[index] for index in batch])
            for index in batch:
                if self.host is not None:
                    self.host.send(index)
                if updated is not None:
                    updated(index)

    def take_back(self) -> None:
        self.num_updates -= 1

    def _update(
        self, batch: Sequence[int], grads: Sequence[Tensor], scalars: Sequence[UpdateScalars],
        rates: tuple[float, float], weight_decay: float,
    ) -> None:  # fmt: skip
        c = self.config
        # what is updated alike goes into one call: (params, grads, exp_avg, exp_avg_sq), parts of units
        alike: dict[tuple[bool, bool, torch.dtype], tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]] = {}
        for index, shard in zip(batch, grads, strict=True):
            unit, state = self.units[index], self.states[index]
            for run in self._runs[index]:
                if not (elements := within(run.elements, unit.shard)):
                    continue
                part = slice(elements.start, elements.stop)
                kind = run.is_decoupled, run.is_decayed, unit.master.dtype
                operands = alike.setdefault(kind, ([], [], [], []))
                for into, tensor in zip(operands, (unit.master, shard, state.exp_avg, state.exp_avg_sq), strict=True):
                    if tensor is not None:
                        into.append(tensor[part])
        for (is_decoupled, is_decayed, _), (params, shards, exp_avg, exp_avg_sq) in alike.items():
            numbers, decay = scalars[is_decoupled], weight_decay if is_decayed else 0.0
            if c.optimizer == "adam":
                rate, on_device = rates[is_decoupled], numbers if self.kernel == "torch" else None
                step = AdamStep(self.num_updates, rate, c.adam_beta1, c.adam_beta2, c.adam_eps, decay)
                adamw_(params, shards, exp_avg, exp_avg_sq, step, self.kernel, on_device)
                continue
            with torch.no_grad():
                torch.ops.aten._fused_sgd_.tensor_lr(
                    params, shards, exp_avg if c.sgd_momentum else [], weight_decay=decay, momentum=c.sgd_momentum,
                    lr=numbers.lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
                    grad_scale=numbers.divisor, found_inf=numbers.skip,
                )  # fmt: skip


class _Run(NamedTuple):
    elements: range  # of a unit's full buffers, which are updated alike
    is_decayed: bool
    is_decoupled: bool


def _batches(units: Sequence[FlatUnit], least: int) -> list[list[int]]:
    # in order, of at least so many bytes of master weights: a launch for each unit costs the host more than a small
    # model's update; one for all would have the gather of the first unit wait for the update of the last
    batches, size = list[list[int]](), least
    for index, unit in enumerate(units):
        if size >= least:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += unit.master.nbytes
    return batches


def _runs(unit: FlatUnit, decoupled: Collection[str]) -> list[_Run]:
    # runs as long as possible, in order; padding goes with the parameter before it
    stop, runs = unit.num_decayed, list[_Run]()
    for slot in reversed([slot for slot in unit.slots if slot.decayed]):
        own = slot.name in decoupled
        if runs and runs[-1].is_decoupled == own:
            stop = runs.pop().elements.stop
        runs.append(_Run(range(slot.start, stop), True, own))
        stop = slot.start
    return [*reversed(runs), _Run(range(unit.num_decayed, unit.numel), False, False)]


class LossScaler:
    """Loss scale of fp16 (arXiv:1710.03740), outside fp16 it is 1.

    Fixed, or halved after ``hysteresis`` overflows and doubled after ``window`` good steps in a row.
    """

    def __init__(
        self, *, enabled: bool, fixed: float | None, initial: float, minimum: float, window: int, hysteresis: int
    ) -> None:
        self.dynamic = enabled and fixed is None
        self.scale = 1.0 if not enabled else fixed if fixed is not None else initial
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.good_steps, self.hysteresis_left = 0, hysteresis

    def update(self, overflow: bool) -> bool:
        # record a step; False for an overflow at the minimum scale, or if the scale is fixed
        if not self.dynamic:
            return False
        if not overflow:
            self.good_steps += 1
            if self.good_steps % self.window == 0:
                self.scale *= 2.0
                self.hysteresis_left = self.hysteresis
            return True
        ordinary = self.scale > self.minimum
        self.good_steps = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            self.scale = max(self.scale / 2.0, self.minimum)
        return ordinary

    def state(self) -> dict[str, float]:
        names = ("dynamic", "scale", "good_steps", "hysteresis_left")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, float]) -> None:
        # of a run without a dynamic scale, such as the 1 of a bf16 run, nothing is taken
        if self.dynamic and state.get("dynamic", True):
            self.scale = float(state["scale"])
            self.good_steps, self.hysteresis_left = int(state["good_steps"]), int(state["hysteresis_left"])


def is_finite(*values: float) -> bool:
    """Return whether all are finite."""
    return all(math.isfinite(v) for v in values)
