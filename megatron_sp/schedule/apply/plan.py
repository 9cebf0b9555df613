"""Plan of a split: which parameters are split, and along which dims. Made from the whole model, and checked, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.splits import (
    Split,
    SplitRequest,
    cannot,
    check_tied,
    collect,
    make_split,
    names_of,
    tensor_of,
)
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.kinds import Kind, computes_as_known, find_kind, kind_of
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class SplitPlan:
    """The parameters that are split, and what follows for their layers."""

    splits: dict[str, Split]  # by name, under all names of tied parameters
    hooked: frozenset[int]  # modules with hooks of the user's, by identity

    def is_split(self, path: str, name: str, dim: int) -> bool:
        split = self.splits.get(joined(path, name))
        return split is not None and split.dim == dim

    def by_outputs(self, path: str, kind: Kind) -> bool:
        """Return whether a layer is split by its outputs (columns)."""
        return self.is_split(path, kind.main, kind.out_dims.get(kind.main, -1))

    def by_inputs(self, path: str, kind: Kind) -> bool:
        """Return whether a layer is split by its inputs (rows)."""
        return self.is_split(path, kind.main, kind.in_dims.get(kind.main, -1))

    def sums_itself(self, path: str, module: nn.Module) -> bool:
        """Return whether a layer is split by rows and its forward sums; an embedding leaves the sum to hooks if it has any."""
        kind = find_kind(module)
        leaves_it = isinstance(module, nn.Embedding) and id(module) in self.hooked
        return kind is not None and not leaves_it and self.by_inputs(path, kind)


@dataclass(frozen=True)
class WholeModel:
    """Facts about the model before it is split."""

    shapes: dict[str, tuple[int, ...]]  # of all parameters, and of the buffers that are split, by name
    # attributes that count what is split (groups, channels), by (id of the module, attribute)
    counts: dict[tuple[int, str], int]

    @classmethod
    def of(cls, model: nn.Module, plan: SplitPlan) -> WholeModel:
        """Record the shapes and counts of a model before it is split."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        shapes |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in plan.splits}
        kinds = [(module, find_kind(module)) for module in model.modules()]
        counts = {(id(m), name): getattr(m, name) for m, kind in kinds if kind is not None for name in kind.divided}
        return cls(shapes, counts)


def plan_splits(job: ApplyJob) -> SplitPlan:
    """Plan the splits that lines ask for."""
    splits = collect(list(_requested(job)))
    _extend_to_aliases(job.model, splits)
    check_tied(job.model, splits)
    plan = SplitPlan(splits, frozenset(id(module) for _, _, module in job.each("hook")))
    _check_biases(job.model, plan)
    _check_layers(job, plan)
    return plan


def sync_args(job: ApplyJob, plan: SplitPlan, line: Directive, path: str, module: nn.Module) -> dict[str, Any]:
    """Return the arguments of a sync; after an embedding split by words, which has summed already, reduce_scatter becomes scatter."""
    args = line.args
    if (
        args["mode"] != "fwd_post"
        or not isinstance(module, nn.Embedding)
        or job.tp_size == 1
        or not plan.sums_itself(path, module)
    ):
        return args
    if args["op"] == "all_gather":
        raise ConfigError(
            f"{path} is split by its words: each rank looks up those it has, and the results are summed; all_gather ({line.where}) would"
            " repeat them: use all_reduce, or split axis 1 (E5)"
        )
    return {**args, "op": "scatter"} if args["op"] == "reduce_scatter" else args


def _requested(job: ApplyJob) -> Iterator[Split]:
    for line, path, module in job.each("shard", "column", "row", "vocab_parallel"):
        if line.do == "shard":
            yield _split_of(job, path, module, line.args["tensor"], _request(line, line.args["axis"]))
        else:
            yield from _splits_of_layer(job, line, path, module)


def _request(line: Directive, axis: int) -> SplitRequest:
    args = line.args
    return SplitRequest(
        axis,
        args.get("blocks"),
        args.get("heads"),
        bool(args.get("replicas")),
        padded=line.do == "vocab_parallel",
        where=line.where,
    )


