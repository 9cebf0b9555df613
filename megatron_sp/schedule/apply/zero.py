"""ZeRO for a foreign model: the project's flat units, gradients and optimizer, and hooks that tell when a unit is used.

    s.zero(stage=1, optimizer=OptimizerConfig(lr=1e-3))
    model = s.apply()
    zero = s.applied.zero
    for batch in batches:
        zero.backward(model(**batch).loss)
        zero.step()

Gradients are summed, not averaged. Unit 0 is everything outside of the blocks, units 1, 2, ... are the blocks: a pass
reads unit 0, the blocks in their order, and unit 0 again; its backward goes through the blocks in reverse. Parameters
in another dtype (routers of transformers' mixtures) are the last unit, which is whole between its uses.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.optim.residency import pools_of
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.parallel.forward_context import Unit, UnitEvents
from megatron_sp.schedule.core.directives import Mesh, expand
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.utils.errors import ConfigError

Specs = Mapping[str, ShardSpec]


class ZeroTraining:
    """Optimizer of a scheduled model, whose parameters become views of its flat buffers."""

    def __init__(self, model: nn.Module, mesh: Mesh, specs: Specs, args: Mapping[str, Any], where: str) -> None:
        stage, self.config = read(args, where)
        self.micro_batches = int(args.get("micro_batches", 1))
        blocks = find_blocks(model, args.get("blocks"))
        names = {id(p): name for name, p in model.named_parameters()}
        sharding, parts = Zero(stage, mesh.dp_sp), units_of(model, blocks)
        self.units = []
        for part in parts:
            named = [(names[id(p)], p) for p in part.module.parameters()]
            self.units.append(FlatUnit(part.name, named, specs, sharding.of(part.alike)))
        pools = pools_of([part.alike for part in parts], 2, tied=True)
        self.weights = WholeWeights(self.units, pools=pools, order=order_of(len(blocks), backward=True))
        self.gradients = FlatGradients(self.units, mesh.dp_sp, tp=mesh.tp)
        self.optimizer = FlatOptimizer(self.units, self.config, tp=mesh.tp, everybody=mesh.world)
        self._hooks = UnitHooks(model, blocks, len(parts))
        self.comes_and_goes = stage == 3 and mesh.dp_sp.size() > 1  # parameters are present only while they are used
        self._hooks.sharded = self.units if self.comes_and_goes else []
        self._hooks.events = UnitWork(self.weights, self.gradients)
        self._start()

    def _start(self) -> None:
        self._micro_batch, self._finished = 0, False
        self._hooks.forget()
        self.gradients.start_step()
        self.weights.start_step(self.micro_batches)

    def backward(self, loss: Tensor) -> None:
        """Run backward for one micro-batch; in the last one, gradients are reduced as soon as they are complete."""
        count = self.micro_batches
        if self._micro_batch == count:
            raise RuntimeError(f"a step has {count} micro-batches: call step(), or schedule .zero(micro_batches=...)")
        self._micro_batch += 1
        if self._micro_batch == count:
            self.gradients.last_micro_batch()
        loss.backward()  # type: ignore[no-untyped-call]
        self.gradients.finish_micro_batch()

    def finish(self) -> None:
        if not self._finished:
            if self._micro_batch == 0:  # the caller ran the backward pass itself
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
            way = "give step(lr=...), or schedule .zero(optimizer=OptimizerConfig(lr=...))"
            raise ConfigError(f"no learning rate: {way}")
        norm = self.grad_norm()
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.optimizer.step(lr, decay, norm, updated=self.weights.refresh)
        self.weights.forget()
        self._start()
        return norm

    def gathered(self, of_unit: str) -> dict[str, Tensor]:
        """Return this tp rank's part of every parameter ("local_params"), or gradient ("grad_shard"). Collective."""
        self.weights.settle()
        views: dict[str, Tensor] = {}
        for unit in self.units:
            whole = unit.gathered(getattr(unit, of_unit))
            views |= {slot.name: slot.view(whole) for slot in unit.slots}
        return views


