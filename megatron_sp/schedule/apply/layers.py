"""Forwards of split layers, replaced by those of ``megatron_sp.parallel``, and attributes that hold their sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.linear import column_linear, embedding, row_linear
from megatron_sp.parallel.mappings import copy_to, gather_from, overridable, reduce_from, reduce_scatter_to
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.schedule.apply.plan import ApplyJob, SplitPlan, joined
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.kinds import Kind, computes_as_known, find_kind
from megatron_sp.utils.errors import ConfigError

Forward = Callable[..., Tensor]
Line = Directive | None  # that a split layer has of its own


def replace_forwards(job: ApplyJob, plan: SplitPlan) -> set[str]:
    """Replace the forwards of all split layers; returns the names of biases whose gradients are partial sums."""
    lines = {id(module): line for line, _, module in job.each("column", "row", "vocab_parallel")}
    partial: set[str] = set()
    for path, module in job.model.named_modules():
        kind = find_kind(module)
        if kind is None or job.tp_size == 1 or kind.main not in module._parameters:
            continue
        by_inputs = plan.is_split(path, kind, kind.in_dims)
        if not by_inputs and not plan.is_split(path, kind, kind.out_dims):
            continue
        line, split = lines.get(id(module)), plan.splits[joined(path, kind.main)]
        rows = plan.shapes[split.name][0 if by_inputs else kind.out_dims[kind.main]]
        forward: Forward | None
        if isinstance(module, nn.Embedding) and by_inputs and id(module) not in plan.hooked:
            forward = _vocab_embedding(module, job.mesh.tp, rows)
        elif line is not None and line.do == "vocab_parallel" and not by_inputs:
            _require_plain(path, module, kind, split.where)
            forward = _vocab_head(module, kind, job.mesh.tp, rows)
        else:
            weight = module._parameters[kind.main]
            attribute, dims = (kind.in_attribute, kind.in_dims) if by_inputs else (kind.out_attribute, kind.out_dims)
            if weight is not None and attribute and isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, weight.shape[dims[kind.main]])
            if not by_inputs:
                for name in kind.divided:
                    setattr(module, name, plan.counts[id(module), name] // job.tp_size)
                forward = _column(job, path, module, kind, line, split.copies)
            elif isinstance(module, nn.Embedding):
                continue  # hooks of the user's look after the words of other ranks
            else:
                _require_plain(path, module, kind, split.where)
                reduce, axis = _reduction(job, path, module, line, split.where)
                if reduce == "reduce_scatter" and module._parameters.get("bias") is not None:
                    partial.add(joined(path, "bias"))  # each rank adds it to a share of the result
                forward = None if reduce is None else _row(module, kind, job.mesh.tp, reduce, axis, path, split.where)
        if forward is not None:
            module.forward = forward  # type: ignore[method-assign]
    return partial


def _require_plain(path: str, module: nn.Module, kind: Kind, where: str) -> None:
    name, way = type(module).__name__, "split it by its outputs, or leave it whole"
    if not computes_as_known(module):
        raise ConfigError(
            f"{path} is a {name} with a forward of its own, and what that adds must come after the sum over the ranks:"
            f" {way}; if it adds nothing, register_shardable({name}, Kind(..., product=...)) ({where})"
        )
    if extra := [n for n, p in module._parameters.items() if p is not None and n not in (kind.main, "bias")]:
        beside = f"{', '.join(extra)} beside {kind.main} and bias"
        raise ConfigError(f"{path} is a {name} with {beside}, which has no place after the sum: {way} ({where})")


def _reduction(job: ApplyJob, path: str, module: nn.Module, line: Line, where: str) -> tuple[str | None, int]:
    # (how a layer split by rows sums, along which axis) from its line, or from a sync right after it; None: it does not
    args: Mapping[str, Any] = {} if line is None else line.args
    reduce, axis = args.get("reduce"), args.get("axis")
    if reduce is None:
        syncs = (d.args for d, _, at in job.each("sync") if at is module and d.args["mode"] == "fwd_post")
        sync = next((args for args in syncs if args.get("over", "tp") == "tp"), {})
        if sync.get("op") in ("all_reduce", "reduce_scatter"):
            reduce, axis = sync["op"], sync.get("axis")
        elif module._parameters.get("bias") is not None:
            raise ConfigError(
                f"{path} is split along its inputs, so each of the tp ({job.tp_size}) ranks would add its bias: name"
                f" where the sum is made, with .row() or .sync('fwd_post', 'all_reduce') on the layer itself ({where},"
                " E3)"
            )
    elif reduce not in ("all_reduce", "reduce_scatter"):
        raise ConfigError(f"{path}: reduce must be all_reduce or reduce_scatter, not {reduce!r}")
    return reduce, job.seq_dim if axis is None else axis


def _one_input(module: nn.Module, forward: Forward) -> Forward:
    # call a forward of one input as the module's own is called, by position or by name

    @functools.wraps(module.forward)  # signatures are looked up through this
    def called(*args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *(value for value in kwargs.values() if value is not None))
        if len(given) != 1:
            more, name = ", ".join(kwargs) or f"{len(given)} inputs", type(module).__name__
            raise ConfigError(f"a {name} that is split takes its input alone, not {more}: leave it whole")
        return forward(given[0])

    return called


def _matrix(module: nn.Module, kind: Kind) -> tuple[Tensor, Tensor | None] | None:
    # a layer's weight [out, in], a view, and its bias; None: it does not multiply by a matrix
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or kind.product is None:
        return None
    return (weight if kind.out_dims["weight"] == 0 else weight.t()), bias


def _column(job: ApplyJob, path: str, module: nn.Module, kind: Kind, line: Line, copies: int) -> Forward | None:
    # a forward in which each rank computes some of the outputs; None: the module's own does
    asked, group = line is not None and line.do == "column", job.mesh.tp
    args: Mapping[str, Any] = line.args if line is not None and asked else {}
    sums_gradient = asked and args.get("input", "copy") == "copy" and not kind.by_channel
    gathers = bool(args.get("gather"))
    if gathers and copies > 1:
        why = "gather joins every rank's heads, and here several ranks have the same ones"
        raise ConfigError(f"{path}: {why}: leave gather out")
    if not asked:
        return None
    inner = module.forward
    if computes_as_known(module, taught=False) and _matrix(module, kind) is not None:

        def multiply(x: Tensor) -> Tensor:
            weight, bias = _matrix(module, kind)  # type: ignore[misc]
            y = split_column(x, weight, bias, group if sums_gradient else None)
            return gather_from(y, group, -1, "slice") if gathers else y

        return _one_input(module, multiply)
    if not sums_gradient and not gathers:
        return None

    def enter(x: Any) -> Any:
        has_gradient = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())  # token ids have none
        return copy_to(x, group) if sums_gradient and has_gradient else x

    # convolutions, embeddings by features, registered classes
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = inner(*(enter(x) for x in args), **{name: enter(x) for name, x in kwargs.items()})
        return gather_from(y, group, kind.out_axis, "slice") if gathers else y

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # signatures are looked up through this
    return forward


@overridable
def split_column(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Compute this rank's outputs; the gradient of ``x`` is summed over ``group``."""
    return column_linear(x, weight, bias, tp=NO_TP if group is None else TensorParallel(group))[0]


