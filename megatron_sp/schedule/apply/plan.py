"""Plan of the parameters that are split, along which dims and into which rows; checked on the whole model."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from megatron_sp.comm.groups import Group
from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.schedule.core.directives import Directive, Mesh, expand
from megatron_sp.schedule.core.kinds import Kind, find_kind, kind_of
from megatron_sp.utils.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ApplyJob:
    model: nn.Module  # changed in place, phase by phase
    directives: list[Directive]  # the lines, in the order in which they were written
    mesh: Mesh
    seq_dim: int  # the dim of activations that runs over positions

    @property
    def tp_size(self) -> int:
        return self.mesh.tp.size()

    def each(self, *kinds: str) -> Iterator[tuple[Directive, str, nn.Module]]:
        """Yield (line, path, module) for lines of these kinds; a module with several names once, under the first."""
        for line in self.directives:
            if line.do in kinds:
                modules = {path: self.model.get_submodule(path) for path in expand(self.model, line.on)}
                first = {id(module): path for path, module in reversed(modules.items())}
                yield from ((line, path, module) for path, module in modules.items() if first[id(module)] == path)


@dataclass(frozen=True)
class Split:
    name: str  # of the parameter in the model
    dim: int
    blocks: Shape | None = None  # sizes of the parts along it, each of which is split evenly; None: it is one part
    padded: bool = False  # the last ranks may have fewer rows, and are filled up with zeros (vocabularies)
    where: str = ""  # file and line that asked for it
    copies: int = 1  # number of consecutive ranks that have the same head, if there are fewer heads than ranks

    def way(self) -> tuple[object, ...]:  # equal for parameters that are split alike
        return self.dim, self.blocks, self.padded, self.copies


@dataclass(frozen=True)
class SplitPlan:
    """Splits, and facts about the whole model that later phases need."""

    splits: dict[str, Split]  # by name, under all names of tied parameters
    hooked: frozenset[int]  # modules with hooks of the user's, by identity
    shapes: dict[str, Shape]  # of all whole parameters, and of whole buffers that are split, by name
    # attributes that count what is split (groups, channels), by (id of module, name)
    counts: dict[tuple[int, str], int]

    def is_split(self, path: str, kind: Kind, dims: Mapping[str, int]) -> bool:
        split = self.splits.get(joined(path, kind.main))
        return split is not None and split.dim == dims.get(kind.main, -1)

    def sums_itself(self, path: str, module: nn.Module) -> bool:
        """Return whether a layer split by rows sums; an embedding with hooks of the user's does not."""
        kind = find_kind(module)
        leaves_it = isinstance(module, nn.Embedding) and id(module) in self.hooked
        return kind is not None and not leaves_it and self.is_split(path, kind, kind.in_dims)