def read(args: Mapping[str, Any], where: str) -> tuple[int, OptimizerConfig]:
    stage, count, given = args.get("stage"), args.get("micro_batches", 1), args.get("optimizer")
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero: the stage must be 0, 1, 2 or 3, not {stage!r} ({where})")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"zero: micro_batches must be a positive number, not {count!r} ({where})")
    if given is None or isinstance(given, OptimizerConfig):
        return stage, given or OptimizerConfig()
    if not isinstance(given, Mapping):
        what = f"optimizer must be an OptimizerConfig or a dict of its fields, not a {type(given).__name__}"
        why = "the units are updated by the project's own AdamW and SGD"
        raise ConfigError(f"zero: {what}: {why} ({where})")
    known = set(vars(OptimizerConfig()))
    if unknown := sorted(set(given) - known):
        has = f"it has {', '.join(sorted(known))}"
        raise ConfigError(f"zero: the optimizer has no {', '.join(unknown)}: {has} ({where})")
    for field in fields(OptimizerConfig):
        value, low = given.get(field.name), field.metadata.get("low") or 0
        if value is not None and "float" in str(field.type):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not isfinite(value) or value < low:
                what = f"{field.name} of the optimizer must be a number from {low} on, not {value!r}"
                raise ConfigError(f"zero: {what} ({where})")
    return stage, OptimizerConfig(**given)


