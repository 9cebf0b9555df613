"""Splits of parameters: along which dim, into which rows of each rank, and the tensors with these rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Split of one parameter."""

    name: str  # of the parameter in the model
    dim: int
    # sizes of the parts along it, each of which is split evenly; None: it is one part
    blocks: tuple[int, ...] | None = None
    heads: int | None = None  # number of heads in the parameter, none of which is cut; None: no heads
    # the last ranks may have fewer rows than the others, and are filled up with padding (vocabularies)
    padded: bool = False
    where: str = ""  # file and line that asked for it
    copies: int = 1  # number of consecutive ranks that have the same head, if there are fewer heads than ranks

    def same_as(self, other: Split) -> bool:
        return (self.dim, self.blocks, self.padded, self.copies) == (
            other.dim,
            other.blocks,
            other.padded,
            other.copies,
        )


@dataclass(frozen=True)
class SplitRequest:
    """Request of a line to split one parameter."""

    axis: int  # dim of the parameter; negative ones count from the end
    blocks: int | Iterable[int] | None = None  # number of equal parts along it, or their sizes; None: one part
    heads: int | None = None  # number of heads in the parameter; None: no heads
    replicas: bool = False  # allow fewer heads than ranks: several ranks have the same one
    padded: bool = False  # the last ranks may have fewer rows (vocabularies)
    where: str = ""  # file and line that asked for it