def _splits_of_layer(job: ApplyJob, line: Directive, path: str, module: nn.Module) -> Iterator[Split]:
    kind = kind_of(module, path)
    if kind.main not in module._buffers and module._parameters.get(kind.main) is None:
        raise ConfigError(no_parameter(path, module, kind.main, line.where))
    for name, dim in _dims(line, path, module, kind).items():
        if tensor_of(module, name) is not None:
            yield _split_of(job, path, module, name, _request(line, dim))


def _dims(line: Directive, path: str, module: nn.Module, kind: Kind) -> dict[str, int]:
    main, is_table = module._parameters.get(kind.main), isinstance(module, nn.Embedding)
    if line.do == "column":
        return kind.out_dims
    if line.do == "row":
        if kind.product is None:
            raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split by rows ({line.where})")
        return kind.in_dims
    is_head = kind.product is not None and kind.main == "weight" and getattr(main, "ndim", 0) == 2
    if not is_table and not is_head:
        name = type(module).__name__
        raise ConfigError(
            f"{path} is a {name}: vocab_parallel is for an embedding, or the layer over the vocabulary ({line.where})"
        )
    return kind.in_dims if is_table else kind.out_dims


def _split_of(job: ApplyJob, path: str, module: nn.Module, name: str, request: SplitRequest) -> Split:
    parameter = tensor_of(module, name)
    if parameter is None:
        raise ConfigError(no_parameter(path, module, name, request.where))
    require_splittable(path, module, name, request.axis, job.tp_size, request.where)
    return make_split(joined(path, name), tuple(parameter.shape), request, job.tp_size)


def _extend_to_aliases(model: nn.Module, splits: dict[str, Split]) -> None:
    for names in names_of(model).values():
        chosen = [splits[name] for name in names if name in splits]
        for name in names:
            owner = model.get_submodule(name.rpartition(".")[0])
            same = any(owner is model.get_submodule(split.name.rpartition(".")[0]) for split in chosen)
            if chosen and name not in splits and (same or find_kind(owner) is None):
                splits[name] = replace(chosen[0], name=name)


def _check_biases(model: nn.Module, plan: SplitPlan) -> None:
    for name, split in plan.splits.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        kind = find_kind(module)
        if kind is None or kind.out_dims.get(last) != split.dim:
            continue
        for other, dim in kind.out_dims.items():
            if tensor_of(module, other) is not None and not plan.is_split(path, other, dim):
                raise ConfigError(
                    f"{name} is split along its outputs and {joined(path, other)} is not ({split.where}): add"
                    f' .shard("{other}", axis={dim}), or use .column() (E4)'
                )


def _check_layers(job: ApplyJob, plan: SplitPlan) -> None:
    heads = {id(module) for _, _, module in job.each("vocab_parallel")}
    for path, module in job.model.named_modules():
        kind = find_kind(module)
        if isinstance(module, nn.Embedding):
            continue  # a table keeps its own forward, around the lookup
        if kind is not None and job.tp_size > 1 and (plan.sums_itself(path, module) or id(module) in heads):
            require_plain(path, module, kind, plan.splits[joined(path, kind.main)].where)
    for line, path, module in job.each("sync"):
        sync_args(job, plan, line, path, module)


@dataclass(frozen=True)
class ApplyJob:
    """Input of all phases."""

    model: nn.Module  # changed in place, phase by phase
    directives: list[Directive]  # the lines, in the order in which they were written
    mesh: Mesh
    seq_dim: int  # the dim of activations that runs over positions

    @property
    def tp(self) -> Group:
        """Group over which parameters are split."""
        return self.mesh.tp

    @property
    def tp_size(self) -> int:
        """Number of ranks that parameters are split over."""
        return self.mesh.tp.size()

    def each(self, *kinds: str) -> Iterator[tuple[Directive, str, nn.Module]]:
        """Yield (line, path, module) for all lines of these kinds; a module with several names once per line, under the first of them."""
        for directive in self.directives:
            if directive.do in kinds:
                found = {path: self.model.get_submodule(path) for path in expand(self.model, directive.on)}
                first = {id(module): path for path, module in reversed(found.items())}
                yield from ((directive, path, module) for path, module in found.items() if first[id(module)] == path)

    def first_names(self) -> dict[int, str]:
        """Return the first name of each parameter, by identity: tied parameters have several names."""
        return {id(p): name for name, p in self.model.named_parameters()}


def joined(path: str, name: str) -> str:
    """Return the full name of a parameter, buffer or child of the module at ``path``."""
    return f"{path}.{name}" if path else name


