"""ZeRO for a scheduled model: the project's flat units, gradients and optimizer behind a foreign model.

    s.zero(stage=1, optimizer=OptimizerConfig(lr=1e-3))
    model = s.apply()
    zero = s.applied.zero
    for batch in batches:
        zero.backward(model(**batch).loss)
        zero.step()

Gradients are summed over dp and sp, and over tp where a parameter is used on a share of positions or heads, before they
are sharded: a loss is divided by the number of tokens of all ranks. The norm counts every element of the whole model
once, whichever rank has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.optim.residency import pools_of
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.schedule.apply.units import UnitHooks, find_blocks, order_of, units_of
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.utils.errors import ConfigError

_STAGES = (0, 1, 2, 3)


class ZeroTraining:
    """Optimizer of a scheduled model, which also holds its parameters and gradients.

    Args:
        model: already split; its parameters become views of flat buffers.
        mesh: units are sharded over dp and sp.
        specs: of its parameters.
        args: of the directive: stage, optimizer (OptimizerConfig, or its fields), micro_batches of a step, blocks
            (glob).
        where: file and line that asked for it.

    Attributes:
        comes_and_goes: whether parameters are present only while they are used.

    Raises:
        ConfigError: an unknown stage or optimizer.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, specs: Mapping[str, ShardSpec], args: Mapping[str, Any], where: str
    ) -> None:
        stage, self.config = read(args, where)
        self.micro_batches = int(args.get("micro_batches", 1))
        blocks = find_blocks(model, args.get("blocks"))
        names = {id(p): name for name, p in model.named_parameters()}
        self.mesh, sharding, parts = mesh, Zero(stage, mesh.dp_sp), units_of(model, blocks)
        self.units = [
            FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()], specs, sharding.of(u.alike))
            for u in parts
        ]
        pools = pools_of([u.alike for u in parts], 2, tied=True)
        self.weights = WholeWeights(self.units, pools=pools, order=order_of(len(blocks), backward=True))
        self.gradients = FlatGradients(self.units, mesh.dp_sp, tp=mesh.tp)
        self.optimizer = FlatOptimizer(self.units, self.config, tp=mesh.tp, everybody=mesh.world)
        self._hooks = UnitHooks(model, blocks, len(parts))
        self.comes_and_goes = stage == 3 and mesh.dp_sp.size() > 1
        self._hooks.sharded = self.units if self.comes_and_goes else []
        self._hooks.events = UnitWork(self.weights, self.gradients)
        self._seen = 0
        self._start()

    def _start(self) -> None:
        self._seen, self._finished = 0, False
        self._hooks.forget()
        self.gradients.start_step()
        self.weights.start_step(self.micro_batches)

    def backward(self, loss: Tensor) -> None:
        """Run backward for one micro-batch; in the step's last one, gradients are reduced as soon as they are complete."""
        if self._seen == self.micro_batches:
            raise RuntimeError(
                f"a step has {self.micro_batches} micro-batches: call step(), or schedule .zero(micro_batches=...)"
            )
        self._seen += 1
        if self._seen == self.micro_batches:
            self.gradients.last_micro_batch()
        loss.backward()  # type: ignore[no-untyped-call]
        self.gradients.finish_micro_batch()

    def finish(self) -> None:
        """Wait for all gradients; ``step`` calls it too."""
        if not self._finished:
            if self._seen == 0:  # the caller ran the backward pass itself
                self.gradients.finish_micro_batch()
            self.gradients.finish_step()
            self._finished = True

    def grad_norm(self) -> float:
        """Return the L2 norm of the whole model's gradients, the same on every rank. Collective."""
        self.finish()
        return float(self.optimizer.grad_norm())

    def step(self, lr: float | None = None, weight_decay: float | None = None) -> float:
        """Clip the gradients and update the parameters; returns the gradient norm."""
        lr = self.config.lr if lr is None else lr
        if lr is None:
            raise ConfigError(
                "no learning rate: give step(lr=...), or schedule .zero(optimizer=OptimizerConfig(lr=...))"
            )
        norm = self.grad_norm()
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.optimizer.step(lr, decay, norm, updated=self.weights.refresh)
        self.weights.forget()
        self._start()
        return norm

    def gradients_of_all(self) -> dict[str, Tensor]:
        """Return this tp rank's part of every parameter's gradient, summed over all ranks, until the next step begins. Collective."""
        self.finish()
        return self._gathered({unit.name: unit.grad_shard for unit in self.units})

    def parameters(self) -> dict[str, Tensor]:
        """Return this tp rank's part of every trainable parameter. Collective over dp and sp."""
        self.weights.settle()
        return self._gathered({unit.name: unit.local_params for unit in self.units})

    def _gathered(self, flats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit in self.units:
            whole = unit.gathered(flats[unit.name])
            found |= {slot.name: slot.view(whole) for slot in unit.slots}
        return found


def read(args: Mapping[str, Any], where: str) -> tuple[int, OptimizerConfig]:
    """Return (stage, optimizer) of a line. Raises ConfigError if they are invalid."""
    stage = args.get("stage")
    if stage not in _STAGES:
        raise ConfigError(f"zero: the stage must be 0, 1, 2 or 3, not {stage!r} ({where})")
    count = args.get("micro_batches", 1)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"zero: micro_batches must be a positive number, not {count!r} ({where})")
    return stage, _config(args.get("optimizer"), where)


def require(model: nn.Module, args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a line is invalid, or parameters have different dtypes, which one buffer cannot hold."""
    stage, _ = read(args, where)
    held = [(name, p) for name, p in model.named_parameters() if p.requires_grad or stage == 3]
    first = next(iter(held), None)
    other = next(((name, p) for name, p in held if first is not None and p.dtype != first[1].dtype), None)
    if first is not None and other is not None:
        raise ConfigError(
            f"zero: {first[0]} is {_word(first[1])} and {other[0]} is {_word(other[1])}, and all parameters of a unit lie in one buffer:"
            f" give the model one dtype, model.to(torch.{_word(first[1])}) ({where})"
        )


def _word(p: nn.Parameter) -> str:
    return str(p.dtype).removeprefix("torch.")


def _config(given: Any, where: str) -> OptimizerConfig:
    if given is None or isinstance(given, OptimizerConfig):
        return given or OptimizerConfig()
    if isinstance(given, Mapping):
        known = set(vars(OptimizerConfig()))
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigError(
                f"zero: the optimizer has no {', '.join(unknown)}: it has {', '.join(sorted(known))} ({where})"
            )
        for field in fields(OptimizerConfig):
            if field.name in given and "float" in str(field.type):
                _require_number(field.name, given[field.name], field.metadata["low"] or 0, where)
        return OptimizerConfig(**given)
    raise ConfigError(
        f"zero: optimizer must be an OptimizerConfig or a dict of its fields, not a {type(given).__name__}: the units are updated by the"
        f" project's own AdamW and SGD ({where})"
    )


def _require_number(name: str, value: Any, low: float, where: str) -> None:
    # raise ConfigError unless a value is a finite number of at least ``low``, or None (not given)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and isfinite(value) and value >= low):
        raise ConfigError(f"zero: {name} of the optimizer must be a number from {low} on, not {value!r} ({where})")
