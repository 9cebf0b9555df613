"""Forwards of split layers, replaced by those of ``megatron_sp.parallel`` (``forwards.py``), and attributes that hold their sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.embedding import embedding
from megatron_sp.parallel.linear import column_linear, row_linear
from megatron_sp.parallel.regions import copy_to, gather_from, overridable, reduce_from, reduce_scatter_to
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.schedule.apply.plan import ApplyJob, SplitPlan, WholeModel, joined
from megatron_sp.schedule.apply.splits import Split
from megatron_sp.schedule.core.kinds import Kind, computes_as_known, find_kind, is_taught
from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class _Layer:
    """A layer whose main parameter is split.

    Attributes:
        do, args: of the line that splits the whole layer; "" and {}: ``shard`` lines split its parameters one by one.
    """

    path: str
    module: nn.Module
    kind: Kind
    split: Split
    do: str
    args: Mapping[str, Any]


def replace_forwards(job: ApplyJob, plan: SplitPlan, whole: WholeModel) -> set[str]:
    """Replace the forwards of all split layers."""
    lines = {id(module): line for line, _, module in job.each("column", "row", "vocab_parallel")}
    partial: set[str] = set()
    for path, module in job.model.named_modules():
        kind = find_kind(module)
        if kind is None or job.tp_size == 1 or kind.main not in module._parameters:
            continue
        by_inputs, by_outputs = plan.by_inputs(path, kind), plan.by_outputs(path, kind)
        if not by_inputs and not by_outputs:
            continue
        line = lines.get(id(module))
        do, args = ("", {}) if line is None else (line.do, line.args)
        layer = _Layer(path, module, kind, plan.splits[joined(path, kind.main)], do, args)
        if by_inputs and isinstance(module, nn.Embedding):
            _split_table(job, plan, whole, layer, module)
        elif by_inputs:
            partial |= _split_by_inputs(job, layer)
        elif do == "vocab_parallel":
            rows = whole.shapes[joined(path, "weight")][kind.out_dims["weight"]]
            module.forward = vocab_head(module, kind, job.tp, rows)  # type: ignore[method-assign]
        else:
            _split_by_outputs(job, whole, layer)
    return partial


def _split_table(job: ApplyJob, plan: SplitPlan, whole: WholeModel, layer: _Layer, table: nn.Embedding) -> None:
    # replace the forward of an embedding split by words, unless hooks of the user's look after the words of other ranks
    if id(table) in plan.hooked:
        _set_size(layer, layer.kind.in_attribute, layer.kind.in_dims[layer.kind.main])
        return
    rows = whole.shapes[joined(layer.path, "weight")][0]
    table.forward = vocab_embedding(table, job.tp, rows)  # type: ignore[method-assign,assignment]


def _split_by_outputs(job: ApplyJob, whole: WholeModel, layer: _Layer) -> None:
    module, kind, asked = layer.module, layer.kind, layer.do == "column"
    for name in kind.divided:
        setattr(module, name, whole.counts[id(module), name] // job.tp_size)
    _set_size(layer, kind.out_attribute, kind.out_dims[kind.main])
    copies = asked and layer.args.get("input", "copy") == "copy" and not kind.by_channel
    gathers = bool(layer.args.get("gather"))
    if gathers and layer.split.copies > 1:
        raise ConfigError(
            f"{layer.path}: gather joins every rank's heads, and here several ranks have the same ones: leave gather out"
        )
    if is_matrix(module, kind) and (asked or gathers):
        module.forward = column(module, kind, job.tp, copies=copies, gathers=gathers)  # type: ignore[method-assign]
    elif copies or gathers:
        module.forward = other_column(module, kind, job.tp, copies=copies, gathers=gathers)  # type: ignore[method-assign]


def _split_by_inputs(job: ApplyJob, layer: _Layer) -> set[str]:
    # replace the forward of a layer split by rows; returns the name of its bias if the bias' gradient is a partial sum
    path, module, kind, where = layer.path, layer.module, layer.kind, layer.split.where
    _set_size(layer, kind.in_attribute, kind.in_dims[kind.main])
    reduce, axis = _reduction(job, layer)
    if reduce is None:
        return set()  # a partial sum, which a sync after it completes
    if reduce not in ("all_reduce", "reduce_scatter"):
        raise ConfigError(f"{path}: reduce must be all_reduce or reduce_scatter, not {reduce!r}")
    has_bias = module._parameters.get("bias") is not None
    axis = job.seq_dim if axis is None else axis
    if is_matrix(module, kind):
        module.forward = row(module, kind, job.tp, reduce, axis, path, where)  # type: ignore[method-assign]
    else:
        module.forward = other_row(module, kind, job.tp, reduce, axis)  # type: ignore[method-assign]
    return (
        {joined(path, "bias")} if reduce == "reduce_scatter" and has_bias else set()
    )  # each rank adds it to a share of the result


def _reduction(job: ApplyJob, layer: _Layer) -> tuple[Any, int | None]:
    # (how a layer split by rows sums, along which axis) from its line, or from a sync right after it; None: it does not
    reduce, axis = layer.args.get("reduce"), layer.args.get("axis")
    if reduce is not None:
        return reduce, axis
    syncs = (line for line, _, at in job.each("sync") if at is layer.module and line.args["mode"] == "fwd_post")
    sync = next((line for line in syncs if line.args.get("over", "tp") == "tp"), None)
    if sync is not None and sync.args["op"] in ("all_reduce", "reduce_scatter"):
        return sync.args["op"], sync.args.get("axis")
    if layer.module._parameters.get("bias") is not None:
        raise ConfigError(
            f"{layer.path} is split along its inputs, so each of the tp ({job.tp_size}) ranks would add its bias: name where the sum is"
            f" made, with .row() or .sync('fwd_post', 'all_reduce') on the layer itself ({layer.split.where}, E3)"
        )
    return None, axis


def _set_size(layer: _Layer, attribute: str | None, dim: int) -> None:
    weight = layer.module._parameters[layer.kind.main]
    if weight is not None and attribute is not None and isinstance(getattr(layer.module, attribute, None), int):
        setattr(layer.module, attribute, weight.shape[dim])


Forward = Callable[..., Tensor]


def _called_as(module: nn.Module) -> Callable[[Forward], Forward]:
    # a decorator for a forward of one input: it is called as the module's own is, by position or by name
    own = module.forward

    def named(forward: Forward) -> Forward:
        @functools.wraps(own)  # signatures are looked up through this
        def called(*args: Any, **kwargs: Any) -> Tensor:
            given = (*args, *(value for value in kwargs.values() if value is not None))
            if len(given) != 1:
                more = ", ".join(kwargs) or f"{len(given)} inputs"
                raise ConfigError(
                    f"a {type(module).__name__} that is split takes its input alone, not {more}: leave it whole"
                )
            return forward(given[0])

        return called

    return named


def _matrix(module: nn.Module, kind: Kind) -> tuple[Tensor, Tensor | None]:
    # the weight [out, in], a view, and the bias
    weight, bias = module.weight, module.bias if "bias" in module._parameters else None
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    return (weight if kind.out_dims["weight"] == 0 else weight.t()), bias


def is_matrix(module: nn.Module, kind: Kind) -> bool:
    weight = module._parameters.get("weight")
    ours = computes_as_known(module) and not is_taught(module)
    return ours and kind.product is not None and weight is not None and weight.ndim == 2


def column(module: nn.Module, kind: Kind, group: Group, *, copies: bool, gathers: bool) -> Forward:
    """Return a forward in which each rank computes some of the outputs."""

    @_called_as(module)
    def forward(x: Tensor) -> Tensor:
        weight, bias = _matrix(module, kind)
        y = split_column(x, weight, bias, group if copies else None)
        return gather_from(y, group, -1, "slice") if gathers else y

    return forward


@overridable
def split_column(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Compute x @ weight.T + bias for this rank's outputs; the input's gradient is summed over ``group``."""
    return column_linear(x, weight, bias, tp=NO_TP if group is None else TensorParallel(group))[0]