def plan_splits(job: ApplyJob) -> SplitPlan:
    """Plan the splits that lines ask for. Raises ConfigError: they are impossible, or contradict each other."""
    model, splits = job.model, dict[str, Split]()
    for line, path, module in job.each("shard", "column", "row", "vocab_parallel"):
        for split in _splits_of_line(job, line, path, module):
            before = splits.get(split.name)
            if before is not None:
                how = "in the same way" if before.way() == split.way() else f"along {before.dim} and along {split.dim}"
                places = f"at {before.where} and at {split.where}"
                raise ConfigError(f"{split.name} is split twice, {how}: {places}; leave one out (E10)")
            splits[split.name] = split
    for names in names_of(model).values():
        _treat_alike(model, splits, names)
    hooked = frozenset(id(module) for _, _, module in job.each("hook"))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    shapes |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in splits}
    counts: dict[tuple[int, str], int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kind = find_kind(module)
        if kind is None:
            continue
        counts |= {(id(module), name): getattr(module, name) for name in kind.divided}
        outputs = {name: dim for name, dim in kind.out_dims.items() if tensor_of(module, name) is not None}
        along = [s for name, dim in outputs.items() if (s := splits.get(joined(path, name))) and s.dim == dim]
        if missing := [n for n in outputs if along and not any(s.name == joined(path, n) for s in along)]:
            name, other, dim = along[0].name, joined(path, missing[0]), outputs[missing[0]]
            add = f'.shard("{missing[0]}", axis={dim}), or use .column()'
            what = f"{name} is split along its outputs and {other} is not"
            raise ConfigError(f"{what} ({along[0].where}): add {add} (E4)")
    return SplitPlan(splits, hooked, shapes, counts)


def _splits_of_line(job: ApplyJob, line: Directive, path: str, module: nn.Module) -> Iterator[Split]:
    if line.do == "shard":
        axes = {line.args["tensor"]: line.args["axis"]}
    else:
        kind, name, where = kind_of(module, path), type(module).__name__, line.where
        main, is_table = tensor_of(module, kind.main), isinstance(module, nn.Embedding)
        if main is None:
            raise ConfigError(no_parameter(path, module, kind.main, where))
        if line.do == "row" and kind.product is None:
            raise ConfigError(f"{path} is a {name}, which cannot be split by rows ({where})")
        is_head = kind.product is not None and kind.main == "weight" and main.ndim == 2
        if line.do == "vocab_parallel" and not is_table and not is_head:
            it_is_for = "vocab_parallel is for an embedding, or the layer over the vocabulary"
            raise ConfigError(f"{path} is a {name}: {it_is_for} ({where})")
        axes = kind.in_dims if line.do == "row" or (line.do == "vocab_parallel" and is_table) else kind.out_dims
        axes = {name: axis for name, axis in axes.items() if tensor_of(module, name) is not None}
    for name, axis in axes.items():
        tensor = tensor_of(module, name)
        if tensor is None:
            raise ConfigError(no_parameter(path, module, name, line.where))
        _require_splittable(joined(path, name), path, module, name, axis, job.tp_size, line.where)
        yield _make_split(joined(path, name), tuple(tensor.shape), axis, line, job.tp_size)


def _require_splittable(full: str, path: str, module: nn.Module, name: str, axis: int, size: int, where: str) -> None:
    tensor, kind, cls = tensor_of(module, name), find_kind(module), type(module).__name__
    if tensor is not None and is_lazy(tensor):
        call = "call it with a batch first, then schedule"
        raise ConfigError(f"{full} has no shape before the model has run: {call} ({where})")
    if kind is None or tensor is None or not -tensor.ndim <= axis < tensor.ndim:
        return
    if kind.refusal is not None:
        raise ConfigError(f"{path} is a {cls}, which cannot be split: {kind.refusal} ({where})")
    dim, sides = axis % tensor.ndim, ((kind.out_dims.get(name), "outputs"), (kind.in_dims.get(name), "inputs"))
    known = {d: what for d, what in sides if d is not None}
    if known and dim not in known:
        only = " and ".join(f"{d} ({what})" for d, what in known.items())
        raise ConfigError(f"{full}: axis {axis} of a {cls} cannot be split, only {only} ({where})")
    if size == 1:
        return
    for attribute in kind.divided:
        if (count := int(getattr(module, attribute))) % size:
            raise ConfigError(_cannot(full, attribute, count, size, where))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        wrong = [] if module.max_norm is None else [f"max_norm={module.max_norm}"]
        wrong += [option for option in ("scale_grad_by_freq", "sparse") if dim == 0 and getattr(module, option)]
        if wrong:
            out = "leave the table whole, or that out"
            raise ConfigError(f"{full} cannot be split along axis {dim} with {' and '.join(wrong)}: {out} ({where})")


def _make_split(name: str, shape: Shape, axis: int, line: Directive, size: int) -> Split:
    blocks, heads, where = line.args.get("blocks"), line.args.get("heads"), line.where
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"{name} {list(shape)} has no axis {axis}: it has {len(shape)} ({where})")
    dim = axis % len(shape)
    rows = shape[dim]
    if isinstance(blocks, int) and blocks > rows:  # checked before a list of that length is created
        raise ConfigError(f"{name} has {rows} rows along the axis, which cannot be {blocks} blocks ({where})")
    if isinstance(blocks, int):
        parts = [rows // blocks] * blocks if blocks > 0 else []
    else:
        parts = [rows] if blocks is None else list(blocks)
    if sum(parts) != rows or not parts:
        raise ConfigError(f"{name} has {rows} rows along the axis, blocks={blocks} makes {sum(parts)} ({where})")
    if heads is not None and heads < 1:
        raise ConfigError(f"{name}: heads must be a positive number, not {heads} ({where}, E2)")
    if line.do == "vocab_parallel":
        return Split(name, dim, padded=True, where=where)
    few = heads is not None and bool(line.args.get("replicas")) and heads < size and size % heads == 0
    copies = size // heads if heads is not None and few else 1  # consecutive ranks with the same head
    for part in parts:
        if part % (size // copies):
            raise ConfigError(_cannot(name, f"axis {dim}", part, size, where))
        if heads is not None and part % heads:
            raise ConfigError(f"{name}: axis {dim} ({part}) must be a multiple of heads ({heads}) ({where}, E2)")
    if heads is not None and heads % (size // copies):
        raise ConfigError(_cannot(name, "heads", heads, size, where))
    return Split(name, dim, None if blocks is None else tuple(parts), False, where, copies)


def _cannot(name: str, what: str, number: int, size: int, where: str) -> str:
    works = ", ".join(str(n) for n in range(2, min(number, 64) + 1) if number % n == 0) or "1 only"
    return f"{name}: {what} ({number}) must be a multiple of tp ({size}): tp {works} would work ({where}, E2)"


def _treat_alike(model: nn.Module, splits: dict[str, Split], names: list[str]) -> None:
    # split a parameter under all its names. Raises ConfigError: another layer computes with it and is not split so (E9)
    chosen = [splits[name] for name in names if name in splits]
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    for name in names if chosen else ():
        computes = find_kind(owners[name]) is not None
        if name not in splits and (not computes or any(owners[name] is owners[split.name] for split in chosen)):
            splits[name] = replace(chosen[0], name=name)
    first = splits.get(names[0])
    for name in names[1:]:
        split = splits.get(name)
        if split is first or (first is not None and split is not None and split.way() == first.way()):
            continue
        of = {n: f"split along {s.dim}" if s else "not split" for n, s in ((names[0], first), (name, split))}
        words = f"but {names[0]} is {of[names[0]]} and {name} is {of[name]}: treat both alike"
        raise ConfigError(f"{names[0]} and {name} are one tied parameter, {words} (E9)")


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def no_parameter(path: str, module: nn.Module, name: str, where: str) -> str:
    known = [n for named in (module.named_parameters, module.named_buffers) for n, _ in named()]
    own = [n for n, p in (*module._parameters.items(), *module._buffers.items()) if p is not None]
    near = difflib.get_close_matches(name, known, 3, 0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if is_parametrized(module, name):
        by = type(module.parametrizations[name][0]).__name__  # type: ignore[index,union-attr]
        inside = f"{path}.parametrizations.{name}".lstrip(".")
        hint = f"; {name} is computed by {by}: shard what it is computed from, in {inside},"
        hint += f" if each share of that makes a share of {name}, or leave it whole"
    has = f"it has {', '.join(own) or 'none'}{hint}"
    return f"{path or 'the model'} has no parameter {name!r}: {has} ({where}, E1)"


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by identity: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer, or None."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of the model."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[last] = tensor
    else:
        owner._buffers[last] = tensor


def replaced(old: nn.Parameter, part: Tensor) -> nn.Parameter:
    """Return a parameter with other contents, and the attributes and hooks of the old one."""
    new = nn.Parameter(part, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    new._backward_hooks = old._backward_hooks  # the same dicts: handles of earlier hooks still remove them
    if (after := getattr(old, "_post_accumulate_grad_hooks", None)) is not None:
        new._post_accumulate_grad_hooks = after
    return new


def take(whole: Tensor, spec: ShardSpec, split: Split, size: int) -> Tensor:
    """Return this rank's part of a tensor, padded with zeros where ranks must have the same number of rows."""
    part = spec.take(whole)
    if split.padded:
        padding = list(part.shape)
        padding[split.dim] = -(-whole.shape[split.dim] // size) - part.shape[split.dim]
        part = torch.cat([part, part.new_zeros(padding)], split.dim)
    return part.detach().clone(memory_format=torch.contiguous_format)


def split_tensors(model: nn.Module, splits: Mapping[str, Split], group: Group) -> None:
    def part_of(name: str, whole: Tensor) -> Tensor:
        return take(whole, _spec(splits[name], tuple(whole.shape), group), splits[name], group.size())

    for names in names_of(model).values():
        if names[0] in splits:
            old = model.get_parameter(names[0])
            new = replaced(old, part_of(names[0], old.detach()))
            for name in names:
                put(model, name, new)
    for name, buffer in list(model.named_buffers()):
        if name in splits:
            put(model, name, part_of(name, buffer))


def shard_specs(model: nn.Module, plan: SplitPlan, partial: Collection[str], group: Group) -> dict[str, ShardSpec]:
    """Return where this rank's parameters and split buffers lie in the whole ones, by first name.

    ``partial``: whole parameters whose gradients are partial sums.
    """
    specs = {}
    buffers = [name for name, _ in model.named_buffers() if name in plan.splits]
    for name in (*(name for name, _ in model.named_parameters()), *buffers):
        if (split := plan.splits.get(name)) is not None:
            specs[name] = _spec(split, plan.shapes[name], group)
        else:
            specs[name] = ShardSpec.whole(plan.shapes[name], group.rank(), group.size(), summed=name in partial)
    return specs


def _spec(split: Split, shape: Shape, group: Group) -> ShardSpec:
    size, rank, rows = group.size(), group.rank(), shape[split.dim]
    if split.padded:
        each = -(-rows // size)
        first = min(rows, rank * each)
        return ShardSpec.split(shape, split.dim, ((first, min(rows, first + each) - first),))
    runs, start = [], 0
    slot, slots = rank // split.copies, size // split.copies
    for part in split.blocks or (rows,):
        runs.append((start + slot * (part // slots), part // slots))
        start += part
    spec = ShardSpec.split(shape, split.dim, tuple(runs))
    if split.copies == 1:
        return spec
    # ranks with the same head sum their gradients among them, and one of them counts
    local, counted = sum(length for _, length in runs), spec.counted if rank % split.copies == 0 else ()
    return replace(spec, sums=(Sum(0, local, slot, slots),), counted=counted)