def no_parameter(path: str, module: nn.Module, name: str, where: str) -> str:
    """Return the message for a parameter that a module does not have itself."""
    found = ", ".join(n for n, p in (*module._parameters.items(), *module._buffers.items()) if p is not None) or "none"
    has = f"{path or 'the model'} has no parameter {name!r}: it has {found}"
    if is_parametrized(module, name):
        by, inside = type(module.parametrizations[name][0]).__name__, f"{path}.parametrizations.{name}".lstrip(".")  # type: ignore[index,union-attr]
        return (
            f"{has}; {name} is computed by {by}: shard what it is computed from, in {inside}, if each share of that makes a share of"
            f" {name}, or leave it whole ({where}, E1)"
        )
    return f"{has} ({where}, E1)"


def require_splittable(path: str, module: nn.Module, name: str, axis: int, size: int, where: str) -> None:
    tensor, kind, full = tensor_of(module, name), find_kind(module), f"{path}.{name}" if path else name
    if tensor is not None and is_lazy(tensor):
        raise ConfigError(
            f"{full} has no shape before the model has run: call it with a batch first, then schedule ({where})"
        )
    if kind is None or tensor is None or not -tensor.ndim <= axis < tensor.ndim:
        return
    if kind.refusal is not None:
        raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split: {kind.refusal} ({where})")
    dim, known = axis % tensor.ndim, {kind.out_dims.get(name), kind.in_dims.get(name)} - {None}
    if known and dim not in known:
        sides = (kind.out_dims.get(name), "outputs"), (kind.in_dims.get(name), "inputs")
        told = " and ".join(f"{d} ({what})" for d, what in sides if d is not None)
        raise ConfigError(f"{full}: axis {axis} of a {type(module).__name__} cannot be split, only {told} ({where})")
    if size == 1:
        return
    for attribute in kind.divided:
        if (count := int(getattr(module, attribute))) % size:
            raise ConfigError(cannot(full, attribute, count, size, where))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        _require_plain_table(full, module, dim, where)


def _require_plain_table(full: str, module: nn.Embedding | nn.EmbeddingBag, dim: int, where: str) -> None:
    wrong = [] if module.max_norm is None else [f"max_norm={module.max_norm}"]
    if dim == 0:
        wrong += [name for name in ("scale_grad_by_freq", "sparse") if getattr(module, name)]
    if wrong:
        options = " and ".join(wrong)
        raise ConfigError(
            f"{full} cannot be split along axis {dim} with {options}: leave the table whole, or that out ({where})"
        )


def require_plain(path: str, module: nn.Module, kind: Kind, where: str) -> None:
    name, extra = (
        type(module).__name__,
        [n for n, p in module._parameters.items() if p is not None and n not in (kind.main, "bias")],
    )
    way = "split it by its outputs, or leave it whole"
    if not computes_as_known(module):
        raise ConfigError(
            f"{path} is a {name} with a forward of its own, and what that adds must come after the sum over the ranks: {way};"
            f" if it adds nothing, register_shardable({name}, Kind(..., product=...)) ({where})"
        )
    if extra:
        more = ", ".join(extra)
        raise ConfigError(
            f"{path} is a {name} with {more} beside {kind.main} and bias, which has no place after the sum: {way} ({where})"
        )


def require_axis(
    change: Callable[[Tensor], Tensor], axis: int, split: int, path: str, where: str
) -> Callable[[Tensor], Tensor]:
    """Wrap ``change`` for a tensor split along ``split``: a call raises ConfigError if it would be joined along another axis (E10)."""

    def checked(x: Tensor) -> Tensor:
        if -x.ndim <= axis < x.ndim and axis % x.ndim != split % x.ndim:
            raise ConfigError(
                f"all_gather at {path}: the result, {list(x.shape)} on each rank, is split along axis {split % x.ndim}, not {axis}"
                f" ({where}, E10)"
            )
        return change(x)

    return checked


def without_fast_paths(model: nn.Module, changed: set[str]) -> None:
    """Disable fast paths of torch's transformer layers around changed modules: in inference they pass the weights to one fused kernel."""
    for path, module in model.named_modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            continue
        if not any(other == path or other.startswith(f"{path}." if path else "") for other in changed):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False
