"""Units of a foreign model, whose parameters are reduced, sharded and gathered together, and hooks that report when they are used.

Unit 0 is everything outside of the blocks (embeddings, last norm, head, and what they share with blocks); units 1, 2,
... are the blocks: the items of the outermost lists of modules of one class, or of transformers' layers of several. A
pass reads unit 0, the blocks in their order, and unit 0 again; its backward goes through the blocks in reverse. Where a
model keeps some parameters in another dtype (fp32 of the routers of transformers' mixtures), these are the last unit,
which is whole between its uses.

A block has two places in the autograd graph, a hook of its output's gradient and an identity before its input: backward
passes the first when the block's parameters are about to be read, and the second when all its gradients are complete. A view
of a parameter that autograd saves for backward (a transpose, say) would point into a buffer that belongs to another
block by then; it is saved as a place in its unit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.optim.flat import FlatUnit
from megatron_sp.parallel.forward_context import Unit, UnitEvents
from megatron_sp.schedule.core.directives import expand
from megatron_sp.utils.errors import ConfigError

_LISTS = (nn.ModuleList, nn.Sequential)


class Parameters(nn.Module):
    """Container of some of a model's parameters, under their names there with slashes for dots."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        for name, parameter in named:
            self.register_parameter(name.replace(".", "/"), parameter)


def find_blocks(model: nn.Module, glob: str | None = None) -> list[str]:
    """Return the paths of the blocks, in order."""
    if glob is not None:
        return expand(model, glob)
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, _LISTS) or any(path.startswith(f"{block}.") for block in found):
            continue
        items = [(f"{path}.{name}" if path else name, item) for name, item in module.named_children()]
        if (
            len(items) > 1
            and _is_of_blocks([item for _, item in items])
            and all(any(True for _ in i.parameters()) for _, i in items)
        ):
            found += [name for name, _ in items]
    return found


def _is_of_blocks(items: list[nn.Module]) -> bool:
    """Return whether modules are of one class, or all of classes that transformers calls layers: attention here, a state space there."""
    layer = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
    return len({type(item) for item in items}) == 1 or (
        layer is not None and all(isinstance(item, layer) for item in items)
    )


def units_of(model: nn.Module, blocks: list[str]) -> list[Unit]:
    """Return the units; a parameter that a block shares with something else is in unit 0."""
    holders: dict[int, set[int]] = {}  # parameter -> units that use it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), 0)
        holders.setdefault(id(parameter), set()).add(unit)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) > 2:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in sizes))
        raise ConfigError(f"{type(model).__name__} has parameters in {found}: two dtypes at most can be trained")
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    parts: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(blocks) + 1)]
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        units = holders[id(parameter)]
        part = others if parameter.dtype != usual else parts[units.pop() if len(units) == 1 else 0]
        part.append((name, parameter))
    return [
        *(
            Unit(block, Parameters(part), "block" if i > 0 else "")
            for i, (block, part) in enumerate(zip(["rest", *blocks], parts, strict=True))
        ),
        *([Unit("other dtype", Parameters(others), "whole")] if others else []),
    ]


def order_of(num_blocks: int, *, backward: bool) -> list[int]:
    """Return the units in the order in which a pass reads them."""
    forward = [*range(num_blocks + 1), 0]
    return forward + list(range(num_blocks, 0, -1)) if backward else forward