def make_split(name: str, shape: tuple[int, ...], request: SplitRequest, size: int) -> Split:
    """Check and create the split of one parameter over ``size`` ranks.

    Raises:
        ConfigError: no such dim, parts that do not add up, or parts that the ranks cannot share evenly (E2).
    """
    axis, blocks, heads, where = request.axis, request.blocks, request.heads, request.where
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"{name} {list(shape)} has no axis {axis}: it has {len(shape)} ({where})")
    dim = axis % len(shape)
    parts = _parts(name, shape[dim], blocks, where)
    if heads is not None and heads < 1:
        raise ConfigError(f"{name}: heads must be a positive number, not {heads} ({where}, E2)")
    if request.padded:
        return Split(name, dim, padded=True, where=where)
    copies = size // heads if request.replicas and heads is not None and heads < size and size % heads == 0 else 1
    for part in parts:
        if part % (size // copies):
            raise ConfigError(cannot(name, f"axis {dim}", part, size, where))
        if heads is not None and part % heads:
            raise ConfigError(f"{name}: axis {dim} ({part}) must be a multiple of heads ({heads}) ({where}, E2)")
    if heads is not None and heads % (size // copies):
        raise ConfigError(cannot(name, "heads", heads, size, where))
    return Split(name, dim, None if blocks is None else tuple(parts), heads, False, where, copies)


def _parts(name: str, rows: int, blocks: int | Iterable[int] | None, where: str) -> list[int]:
    if blocks is None:
        return [rows]
    if isinstance(blocks, int) and blocks > rows:  # checked before a list of that length is created
        raise ConfigError(f"{name} has {rows} rows along the axis, which cannot be {blocks} blocks ({where})")
    parts = (
        [rows // blocks] * blocks
        if isinstance(blocks, int) and blocks > 0
        else list(blocks)
        if not isinstance(blocks, int)
        else []
    )
    if sum(parts) != rows or not parts:
        raise ConfigError(f"{name} has {rows} rows along the axis, blocks={blocks} makes {sum(parts)} ({where})")
    return parts


def cannot(name: str, what: str, number: int, size: int, where: str) -> str:
    """Return the message for a number that the ranks cannot share evenly."""
    works = [str(n) for n in range(2, min(number, 64) + 1) if number % n == 0]
    return f"{name}: {what} ({number}) must be a multiple of tp ({size}): tp {', '.join(works) or '1 only'} would work ({where}, E2)"


def collect(splits: Iterable[Split]) -> dict[str, Split]:
    """Return splits by parameter name. Raises ConfigError: a parameter is split twice (E10); names both lines."""
    found: dict[str, Split] = {}
    for split in splits:
        before = found.get(split.name)
        if before is not None:
            how = "in the same way" if before.same_as(split) else f"along {before.dim} and along {split.dim}"
            raise ConfigError(
                f"{split.name} is split twice, {how}: at {before.where} and at {split.where}; leave one out (E10)"
            )
        found[split.name] = split
    return found


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by identity: tied ones have several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def check_tied(model: nn.Module, splits: Mapping[str, Split]) -> None:
    """Raise ConfigError if one of two tied parameters is split and the other is not, or in another way (E9)."""
    for names in names_of(model).values():
        chosen = {name: splits.get(name) for name in names}
        first = chosen[names[0]]
        for name, split in chosen.items():
            if (split is None) != (first is None) or (
                split is not None and first is not None and not split.same_as(first)
            ):
                one, other = (
                    f"{n} is {'split along ' + str(s.dim) if s else 'not split'}"
                    for n, s in ((names[0], first), (name, split))
                )
                raise ConfigError(
                    f"{names[0]} and {name} are one tied parameter, but {one} and {other}: treat both alike (E9)"
                )


def spec_of(split: Split, shape: tuple[int, ...], group: Group) -> ShardSpec:
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
    local = sum(length for _, length in runs)
    return replace(spec, sums=(Sum(0, local, slot, slots),), counted=spec.counted if rank % split.copies == 0 else ())


def take(whole: Tensor, spec: ShardSpec, split: Split, size: int) -> Tensor:
    """Return this rank's part of a tensor, padded with zeros where ranks must have the same number of rows."""
    part = spec.take(whole)
    if split.padded:
        each = -(-whole.shape[split.dim] // size)
        missing = each - part.shape[split.dim]
        part = torch.cat(
            [part, part.new_zeros([*part.shape[: split.dim], missing, *part.shape[split.dim + 1 :]])], split.dim
        )
    return part.detach().clone(memory_format=torch.contiguous_format)


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer, or None."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of the model."""
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = parameter


def replaced(old: nn.Parameter, part: Tensor) -> nn.Parameter:
    """Return a parameter with other contents that is otherwise like the old one, including attributes and hooks."""
    new = nn.Parameter(part, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    new._backward_hooks = (
        old._backward_hooks
    )  # the same dicts, so that handles of hooks registered earlier still remove them
    if (after := getattr(old, "_post_accumulate_grad_hooks", None)) is not None:
        new._post_accumulate_grad_hooks = after
    return new


def split_tensors(model: nn.Module, splits: Mapping[str, Split], group: Group) -> None:
    """Replace each split parameter, under all its names, and each split buffer by this rank's part."""
    for names in names_of(model).values():
        split = splits.get(names[0])
        if split is None:
            continue
        path, _, last = names[0].rpartition(".")
        old = model.get_submodule(path)._parameters[last]
        assert old is not None
        new = replaced(old, take(old.detach(), spec_of(split, tuple(old.shape), group), split, group.size()))
        for name in names:
            put(model, name, new)
    for name, buffer in list(model.named_buffers()):
        if name in splits:
            path, _, last = name.rpartition(".")
            spec = spec_of(splits[name], tuple(buffer.shape), group)
            model.get_submodule(path)._buffers[last] = take(buffer, spec, splits[name], group.size())


def shard_specs(
    model: nn.Module,
    splits: Mapping[str, Split],
    shapes: Mapping[str, tuple[int, ...]],
    partial: Collection[str],
    group: Group,
) -> dict[str, ShardSpec]:
    """Return the specs of all parameters, and of split buffers, by first name.

    Args:
        shapes: of the whole tensors.
        partial: names of parameters that every rank has whole, and whose gradients are partial sums.
    """
    found = {}
    buffers = [name for name, _ in model.named_buffers() if name in splits]
    for name in (*(name for name, _ in model.named_parameters()), *buffers):
        split = splits.get(name)
        if split is not None:
            found[name] = spec_of(split, shapes[name], group)
        else:
            found[name] = ShardSpec.whole(shapes[name], group.rank(), group.size(), summed=name in partial)
    return found
