"""Forwards of split layers, replaced by those of ``megatron_sp.parallel`` (``forwards.py``), and attributes that hold their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_sp.schedule.apply import forwards
from megatron_sp.schedule.apply.job import ApplyJob, joined
from megatron_sp.schedule.apply.plan import SplitPlan, WholeModel
from megatron_sp.schedule.apply.splits import Split
from megatron_sp.schedule.core.kinds import Kind, find_kind
from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class _Layer:
    """A layer whose main parameter is split.

    Attributes:
        split: of the main parameter.
        do, args: of the line that splits the whole layer; "" and {}: ``shard`` lines split its parameters one by one.
    """

    path: str
    module: nn.Module
    kind: Kind
    split: Split
    do: str
    args: Mapping[str, Any]


def replace_forwards(job: ApplyJob, plan: SplitPlan, whole: WholeModel) -> set[str]:
    """Replace the forwards of all split layers.

    Returns:
        Names of biases that each rank adds to its share of a result, so that their gradients are partial sums over tp.
    Raises:
        ConfigError: nobody says where the result of a layer split by rows is summed (E3), or an option does not fit the
            layer.
    """
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
            module.forward = forwards.vocab_head(module, kind, job.tp, rows)  # type: ignore[method-assign]
        else:
            _split_by_outputs(job, whole, layer)
    return partial


def _split_table(job: ApplyJob, plan: SplitPlan, whole: WholeModel, layer: _Layer, table: nn.Embedding) -> None:
    """Replace the forward of an embedding split by words, unless hooks of the user's look after the words of other ranks."""
    if id(table) in plan.hooked:
        _set_size(layer, layer.kind.in_attribute, layer.kind.in_dims[layer.kind.main])
        return
    rows = whole.shapes[joined(layer.path, "weight")][0]
    table.forward = forwards.vocab_embedding(table, job.tp, rows)  # type: ignore[method-assign,assignment]


def _split_by_outputs(job: ApplyJob, whole: WholeModel, layer: _Layer) -> None:
    module, kind, asked = layer.module, layer.kind, layer.do == "column"
    for name in kind.divided:
        setattr(module, name, whole.counts[id(module), name] // job.tp_size)
    _set_size(layer, kind.out_attribute, kind.out_dims[kind.main])
    copies = asked and layer.args.get("input", "copy") == "copy" and not kind.by_channel
    gathers = bool(layer.args.get("gather"))
    if gathers and layer.split.copies > 1:
        raise ConfigError(f"{layer.path}: gather joins every rank's heads, and here several ranks have the same ones: leave gather out")
    if forwards.is_matrix(module, kind) and (asked or gathers):
        module.forward = forwards.column(module, kind, job.tp, copies=copies, gathers=gathers)  # type: ignore[method-assign]
    elif copies or gathers:
        module.forward = forwards.other_column(module, kind, job.tp, copies=copies, gathers=gathers)  # type: ignore[method-assign]


def _split_by_inputs(job: ApplyJob, layer: _Layer) -> set[str]:
    """Replace the forward of a layer split by rows; returns the name of its bias if the bias' gradient is a partial sum."""
    path, module, kind, where = layer.path, layer.module, layer.kind, layer.split.where
    _set_size(layer, kind.in_attribute, kind.in_dims[kind.main])
    reduce, axis = _reduction(job, layer)
    if reduce is None:
        return set()  # a partial sum, which a sync after it completes
    if reduce not in ("all_reduce", "reduce_scatter"):
        raise ConfigError(f"{path}: reduce must be all_reduce or reduce_scatter, not {reduce!r}")
    has_bias = module._parameters.get("bias") is not None
    axis = job.seq_dim if axis is None else axis
    if forwards.is_matrix(module, kind):
        module.forward = forwards.row(module, kind, job.tp, reduce, axis, path, where)  # type: ignore[method-assign]
    else:
        module.forward = forwards.other_row(module, kind, job.tp, reduce, axis)  # type: ignore[method-assign]
    return {joined(path, "bias")} if reduce == "reduce_scatter" and has_bias else set()  # each rank adds it to a share of the result


def _reduction(job: ApplyJob, layer: _Layer) -> tuple[Any, int | None]:
    """Return (how a layer split by rows sums, along which axis) from its line, or from a sync right after it; None: it does not.

    Raises:
        ConfigError: it does not, and has a bias, which each rank would add (E3).
    """
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
    """Set an attribute that holds a size of the layer to this rank's size."""
    weight = layer.module._parameters[layer.kind.main]
    if weight is not None and attribute is not None and isinstance(getattr(layer.module, attribute, None), int):
        setattr(layer.module, attribute, weight.shape[dim])