class UnitHooks:
    """Hooks of one model, for its lifetime.

    Args:
        model, blocks: as of ``units_of``.
        num_units: number of its units.

    Attributes:
        events: receiver of the events, or None.
        sharded: the units if their parameters are present only while used (ZeRO stage 3), else empty.
    """

    def __init__(self, model: nn.Module, blocks: list[str], num_units: int) -> None:
        self._ends = (0, *range(len(blocks) + 1, num_units))  # what is outside of the blocks, or of all of them
        self.events: UnitEvents | None = None
        self.sharded: list[FlatUnit] = []
        self._open: dict[int, int] = {}  # uses of a unit whose backward pass has not run yet
        self._keeping: list[Any] = []
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)
        for index, path in enumerate(blocks, 1):
            block = model.get_submodule(path)
            block.register_forward_pre_hook(self._before(index), with_kwargs=True, prepend=True)
            block.register_forward_hook(self._behind(index, last=index == len(blocks)), always_call=True)

    def _begin(self, *_: Any) -> None:
        if self.events is not None:
            for index in self._ends:
                self.events.before_use(index)

    def _end(self, _: nn.Module, args: Any, result: Any) -> None:
        # report unit 0 when backward begins, with what is after the blocks
        if self.events is not None:
            _at_gradient(result, lambda: self._needed(0))

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if self.events is None:
                return None
            self.events.before_use(index)
            self._keep_places(index)
            return _first_changed(
                args, kwargs, lambda x: _Passed.apply(x, lambda: self._done(index)), lambda: self._opened(index)
            )

        return hook

    def _behind(self, index: int, *, last: bool) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            if self.events is None:
                return
            if self._keeping:
                self._keeping.pop().__exit__(None, None, None)
            if last and result is not None:
                self.events.before_use(0)
            _at_gradient(result, lambda: self._needed(index))

        return hook

    def _opened(self, index: int) -> None:
        self._open[index] = self._open.get(index, 0) + 1

    def _needed(self, index: int) -> None:
        if self.events is not None:
            self.events.before_use(index)

    def _done(self, index: int) -> None:
        self._open[index] -= 1
        if self.events is not None and self._open[index] == 0:  # a block that is used twice is done when both are
            self.events.backward_done(index)

    def _keep_places(self, index: int) -> None:
        if not self.sharded or not torch.is_grad_enabled():
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(_Keeper(self, index).pack, _unpack)
        hooks.__enter__()
        self._keeping.append(hooks)

    def forget(self) -> None:
        """Clear the uses that wait for backward: a step has ended."""
        self._open.clear()


class _BufferView:
    """Placeholder for a view of a unit's buffer, wherever that is when the view is needed."""

    def __init__(self, keeper: _Keeper, like: nn.Parameter, view: Tensor) -> None:
        self.keeper, self.like = keeper, like
        self.offset, self.shape, self.stride = view.storage_offset(), view.shape, view.stride()

    def view(self) -> Tensor:
        if self.like.numel() == 0:
            self.keeper.hooks._needed(self.keeper.index)
        where = self.like.data
        return torch.empty(0, dtype=where.dtype, device=where.device).set_(
            where.untyped_storage(), self.offset, self.shape, self.stride
        )  # type: ignore[call-overload,no-any-return]


class _Keeper:
    """Packs the tensors that autograd saves in one block's pass: views of its unit's buffers become ``_BufferView``."""

    def __init__(self, hooks: UnitHooks, index: int) -> None:
        self.hooks, self.index = hooks, index
        unit = hooks.sharded[index]
        slots = [layout.slots[0] for layout in (unit.layout, unit.frozen) if layout is not None and layout.slots]
        self._of = {slot.param.untyped_storage().data_ptr(): slot.param for slot in slots}

    def pack(self, x: Tensor) -> Tensor | _BufferView:
        like = self._of.get(x.untyped_storage().data_ptr()) if x.numel() else None
        return x if like is None else _BufferView(self, like, x)


def _unpack(kept: Tensor | _BufferView) -> Tensor:
    return kept.view() if isinstance(kept, _BufferView) else kept


class _Passed(torch.autograd.Function):
    """Identity in forward; calls a function when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.passed()
        return grad, None


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def _first_changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], told: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs with ``change`` applied to the first tensor that has a gradient (the hidden states), or None if there is none."""
    for place, value in enumerate(args):
        if _has_gradient(value):
            told()
            return (*args[:place], change(value), *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if _has_gradient(value):
            told()
            return args, {**kwargs, name: change(value)}
    return None


def _at_gradient(result: Any, told: Callable[[], None]) -> None:
    """Call a function when the gradient of a result arrives; the tensors stay what they are, for a model may write into them."""
    if isinstance(result, Tensor):
        if _has_gradient(result):
            result.register_hook(lambda grad: told())
    elif isinstance(result, (tuple, list, dict)):
        for value in result.values() if isinstance(result, dict) else result:
            _at_gradient(value, told)