def _row(module: nn.Module, kind: Kind, tp: Group, reduce: str, axis: int, path: str, where: str) -> Forward:
    # a forward that sums the ranks' results, then adds the bias once
    is_matrix = computes_as_known(module, taught=False) and _matrix(module, kind) is not None

    def forward(x: Tensor) -> Tensor:
        if reduce == "reduce_scatter" and not -x.ndim <= axis < x.ndim:
            what = f"axis {axis} of {list(x.shape)}, along which row scatters, does not exist"
            raise ConfigError(f"{path}: {what} ({where}, E13)")
        if is_matrix:
            weight, bias = _matrix(module, kind)  # type: ignore[misc]
            if reduce == "all_reduce":
                return split_row(x, weight, bias, tp)
            y = split_row(x, weight, None, None)
        else:
            y, bias = kind.product(module, x), module._parameters.get("bias")  # type: ignore[misc]
        y = reduce_from(y, tp) if reduce == "all_reduce" else reduce_scatter_to(y, tp, axis)
        if bias is None:
            return y
        out_axis = kind.out_axis % y.ndim
        if reduce == "reduce_scatter" and axis % y.ndim == out_axis:  # each rank has some of the outputs
            bias = bias.narrow(0, tp.rank() * y.shape[out_axis], y.shape[out_axis])
        return y + bias.view([-1 if dim == out_axis else 1 for dim in range(y.ndim)])

    return _one_input(module, forward)


@overridable
def split_row(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Compute x @ weight.T for this rank's inputs, summed over ``group``, plus the bias."""
    return row_linear(x, weight, bias, tp=NO_TP if group is None else TensorParallel(group))


def _vocab_embedding(module: nn.Embedding, group: Group, rows: int) -> Forward:
    # a forward for a table split by rows: each rank looks up what it has, and the results are summed

    def lookup(ids: Tensor) -> Tensor:
        return split_embedding(ids, module.weight, group, module.padding_idx, rows)

    if computes_as_known(module):
        return _one_input(module, lookup)
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with _Lookups(module, lookup) as lookups:
            result: Tensor = own(*args, **kwargs)
        if not lookups.made:
            what = "does not look its words up with F.embedding, so they cannot be split"
            raise ConfigError(f"{type(module).__name__} {what}: leave it whole")
        return result

    return forward


class _Lookups(TorchFunctionMode):
    def __init__(self, module: nn.Embedding, lookup: Forward) -> None:
        super().__init__()
        self.module, self.lookup, self.made = module, lookup, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and args[1] is self.module.weight:
            self.made = True
            return self.lookup(args[0])
        return func(*args, **(kwargs or {}))


@overridable
def split_embedding(ids: Tensor, weight: Tensor, group: Group, padding: int | None, rows: int) -> Tensor:
    """Look up rows by id, summed over the group; row ``padding`` gets no gradient."""
    # a GPU would have to wait for this
    if ids.numel() and not torch.compiler.is_compiling() and ids.device.type == "cpu":
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows:
            raise IndexError(f"token {low if low < 0 else high} is outside of the vocabulary of {rows}")
    local = -1 if padding is None else padding - group.rank() * weight.shape[0]
    if 0 <= local < weight.shape[0]:
        weight = torch.cat([weight[:local], weight[local : local + 1].detach(), weight[local + 1 :]])
    return embedding(ids.contiguous(), weight, tp=TensorParallel(group))


def _vocab_head(module: nn.Module, kind: Kind, group: Group, rows: int) -> Forward:

    def forward(x: Tensor) -> Tensor:
        weight, bias = _matrix(module, kind)  # type: ignore[misc]
        y = copy_to(x, group) @ weight.t()
        y = y if bias is None else y + bias
        return gather_from(y, group, -1, "slice")[..., :rows]  # without the padding of the last ranks

    return _one_input(module, forward)


def without_fast_paths(job: ApplyJob) -> None:
    """Disable fast paths of torch's transformer layers, which pass the weights of split modules to one kernel."""
    changed = {path for _, path, _ in job.each("shard", "column", "row", "vocab_parallel")}
    for path, module in job.model.named_modules():
        if any(other == path or other.startswith(f"{path}." if path else "") for other in changed):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