def other_column(module: nn.Module, kind: Kind, group: Group, *, copies: bool, gathers: bool) -> Forward:
    # the forward of ``column`` for layers that are no matrix: convolutions, embeddings by features, registered classes
    inner = module.forward

    def enter(x: Any) -> Any:
        has_gradient = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())  # token ids have no gradient
        return copy_to(x, group) if copies and has_gradient else x

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = inner(*(enter(x) for x in args), **{name: enter(x) for name, x in kwargs.items()})
        return gather_from(y, group, kind.out_axis, "slice") if gathers else y

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    return forward


def row(module: nn.Module, kind: Kind, group: Group, reduce: str, axis: int, path: str, where: str) -> Forward:
    """Return a forward that sums the ranks' results, then adds the bias once; ``path`` and ``where`` are for messages."""

    @_called_as(module)
    def forward(x: Tensor) -> Tensor:
        weight, bias = _matrix(module, kind)
        if reduce == "all_reduce":
            return split_row(x, weight, bias, group)
        if not -x.ndim <= axis < x.ndim:
            raise ConfigError(
                f"{path}: axis {axis} of {list(x.shape)}, along which row scatters, does not exist ({where}, E13)"
            )
        y = reduce_scatter_to(split_row(x, weight, None, None), group, axis)
        return y if bias is None else y + _bias_of(y, bias, group, axis, -1)

    return forward