def require(model: nn.Module, args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a line is invalid, or parameters have different dtypes, which one buffer cannot hold."""
    stage, _ = read(args, where)
    held = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad or stage == 3]
    other = next(((name, dtype) for name, dtype in held if dtype != held[0][1]), None)
    if other is not None:
        (first, one), (second, two) = ((name, str(dtype).removeprefix("torch.")) for name, dtype in (held[0], other))
        raise ConfigError(
            f"zero: {first} is {one} and {second} is {two}, and all parameters of a unit lie in one buffer: give the"
            f" model one dtype, model.to(torch.{one}) ({where})"
        )


def _holder(named: Iterable[tuple[str, nn.Parameter]]) -> nn.Module:
    # a module of these parameters, under their names in the model, with slashes for dots
    module = nn.Module()
    for name, parameter in named:
        module.register_parameter(name.replace(".", "/"), parameter)
    return module


def find_blocks(model: nn.Module, glob: str | None = None) -> list[str]:
    """Return the paths of the blocks (default: the items of the outermost lists of modules that are alike)."""
    if glob is not None:
        return expand(model, glob)
    layer = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
    blocks: list[str] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if not is_list or any(path.startswith(f"{block}.") for block in blocks):
            continue
        items = dict(module.named_children())
        # transformers calls attention here and a state space there a layer
        are_layers = layer is not None and all(isinstance(item, layer) for item in items.values())
        alike = are_layers or len({type(item) for item in items.values()}) == 1
        if len(items) > 1 and alike and all(any(True for _ in item.parameters()) for item in items.values()):
            blocks += [f"{path}.{name}" if path else name for name in items]
    return blocks


def units_of(model: nn.Module, blocks: list[str]) -> list[Unit]:
    """Return the units; parameters that a block shares with others are in unit 0."""
    holders: dict[int, set[int]] = {}  # parameter -> units that use it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), 0)
        holders.setdefault(id(parameter), set()).add(unit)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) > 2:
        dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in sizes))
        raise ConfigError(f"{type(model).__name__} has parameters in {dtypes}: two dtypes at most can be trained")
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    parts: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(blocks) + 1)]
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        units = holders[id(parameter)]
        part = others if parameter.dtype != usual else parts[units.pop() if len(units) == 1 else 0]
        part.append((name, parameter))
    made = [Unit("rest", _holder(parts[0]))]
    made += [Unit(block, _holder(part), "block") for block, part in zip(blocks, parts[1:], strict=True)]
    return made + ([Unit("other dtype", _holder(others), "whole")] if others else [])


def order_of(num_blocks: int, *, backward: bool) -> list[int]:
    """Return the units in the order in which a pass reads them."""
    forward = [*range(num_blocks + 1), 0]
    return forward + list(range(num_blocks, 0, -1)) if backward else forward


class UnitHooks:
    """Hooks of one model, for its lifetime, which report when its units are used."""

    # A block has two places in the autograd graph, a hook of its output's gradient and an identity before its input:
    # backward passes the first when the block's parameters are about to be read, and the second when all its gradients
    # are complete.

    def __init__(self, model: nn.Module, blocks: list[str], num_units: int) -> None:
        self._ends = (0, *range(len(blocks) + 1, num_units))  # what is outside of the blocks, or of all of them
        self.events: UnitEvents | None = None  # who is told
        self.sharded: list[FlatUnit] = []  # the units, if their parameters are present only while used (ZeRO stage 3)
        self._open: dict[int, int] = {}  # uses of a unit whose backward pass has not run yet
        self._keeping: list[Any] = []
        model.register_forward_pre_hook(lambda *_: self._read(*self._ends), prepend=True)
        # backward begins with what is after the blocks
        model.register_forward_hook(lambda _, args, result: self._at_gradient(result, (), 0))
        for index, path in enumerate(blocks, 1):
            block, is_last = model.get_submodule(path), index == len(blocks)
            block.register_forward_pre_hook(partial(self._before_block, index), with_kwargs=True, prepend=True)
            after = partial(self._after_block, index, is_last)
            block.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _read(self, *units: int) -> None:
        for index in units if self.events is not None else ():
            self.events.before_use(index)  # type: ignore[union-attr]

    def _before_block(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.events is None:
            return None
        self._read(index)
        if not torch.is_grad_enabled():
            return None
        if self.sharded:
            self._keeping.append(self._keeping_places(index))
            self._keeping[-1].__enter__()
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        # the first input that has a gradient: the hidden states
        first = next((name for name, x in named.items() if isinstance(x, Tensor) and x.requires_grad), None)
        if first is None:
            return None
        self._open[index] = self._open.get(index, 0) + 1

        def done() -> None:
            self._open[index] -= 1
            # a block called twice is finished after its second backward
            if self.events is not None and self._open[index] == 0:
                self.events.backward_done(index)

        named[first] = _Passed.apply(named[first], done)
        return tuple(named[i] for i in range(len(args))), {name: named[name] for name in kwargs}

    def _after_block(self, index: int, is_last: bool, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.events is None:
            return
        if self._keeping:
            self._keeping.pop().__exit__(None, None, None)
        if is_last and result is not None:  # None: the block has raised an exception
            self._read(0)
        self._at_gradient(result, tensors_of([args, kwargs]).values(), index)

    def _at_gradient(self, result: Any, inputs: Iterable[Tensor], index: int) -> None:
        # the tensors stay what they are, for a model may write into them; one that a block only passes on (the position
        # bias of T5) has its gradient when earlier blocks need it, and this one has given its buffer away
        if self.events is not None and torch.is_grad_enabled():
            passed_on = {id(x) for x in inputs}
            for x in tensors_of(result).values():
                if x.requires_grad and id(x) not in passed_on:
                    x.register_hook(lambda grad: self._read(index))

    def _keeping_places(self, index: int) -> Any:
        # a view of a parameter that autograd saves (a transpose, say) would point into a buffer that belongs to another
        # block by then, so it is saved as a place in its unit
        unit = self.sharded[index]
        slots = [layout.slots[0] for layout in (unit.layout, unit.frozen) if layout is not None and layout.slots]
        parameters = {slot.param.untyped_storage().data_ptr(): slot.param for slot in slots}

        def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
            like = parameters.get(x.untyped_storage().data_ptr()) if x.numel() else None
            if like is None:
                return x
            offset, shape, stride = x.storage_offset(), x.shape, x.stride()

            def view() -> Tensor:
                if like.numel() == 0:
                    self._read(index)
                place: Any = torch.empty(0, dtype=like.dtype, device=like.device)
                return place.set_(like.data.untyped_storage(), offset, shape, stride)  # type: ignore[no-any-return]

            return view

        unpack = lambda kept: kept if isinstance(kept, Tensor) else kept()
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def forget(self) -> None:
        self._open.clear()


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.passed()
        return grad, None
