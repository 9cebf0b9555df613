"""AdamW and SGD on flat buffers, gradient clipping and unscaling, and the loss scale of fp16.

The update is a fused kernel, torch's or NVIDIA apex's (``ops/adamw.py``), called as a function on two slices of each
unit (with and without weight decay), so that the state tensors are ours to save and to shard. Gradients are scaled once,
by clip coefficient / loss scale.

``step_on_device`` takes the norm as a tensor: torch's kernels clip, unscale, and leave out a step whose gradients are not
finite, before the host knows. Where the update is the host's own, or apex's, the host decides (``step``).
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
    """Optimizer state of one unit, in tensors of the shape of its master weights; ``exp_avg_sq`` is None for SGD."""

    exp_avg: Tensor
    exp_avg_sq: Tensor | None


class FlatOptimizer:
    """Optimizer of the master weights of flat units.

    Args:
        units: the flat units; from ZeRO stage 1 on only this rank's range of each is updated.
        config: hyperparameters; learning rate and weight decay are arguments of each step.
        tp: ranks that hold other parts of the same parameters.
        everybody: all ranks over which units are split, by tp or into ranges.
        whole: ranks that have the whole model once, if units are not split into ranges: over tp and the stages of a pipeline;
            None: those of tp.
        host: copies gradients to the host, where the master weights are, and parameters back; None: everything is on
            the model's device.
        kernel: whose kernel updates with AdamW; the state is the same.
        counted_elsewhere: units, by index, that another rank of ``whole`` has, too, and counts in the norm.
        decoupled: names of the parameters that have the decoupled learning rate, if a step has one.

    Attributes:
        counted_units: units whose parts of this rank go into sums over ``holders``.
    """

    def __init__(
        self,
        units: list[FlatUnit],
        config: OptimizerConfig,
        tp: Group = SINGLE_RANK,
        everybody: Group = SINGLE_RANK,
        host: HostCopies | None = None,
        kernel: Literal["torch", "apex"] = "torch",
        whole: Group | None = None,
        counted_elsewhere: Collection[int] = (),
        decoupled: Collection[str] = (),
    ) -> None:
        self.units, self.config, self.tp, self.host, self.kernel = units, config, tp, host, kernel
        is_sharded = bool(units) and units[0].zero.stage > 0
        self.holders = everybody if is_sharded else whole or tp
        self.counted_units = [unit for i, unit in enumerate(units) if is_sharded or i not in counted_elsewhere]
        self._runs = [_runs(unit, decoupled if config.decoupled_lr is not None else ()) for unit in units]
        # one at a time where the host updates, so that its copies go on meanwhile
        self._batches = _batches(units, 0 if host is not None else _BATCH_BYTES)
        self.num_updates = 0  # successful steps: Adam's bias correction
        self.states = [
            UnitState(torch.zeros_like(u.master), torch.zeros_like(u.master) if config.optimizer == "adam" else None) for u in units
        ]

    def grad_norm(self) -> Tensor:
        """Compute the L2 norm of all (reduced, still scaled) gradients: an fp64 scalar tensor, bitwise equal on all ranks. Collective."""
        units = self.counted_units
        if self.tp.size() == 1:
            parts = [u.grad_shard for u in units if u.slots]
        else:
            parts = [part for u in units for _, part in u.counted(u.grad_shard)]
        mine = squared_norm(*parts) if parts else torch.zeros((), dtype=torch.float64, device=self.units[0].device)
        return all_reduce(mine, self.holders).sqrt()

    def step(
        self, lr: float, weight_decay: float, grad_norm: float, grad_scale: float = 1.0, updated: Callable[[int], None] | None = None,
        decoupled_lr: float | None = None,
    ) -> None:  # fmt: skip
        """Clip and unscale the gradients, and update the parameters.

        Args:
            lr: learning rate of this step.
            weight_decay: weight decay of this step.
            grad_norm: norm of the unscaled gradients; finite.
            grad_scale: factor by which the loss was multiplied.
            updated: called with the index of each unit when this rank's range of its parameters has been updated.
            decoupled_lr: learning rate of the decoupled parameters (default: ``lr``).
        """
        divisor = self._divisor(torch.tensor(grad_norm, dtype=torch.float64), grad_scale)
        self._step((lr, lr if decoupled_lr is None else decoupled_lr), weight_decay, divisor, None, updated)

    @property
    def updates_on_device(self) -> bool:
        """True if ``step_on_device`` can be used: torch's kernels update, where the gradients are."""
        return self.host is None and self.kernel == "torch" and bool(self.units)

    def step_on_device(
        self, lr: float, weight_decay: float, grad_norm: Tensor, grad_scale: float, skip: Tensor,
        updated: Callable[[int], None] | None = None, decoupled_lr: float | None = None,
    ) -> None:  # fmt: skip
        """Queue ``step`` before the host knows its outcome; ``take_back`` must follow if it was left out.

        Args:
            lr, weight_decay, grad_scale, updated, decoupled_lr: as of ``step``; ``updated`` is called in any case.
            grad_norm: norm of the unscaled gradients, an fp64 scalar on the device.
            skip: bool scalar on the device, true if the step is to be left out.
        """
        rates = (lr, lr if decoupled_lr is None else decoupled_lr)
        divisor = self._divisor_unless(skip, grad_norm, grad_scale)
        self._step(rates, weight_decay, divisor, skip.float(), updated)

    def step_by_numbers(
        self, rates: Tensor, count: Tensor, weight_decay: float, grad_norm: Tensor, grad_scale: float | Tensor, skip: Tensor,
        updated: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Queue what ``step_on_device`` queues, with numbers that may change under a captured graph; ``num_updates`` is the caller's.

        Args:
            rates: learning rates of most parameters and of the decoupled ones, [2], fp64 on the device.
            count: number of the update, from 1, a scalar on the device.
            weight_decay, grad_norm, skip, updated: as of ``step_on_device``.
            grad_scale: a number if it never changes, else an fp64 scalar on the device.
        """
        dtype = torch.float64 if rates.device.type == "cpu" else torch.float32  # as torch's kernels read them
        divisor = self._divisor_unless(skip, grad_norm, grad_scale)
        shared = UpdateScalars(rates[0].to(dtype), count.float(), None, skip.float())
        self._update_all((shared, replace(shared, lr=rates[1].to(dtype))), (math.nan, math.nan), weight_decay, divisor, updated)

    def _divisor_unless(self, skip: Tensor, grad_norm: Tensor, grad_scale: float | Tensor) -> Tensor | None:
        """Return ``_divisor``, or 1 for an update that is left out; None where nothing is ever divided.

        The kernels write gradients that they divide back: who looks for what is not finite finds it as it came.
        """
        if self.config.clip_grad <= 0 and not isinstance(grad_scale, Tensor) and grad_scale == 1.0:
            return None
        return self._divisor(grad_norm, grad_scale).masked_fill(skip, 1.0)

    def _divisor(self, grad_norm: Tensor, grad_scale: float | Tensor) -> Tensor:
        """Return what the gradients are to be divided by, an fp64 scalar, from the norm without the scale."""
        clip = self.config.clip_grad
        if clip <= 0:
            return grad_scale if isinstance(grad_scale, Tensor) else torch.full_like(grad_norm, grad_scale)
        divisor = ((grad_norm + 1e-6) / clip).clamp(min=1.0)
        return divisor if not isinstance(grad_scale, Tensor) and grad_scale == 1.0 else divisor * grad_scale

    def _step(
        self, rates: tuple[float, float], weight_decay: float, divisor: Tensor | None, skip: Tensor | None,
        updated: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Update all units; ``rates``: learning rate of most parameters, and of the decoupled ones."""
        self.num_updates += 1
        if not self.units:
            return
        device = self.units[0].master.device
        if divisor is not None and not divisor.is_cuda and float(divisor) == 1.0:  # a GPU would have to be waited for
            divisor = None
        most, *others = (UpdateScalars.create(rate, self.num_updates, device, skip=skip) for rate in dict.fromkeys(rates))
        self._update_all((most, *(others or [most])), rates, weight_decay, divisor, updated)

    def _update_all(
        self, scalars: Sequence[UpdateScalars], rates: tuple[float, float], weight_decay: float, divisor: Tensor | None,
        updated: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Update all units, by kernels that read ``scalars`` or by one that takes ``rates``."""
        master = self.units[0].master
        # torch's kernels have the divisor in fp32, too little for fp64
        by_kernel = self.kernel == "torch" and master.dtype == torch.float32
        if by_kernel and divisor is not None:
            in_kernel = divisor.to(master.device, torch.float32)
            scalars = [replace(each, divisor=in_kernel) for each in scalars]
        for batch in self._batches:
            grads = [self._grads(index) for index in batch]
            if not by_kernel and divisor is not None:
                for each in grads:
                    each.div_(divisor)
            self._update(batch, grads, scalars, rates, weight_decay, updated)

    def take_back(self) -> None:
        """Take note that the update queued last was left out."""
        self.num_updates -= 1

    def _update(
        self, batch: Sequence[int], grads: Sequence[Tensor], scalars: Sequence[UpdateScalars], rates: tuple[float, float],
        weight_decay: float, updated: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Update units' ranges of the master weights, those that are updated alike in one call, and the parameters after them."""
        alike: dict[tuple[bool, bool, torch.dtype], _Operands] = {}
        for index, shard in zip(batch, grads, strict=True):
            unit, state = self.units[index], self.states[index]
            for run in self._runs[index]:
                part = within(run.elements, unit.shard)
                if part:
                    kind = run.is_decoupled, run.is_decayed, unit.master.dtype
                    alike.setdefault(kind, _Operands([], [], [], [])).add(unit, shard, state, slice(part.start, part.stop))
        for (is_decoupled, is_decayed, _), operands in alike.items():
            own = int(is_decoupled)
            self._update_alike(operands, scalars[own], rates[own], weight_decay if is_decayed else 0.0)
        if self.host is None:
            refresh_params([self.units[index] for index in batch])
        for index in batch:
            if self.host is not None:
                self.host.send(index)
            if updated is not None:
                updated(index)

    def _grads(self, index: int) -> Tensor:
        """Return this rank's range of a unit's gradients, on the device of the master weights."""
        return self.units[index].grad_shard if self.host is None else self.host.grads(index)

    def _update_alike(self, operands: _Operands, scalars: UpdateScalars, lr: float, weight_decay: float) -> None:
        config = self.config
        if config.optimizer == "adam":
            numbers = AdamStep(
                count=self.num_updates, lr=lr, beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps,
                weight_decay=weight_decay,
            )  # fmt: skip
            adamw_(*operands, numbers, self.kernel, scalars if self.kernel == "torch" else None)
            return
        with torch.no_grad():
            torch.ops.aten._fused_sgd_.tensor_lr(
                operands.params, operands.grads, operands.exp_avg if config.sgd_momentum else [], weight_decay=weight_decay,
                momentum=config.sgd_momentum, lr=scalars.lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
                grad_scale=scalars.divisor, found_inf=scalars.skip,
            )  # fmt: skip


class _Operands(NamedTuple):
    """Parts of units that are updated in one call."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]

    def add(self, unit: FlatUnit, grads: Tensor, state: UnitState, part: slice) -> None:
        """Add a part of a unit."""
        self.params.append(unit.master[part])
        self.grads.append(grads[part])
        self.exp_avg.append(state.exp_avg[part])
        if state.exp_avg_sq is not None:
            self.exp_avg_sq.append(state.exp_avg_sq[part])


class _Run(NamedTuple):
    """Elements of a unit's full buffers that are updated alike."""

    elements: range
    is_decayed: bool
    is_decoupled: bool


def _batches(units: Sequence[FlatUnit], least: int) -> list[list[int]]:
    """Return the units, by index and in order, in batches of at least so many bytes of master weights, but for the last one.

    A launch for each unit costs the host more than a small model's update; one for all would have the gather of the first unit
    wait for the update of the last.
    """
    batches, size = list[list[int]](), least
    for index, unit in enumerate(units):
        if size >= least:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += unit.master.nbytes
    return batches


def _runs(unit: FlatUnit, decoupled: Collection[str]) -> list[_Run]:
    """Return a unit's elements in order, in runs as long as possible; padding goes with the parameter before it."""
    stop, found = unit.num_decayed, list[_Run]()
    for slot in reversed([slot for slot in unit.slots if slot.decayed]):
        own = slot.name in decoupled
        if found and found[-1].is_decoupled == own:
            stop = found.pop().elements.stop
        found.append(_Run(range(slot.start, stop), True, own))
        stop = slot.start
    return [*reversed(found), _Run(range(unit.num_decayed, unit.numel), False, False)]


class LossScaler:
    """Loss scale of fp16 training: fixed, or halved after ``hysteresis`` overflows and doubled after ``window`` good steps in a row.

    Outside fp16 the scale is 1 and never changes. Source: Micikevicius et al., arXiv:1710.03740.
    """

    def __init__(self, *, enabled: bool, fixed: float | None, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.dynamic = enabled and fixed is None
        self.scale = 1.0 if not enabled else fixed if fixed is not None else initial
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.good_steps, self.hysteresis_left = 0, hysteresis

    def update(self, overflow: bool) -> bool:
        """Record a step; return False for an overflow at the minimum scale, or if the scale is not dynamic, else True."""
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
        """State for a checkpoint."""
        return {"dynamic": self.dynamic, "scale": self.scale, "good_steps": self.good_steps, "hysteresis_left": self.hysteresis_left}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a stored dynamic scale; that of a run without one, such as the 1 of a bf16 run, is ignored."""
        if self.dynamic and state.get("dynamic", True):
            self.scale = float(state["scale"])
            self.good_steps, self.hysteresis_left = int(state["good_steps"]), int(state["hysteresis_left"])


def is_finite(*values: float) -> bool:
    """Return whether all values are finite."""
    return all(math.isfinite(v) for v in values)