@overridable
def split_row(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Compute x @ weight.T for this rank's inputs, summed over ``group``, plus the bias."""
    return row_linear(x, weight, bias, tp=NO_TP if group is None else TensorParallel(group))


def other_row(module: nn.Module, kind: Kind, group: Group, reduce: str, axis: int) -> Forward:
    """Return the forward of ``row`` for layers that are no matrix, by the product of their kind: convolutions, registered classes."""
    assert kind.product is not None
    product = kind.product

    @_called_as(module)
    def forward(x: Tensor) -> Tensor:
        y = product(module, x)
        y = reduce_from(y, group) if reduce == "all_reduce" else reduce_scatter_to(y, group, axis)
        bias = module._parameters.get("bias")
        return (
            y
            if bias is None
            else y + _bias_of(y, bias, group, axis if reduce == "reduce_scatter" else None, kind.out_axis)
        )

    return forward


def _bias_of(y: Tensor, bias: Tensor, group: Group, scattered: int | None, out_axis: int) -> Tensor:
    if scattered is not None and scattered % y.ndim == out_axis % y.ndim:
        each = y.shape[out_axis]
        bias = bias.narrow(0, group.rank() * each, each)
    shape = [1] * y.ndim
    shape[out_axis] = -1
    return bias.view(shape)


def vocab_embedding(module: nn.Embedding, group: Group, rows: int) -> Forward:
    # a forward for a table split by rows: each rank looks up what it has, and the results are summed
    own = None if computes_as_known(module) else module.forward

    @_called_as(module)
    def lookup(ids: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return split_embedding(ids, weight, group, module.padding_idx, rows)

    if own is None:
        return lookup

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with _Lookups(module, lookup) as lookups:
            result: Tensor = own(*args, **kwargs)
        if not lookups.made:
            raise ConfigError(
                f"{type(module).__name__} does not look its words up with F.embedding, so they cannot be split: leave it whole"
            )
        return result

    return forward


class _Lookups(TorchFunctionMode):
    """Mode in which lookups in one module's table are made by another function."""

    def __init__(self, module: nn.Embedding, lookup: Forward) -> None:
        super().__init__()
        self.module, self.lookup, self.made = module, lookup, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.embedding and args[1] is self.module.weight:
            self.made = True
            return self.lookup(args[0])
        return func(*args, **(kwargs or {}))


@overridable
def split_embedding(ids: Tensor, weight: Tensor, group: Group, padding: int | None, rows: int) -> Tensor:
    """Look up rows by id, summed over the group; row ``padding`` gets no gradient. Raises IndexError (CPU only) for ids not in ``rows``."""
    if ids.numel() and not torch.compiler.is_compiling() and ids.device.type == "cpu":
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows:
            raise IndexError(f"token {low if low < 0 else high} is outside of the vocabulary of {rows}")
    if padding is not None:
        weight = _without_gradient_of(weight, padding, group)
    return embedding(ids.contiguous(), weight, tp=TensorParallel(group))


def _without_gradient_of(weight: Tensor, row: int, group: Group) -> Tensor:
    local = row - group.rank() * weight.shape[0]
    if not 0 <= local < weight.shape[0]:
        return weight
    return torch.cat([weight[:local], weight[local : local + 1].detach(), weight[local + 1 :]])


def vocab_head(module: nn.Module, kind: Kind, group: Group, rows: int) -> Forward:

    @_called_as(module)
    def forward(x: Tensor) -> Tensor:
        weight, bias = _matrix(module, kind)
        y = copy_to(x, group) @ weight.t()
        y = y if bias is None else y + bias
        return gather_from(y, group, -1, "slice")[..., :rows]

    return forward
