"""Weights and moments of DeepSpeed's optimizer, located by parameter name: in ZeRO's raw files and in universal ones.

Stages 1 and 2 (and the bf16 optimizer) concatenate all parameters of a group, with the paddings listed in the file, and
split that vector into equal ranges, one for each data parallel rank; the part of the last ranges beyond the end may be
missing in the file:

    | a a a a a b b . c c | c c c c c d d d d d | d d - - - - - - - - |
          rank 0                 rank 1                 rank 2       '.' padding between parameters, '-' beyond the end

Stage 3 splits every parameter on its own into equal parts, the last one padded, and each rank concatenates its parts:

    | a a b c c c d d d d | a a b c c c d d d d | a - - c c - d d d d |

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py :: state_dict (``rigid`` and ``elastic``),
runtime/zero/stage3.py :: _rigid_state_dict, runtime/bf16_optimizer.py :: state_dict; the arithmetic as in
utils/zero_to_fp32.py; checkpoint/universal_checkpoint.py :: load_hp_checkpoint_state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile, attributes_of, require_dtype
from megatron_sp.convert.copies import Store, TensorInfo
from megatron_sp.convert.formats.counters import scale_of_deepspeed, whole
from megatron_sp.convert.formats.deepspeed_files import ModelStates, Shapes, as_dict, number, plain_name
from megatron_sp.convert.formats.megatron_files import WAY_OUT
from megatron_sp.convert.model import KINDS, LossScale
from megatron_sp.utils.errors import CheckpointError

MASTER, MOMENTS = KINDS[0], KINDS[1:]
FILES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}  # of a universal parameter
_ALIGNMENT = 2  # elements that stages 1 and 2 round a rank's range up to
_BLOCK = 4 << 20  # elements that are read at once where a tensor has several parts


@dataclass(frozen=True)
class Stretch:
    """``count`` elements of a tensor in a file, in row-major order, from ``first`` on."""

    record: TensorRecord
    first: int
    count: int

    def read(self) -> Tensor:
        """Return the elements, [count]."""
        record = self.record
        if not is_contiguous(record):
            return record.read().reshape(-1)[self.first : self.first + self.count]
        return record.part(self.first, (self.count,)).read()


@dataclass(frozen=True)
class Stored:
    """A tensor that is the concatenation of stretches."""

    info: TensorInfo
    stretches: tuple[Stretch, ...]

    @classmethod
    def all_of(cls, record: TensorRecord) -> Stored:
        """Describe a tensor of a file."""
        stretch = Stretch(record, 0, torch.Size(record.shape).numel())
        return cls(TensorInfo(record.shape, dtype_of(record)), (stretch,))

    def read(self) -> Tensor:
        """Return the tensor, contiguous."""
        shape, dtype = self.info
        if len(self.stretches) == 1 and self.stretches[0].count == self.stretches[0].record.numel:
            return self.stretches[0].record.read().contiguous().view(shape)
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        for position, block in self.blocks():
            flat[position : position + block.numel()] = block
        return flat.view(shape)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements in order, as (position, [n]) with bounded n."""
        position = 0
        for stretch in self.stretches:
            for first in range(0, stretch.count, _BLOCK):
                count = min(_BLOCK, stretch.count - first)
                yield position, Stretch(stretch.record, stretch.first + first, count).read()
                position += count


@dataclass(frozen=True)
class Share:
    """A tensor parallel rank's share of a parameter that a universal file has in full."""

    record: TensorRecord  # of the full tensor, [rows, ...]
    dim: int  # dim along which the parameter was split
    # (first, count) of the parts, in the order they had on the rank; elements beyond the end are padding
    ranges: tuple[tuple[int, int], ...]

    @property
    def info(self) -> TensorInfo:
        sizes = list(self.record.shape)
        if sizes:
            sizes[self.dim] = sum(count for _, count in self.ranges)
        return TensorInfo(tuple(sizes), dtype_of(self.record))

    @property
    def num_stored(self) -> int:
        """Number of elements that are no padding."""
        shape = self.record.shape
        if self.dim or not shape:
            return math.prod(self.info.shape)
        rows = sum(max(0, min(count, shape[0] - first)) for first, count in self.ranges)
        return rows * math.prod(shape[1:])

    def read(self) -> Tensor:
        """Return the share, with zeros as padding."""
        record, dim, result = self.record, self.dim, torch.zeros(self.info.shape, dtype=self.info.dtype)
        shape, position = record.shape, 0
        if not shape:
            return result.copy_(record.read())
        for first, length in self.ranges:
            count = max(0, min(length, shape[dim] - first))
            if dim:
                part = record.read().narrow(dim, first, count)
            else:  # only the rows that are needed
                offset = record.offset + first * record.stride[0]
                part = replace(record, offset=offset, shape=(count, *shape[1:])).read()
            result.narrow(dim, position, count).copy_(part)
            position += length
        return result


def store_of(stored: Mapping[str, Stored | Share]) -> Store:
    """Return the store of tensors by name."""
    return Store({name: one.info for name, one in stored.items()}, lambda name: stored[name].read())


def is_contiguous(record: TensorRecord) -> bool:
    """Return whether the elements are stored in row-major order without gaps."""
    steps = [math.prod(record.shape[dim + 1 :]) for dim in range(len(record.shape))]
    return all(size == 1 or have == need for size, have, need in zip(record.shape, record.stride, steps, strict=True))


def dtype_of(record: TensorRecord) -> torch.dtype:
    return require_dtype(record.dtype, f"{record.file.path}: a tensor")


@dataclass
class Partition:
    """A rank's optimizer file."""

    path: Path
    stage: int
    count: int  # number of ranks that a group is split over
    flats: dict[str, list[TensorRecord]]  # by kind, the flat tensor of each group
    step: int | None  # number of updates; None: not stated
    # by group and name, (start, count) of this rank's part of a parameter; empty in older files
    fragments: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    # by group, number of padding elements after each parameter; None where there are none
    paddings: list[list[int]] | None = None
    # in stage 3, Adam's second moments of each group, even if moments are not requested; empty where there are none
    squares: list[TensorRecord] = field(default_factory=list)
    loss_scale: LossScale | None = None


def read_partition(path: Path, *, moments: bool) -> Partition:
    where = str(path)
    state = as_dict(as_dict(TorchFile(path).tree, where).get("optimizer_state_dict"), f"{where}, optimizer_state_dict")
    stage = int(number(state.get("zero_stage")) or (3 if "fp32_flat_groups" in state else 1))
    masters = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if stage not in (1, 2, 3) or not isinstance(masters, list) or not masters:
        if stage == 3:
            raise CheckpointError(f"{where} is of stage 3 and has no fp32 weights of it: files of ZeRO 1, 2 and 3 and"
                                  " of the bf16 optimizer are read, with the optimizer in memory (not on NVMe);"
                                  " --no-optimizer does not help, for the weights are in these files")  # fmt: skip
        raise CheckpointError(f"{where} has no fp32 weights (single_partition_of_fp32_groups): it is of another"
                              " optimizer than ZeRO's; move it aside to convert the weights alone")  # fmt: skip
    flats = {MASTER: [_flat(path, item) for item in masters]}
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    states, param_groups = _base_states(base, path)
    if moments:
        flats |= _moments(states, len(masters), path)
    squares = [item for one in states if isinstance(item := one.get(MOMENTS[1]), TensorRecord)]
    if stage != 3 or [flat.numel for flat in squares] != [flat.numel for flat in flats[MASTER]]:
        squares = []
    count = state.get("partition_count")
    counts = [n for item in (count if isinstance(count, list) else [count]) if (n := number(item)) is not None]
    if not counts or max(counts) < 1:
        raise CheckpointError(f"{path} does not say how many ranks its groups are divided over (partition_count): it is"
                              " damaged")  # fmt: skip
    paddings = state.get("param_alignment_paddings")
    lists = paddings if isinstance(paddings, list) else [None]
    small = (isinstance(some, list) and all(isinstance(n, int) and 0 <= n < 4096 for n in some) for some in lists)
    if paddings is not None and not all(small):
        raise CheckpointError(f"{path}: param_alignment_paddings must be lists of small numbers: it is damaged")
    # the number of updates is stored separately (elastic), beside the moments, or in the settings
    settings = (group.get("step") for group in param_groups[:1] if isinstance(group, dict))
    steps = map(whole, (state.get("base_optimizer_state_step"), *(one.get("step") for one in states[:1]), *settings))
    return Partition(
        path, stage, int(max(counts)), flats, next((step for step in steps if step is not None), None),
        _fragments(state.get("param_slice_mappings"), path), paddings, squares,
        scale_of_deepspeed(state.get("loss_scaler")),
    )  # fmt: skip


def gather(
    states: list[ModelStates], paths: dict[int, Path], *, moments: bool
) -> tuple[Partition, dict[str, dict[str, Stored]]]:
    """Locate every parameter of a model parallel rank: return its first file, and its tensors by kind and name."""
    ranks = [read_partition(paths[rank], moments=moments) for rank in sorted(paths)]
    first = ranks[0]
    if first.count != len(ranks):
        raise CheckpointError(f"{first.path} is one of {first.count} files of data parallel ranks, and {len(ranks)} are"
                              " there: files are missing, or left over from another save")  # fmt: skip
    for other in ranks[1:]:
        for what in ("stage", "count", "step", "paddings"):
            if getattr(first, what) != getattr(other, what):
                raise CheckpointError(f"{other.path}: its {what} is {getattr(other, what)}, that of {first.path.name}"
                                      f" is {getattr(first, what)}: they are of different saves")  # fmt: skip
        groups = [{kind: len(flats) for kind, flats in rank.flats.items()} for rank in (first, other)]
        if groups[0] != groups[1]:
            raise CheckpointError(f"{other.path} and {first.path.name} do not have the same groups of parameters: they"
                                  " are of different saves")  # fmt: skip
    locate = _stage_3 if first.stage == 3 else _stage_1 if states[0].groups else _by_fragments
    tensors = {kind: dict(locate(ranks, kind, states[0])) for kind in first.flats}
    if first.stage == 3:
        tensors[MASTER] |= dict(_frozen(states))
        if all(rank.squares for rank in ranks):
            require_padding(ranks, states[0].shapes)
    for name, original in states[0].shared.items():
        for by_name in tensors.values():
            if original in by_name:
                by_name[name] = by_name[original]
    return first, tensors


def _stage_1(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    # In equal ranges of the parameters' concatenation. The ranks' own lists (param_slice_mappings) are only used if the
    # model states have no shapes: DeepSpeed 0.19.8 writes them in the order of the model even where
    # round_robin_gradients has reordered the parameters. Weights from the wrong position differ from the model's own
    # weights, which is checked when they are read.
    groups = len(ranks[0].flats[MASTER])
    if len(states.groups) != groups:
        raise CheckpointError(f"{states.path} has {len(states.groups)} groups of parameters, {ranks[0].path.name} has"
                              f" {groups}: they are of different saves")  # fmt: skip
    for index, shapes in enumerate(states.groups):
        flats = [rank.flats[kind][index] for rank in ranks]
        paddings = ranks[0].paddings[index] if ranks[0].paddings else [0] * len(shapes)
        if len(paddings) != len(shapes):
            raise CheckpointError(f"{ranks[0].path} has {len(paddings)} paddings for {len(shapes)} parameters: it is"
                                  " damaged")  # fmt: skip
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            parts = list(_ranges(flats, start, math.prod(shape), name))
            stretches = tuple(Stretch(flats[rank], first, count) for rank, first, count in parts)
            yield name, Stored(TensorInfo(shape, dtype_of(flats[0])), stretches)
            start += math.prod(shape) + padding
        unit, length = _ALIGNMENT * len(flats), sum(flat.numel for flat in flats)
        if -(-start // unit) != -(-length // unit):
            raise CheckpointError(f"{flats[0].file.path} and the files of the other ranks have {length:,} elements, its"
                                  f" parameters need {start:,} (rounded up to {unit}): they are of another save than"
                                  " the model states")  # fmt: skip


def _ranges(flats: list[TensorRecord], at: int, count: int, name: str) -> Iterator[tuple[int, int, int]]:
    # (rank, first, count) from ``at`` on; all ranks before the last non-empty one have equal ranges
    size = flats[0].numel
    while count:
        rank = min(at // size, len(flats) - 1) if size else len(flats) - 1
        first = at - rank * size
        take = min(count, flats[rank].numel - first)
        if take <= 0:
            raise CheckpointError(f"{flats[rank].file.path} ends before {name} does: it is cut short, or of another"
                                  " save than the model states")  # fmt: skip
        yield rank, first, take
        at, count = at + take, count - take


def _by_fragments(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    # for model states without shapes (bf16 without ZeRO): by the ranks' own lists and the 16-bit weights
    if not any(rank.fragments for rank in ranks):
        raise CheckpointError(f"{states.path} has no param_shapes and {ranks[0].path.name} no param_slice_mappings:"
                              " which parameters are in the optimizer's files cannot be told; move them aside to"
                              " convert the weights alone")  # fmt: skip
    for index in range(len(ranks[0].flats[MASTER])):
        by_name: dict[str, list[Stretch]] = {}
        for rank in ranks:
            flat = rank.flats[kind][index]
            for name, (first, count) in (rank.fragments[index] if index < len(rank.fragments) else {}).items():
                if first + count > flat.numel:
                    raise CheckpointError(f"{flat.file.path} ends before {name} does: it is cut short")
                by_name.setdefault(name, []).append(Stretch(flat, first, count))
        for name, stretches in by_name.items():
            shape, numel = states.module[name].shape if name in states.module else None, sum(s.count for s in stretches)
            if shape is None or math.prod(shape) != numel:
                raise CheckpointError(f"{stretches[0].record.file.path} has {numel:,} elements of {name}, which is"
                                      f" {shape} in {states.path.name}")  # fmt: skip
            yield name, Stored(TensorInfo(shape, dtype_of(stretches[0].record)), tuple(stretches))


def _stage_3(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    # equal parts of each parameter, concatenated on every rank over its groups as if they were one
    start = 0
    for name, shape in states.shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        stretches: list[Stretch] = []
        for index, rank in enumerate(ranks):
            stretches += _across(rank.flats[kind], start, max(0, min(part, numel - index * part)), name)
        flat = ranks[0].flats[kind][0]
        yield name, Stored(TensorInfo(shape, dtype_of(flat)), tuple(stretches))
        start += part
    for rank in ranks:
        if start != (length := sum(flat.numel for flat in rank.flats[kind])):
            raise CheckpointError(f"{rank.path} has {length:,} elements of its parts of the parameters, {start:,} are"
                                  " needed: it is of another save than the model states")  # fmt: skip


def _across(flats: list[TensorRecord], at: int, count: int, name: str) -> Iterator[Stretch]:
    for flat in flats:
        if count and at < flat.numel:
            take = min(count, flat.numel - at)
            yield Stretch(flat, at, take)
            at, count = at + take, count - take
        at = max(0, at - flat.numel) if count else 0
    if count:
        raise CheckpointError(f"{flats[0].file.path} ends before {name} does: it is cut short, or of another save than"
                              " the model states")  # fmt: skip


def _frozen(states: list[ModelStates]) -> Iterator[tuple[str, Stored]]:
    # stage 3 keeps a part of each frozen parameter in the model states of every rank
    for name, shape in states[0].frozen_shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(states))
        stretches = []
        for index, state in enumerate(states):
            record = state.frozen_parts.get(name)
            if record is None or math.prod(record.shape) != part:
                raise CheckpointError(f"{state.path} has {record.shape if record else 'nothing'} of {name}, {part:,}"
                                      " elements are needed")  # fmt: skip
            stretches.append(Stretch(record, 0, max(0, min(part, numel - index * part))))
        yield name, Stored(TensorInfo(shape, dtype_of(stretches[0].record)), tuple(stretches))


def _flat(path: Path, item: Any) -> TensorRecord:
    if not isinstance(item, TensorRecord):
        raise CheckpointError(f"{path}: a group of the optimizer is {type(item).__name__} where a tensor should be: it"
                              " is damaged")  # fmt: skip
    return item


def _base_states(base: Any, path: Path) -> tuple[list[dict[Any, Any]], list[Any]]:
    # the state of each group and the settings, from a list (``elastic``) or a state dict of torch (``rigid``)
    if base is None:
        return [], []
    if isinstance(base, list):
        return [as_dict(item, f"{path}, base_optimizer_state") for item in base], []
    base = as_dict(base, f"{path}, base_optimizer_state")
    by_index = as_dict(base.get("state", {}), f"{path}, the optimizer's state")
    groups = base.get("param_groups")
    if not all(isinstance(key, int) for key in by_index):
        raise CheckpointError(f"{path}: the optimizer's state is not by numbers of its groups: it is damaged")
    ordered = [as_dict(by_index[key], f"{path}, the optimizer's state") for key in sorted(by_index)]
    return ordered, groups if isinstance(groups, list) else []


def _moments(states: list[dict[Any, Any]], groups: int, path: Path) -> dict[str, list[TensorRecord]]:
    if not states or not any(state for state in states):
        return {}
    if len(states) != groups:
        raise CheckpointError(f"{path} has the optimizer's state of {len(states)} groups of {groups}: --no-optimizer"
                              " takes the rest")  # fmt: skip
    for state in states:
        tensors = sorted(str(key) for key, value in state.items() if isinstance(value, TensorRecord) and value.shape)
        if tensors != sorted(MOMENTS):
            raise CheckpointError(f"{path}: its optimizer keeps {', '.join(tensors) or 'nothing'}, and only Adam's"
                                  f" {' and '.join(MOMENTS)} can be converted: --no-optimizer takes the weights"
                                  " alone")  # fmt: skip
    return {kind: [_flat(path, state[kind]) for state in states] for kind in MOMENTS}


def _fragments(value: Any, path: Path) -> list[dict[str, tuple[int, int]]]:
    fragments = []
    for group in value if isinstance(value, list) else []:
        by_name = {}
        for name, item in as_dict(group, f"{path}, param_slice_mappings").items():
            attributes = attributes_of(item)
            start, count = attributes.get("start"), attributes.get("numel")
            if not (isinstance(start, int) and isinstance(count, int) and start >= 0 and count >= 0):
                raise CheckpointError(f"{path}: param_slice_mappings has {str(item)[:100]} where a start and a number"
                                      " should be: it is damaged")  # fmt: skip
            by_name[plain_name(str(name))] = start, count
        fragments.append(by_name)
    return fragments


# An optimizer's file of stage 3 does not contain its rank, all have the same shapes, and there are no other weights to
# compare them with. Evidence that files belong to the ranks in their names:
#
#     the arguments of the run, in the model states    their ``rank`` increases with the number of the file
#     devices of the tensors (cuda:3)                  a rank's two files come from one process, and so from one device
#     the end of a parameter that is split unevenly    is padding on the last ranks, which never gets a gradient
#
# Files exchanged with those of another host are not detected, unless a parameter is split unevenly: they leave no
# trace. Source: deepspeed 0.19.8, runtime/zero/stage3.py :: partition_grads; Megatron-DeepSpeed, arguments.py
# (args.rank).
def require_devices(models: Mapping[int, Path], optimizers: Mapping[int, Path]) -> None:
    """Refuse an optimizer's file from another device than its rank's model states."""
    for dp in models.keys() & optimizers.keys():
        of_model, of_optimizer = (TorchFile(paths[dp]).devices for paths in (models, optimizers))
        if of_model and of_optimizer and not of_model & of_optimizer:
            raise CheckpointError(f"{optimizers[dp]} has tensors of {', '.join(sorted(of_optimizer))}, and"
                                  f" {models[dp].name} of {', '.join(sorted(of_model))}, which are one rank's by their"
                                  f" names: {WAY_OUT}")  # fmt: skip


def require_padding(ranks: list[Partition], shapes: Shapes) -> None:
    """Refuse files with moments where their rank has padding, if another rank's file would fit there.

    The second condition keeps files of unusual optimizers readable, which do update padding.
    """
    count = len(ranks)

    def has_zeros(rank: int, gaps: list[tuple[int, int]]) -> bool:
        stretches = (s for position, length in gaps for s in _across(ranks[rank].squares, position, length, "padding"))
        return not any(stretch.read().count_nonzero() for stretch in stretches)

    for rank in range(count - 1, 0, -1):
        start, gaps = 0, []  # (position, length) of padding in the concatenated parts of the rank
        for shape in shapes.values():
            numel = math.prod(shape)
            part = -(-numel // count)
            real = max(0, min(part, numel - rank * part))
            gaps += [(start + real, part - real)] if real < part else []
            start += part
        if not gaps or has_zeros(rank, gaps):
            continue
        for other in range(rank - 1, -1, -1):
            if has_zeros(other, gaps):
                raise CheckpointError(f"{ranks[rank].path} has moments where the data parallel rank {rank} of {count}"
                                      f" has nothing but padding, and {ranks[other].path.name} has none:"
                                      f" {WAY_OUT}")  # fmt: skip


# zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt contain {"param": tensor} and how the tensor parallel shares were
# merged: cat_dim, concatenated along it; with param_n_sub_params 2, gate and up each on their own; with
# sub_param_shape, each block of rows on its own; none of these, all were the same. vocab_tensor: padding rows were
# removed. From stage 3 the files contain bare tensors without a shape, which is then in the model states.
def read_parameter(path: Path, shape: tuple[int, ...] | None, tp: int, vocab_rows: int | None) -> list[Share]:
    """Return the shares of all tensor parallel ranks in a file.

    ``shape`` is that of one rank, ``vocab_rows`` the padded rows of all; None: the model states do not say.
    """
    tree = TorchFile(path).tree
    if isinstance(tree, TensorRecord):
        if tp != 1 or (shape is None and len(tree.shape) == 1):
            raise CheckpointError(f"{path} is a tensor without a word on its shape: the model states beside it must"
                                  " have param_shapes of one rank")  # fmt: skip
        shape = tree.shape if shape is None else shape
        if math.prod(shape) != tree.numel or not is_contiguous(tree):
            raise CheckpointError(f"{path} has {tree.numel:,} elements, {list(shape)} are {math.prod(shape):,}: it is"
                                  " damaged")  # fmt: skip
        return [Share(tree.part(0, tuple(shape)), 0, ((0, shape[0] if shape else 1),))]
    tree = as_dict(tree, str(path))
    record = tree.get("param")
    if not isinstance(record, TensorRecord):
        raise CheckpointError(f"{path} has no tensor 'param', which files of universal checkpoints have: it is damaged")
    if tree.get("is_expert_param") or tree.get("ep_num_experts"):
        raise CheckpointError(f"{path} is of a mixture of experts, which cannot be converted: there is no such model"
                              " here")  # fmt: skip
    is_cut = any(name in tree for name in ("cat_dim", "sub_param_shape", "vocab_tensor"))
    if is_cut and (not record.shape or shape == ()):
        raise CheckpointError(f"{path} has one number that ranks are said to share: it is damaged")
    if not is_cut or (tp == 1 and not tree.get("vocab_tensor")):
        return [Share(record, 0, ((0, record.shape[0] if record.shape else 1),))] * tp
    if "sub_param_shape" in tree or not tree.get("vocab_tensor"):
        dim, sizes = _blocks(path, tree, record)
    elif shape is not None:
        dim, sizes = 0, [shape[0] * tp]
    else:
        dim, sizes = 0, [vocab_rows if vocab_rows is not None else -(-record.shape[0] // tp) * tp]
    if any(size % tp for size in sizes):
        raise CheckpointError(f"{path}: parts of {sizes} are not divided evenly by {tp} tensor parallel ranks: such a"
                              " layout is not known here")  # fmt: skip
    shares = []
    for rank in range(tp):
        counts = [size // tp for size in sizes]
        ranges = ((sum(sizes[:i]) + rank * count, count) for i, count in enumerate(counts))
        shares.append(Share(record, dim, tuple(ranges)))
    return shares


def _blocks(path: Path, tree: dict[Any, Any], record: TensorRecord) -> tuple[int, list[int]]:
    # the dim along which a parameter was split, and the sizes of the blocks that were split each on its own
    if "sub_param_shape" not in tree:
        dim, count = tree.get("cat_dim"), tree.get("param_n_sub_params", 1)
        if not isinstance(dim, int) or not 0 <= dim < len(record.shape):
            raise CheckpointError(f"{path}: cat_dim is {str(dim)[:50]} of a tensor {list(record.shape)}: it is damaged")
        if not isinstance(count, int) or not 1 <= count <= 64 or record.shape[dim] % count:
            raise CheckpointError(f"{path}: {str(count)[:50]} equal parts of {list(record.shape)} along dim {dim} are"
                                  " not possible: it is damaged")  # fmt: skip
        return dim, [record.shape[dim] // count] * count
    # SubparamShape(patterns, shape, partition_dim): its shape contains the sizes of the blocks
    attributes = attributes_of(tree["sub_param_shape"])
    dim, shape = attributes.get("partition_dim"), attributes.get("shape")
    if isinstance(dim, int) and isinstance(shape, tuple) and 0 <= dim < min(len(shape), len(record.shape)):
        sizes = [shape[dim]] if isinstance(shape[dim], int) else shape[dim] if isinstance(shape[dim], tuple) else []
        if all(isinstance(size, int) and size > 0 for size in sizes) and sum(sizes) == record.shape[dim]:
            return dim, list(sizes)
    raise CheckpointError(f"{path}: sub_param_shape is {str(attributes)[:200]} of a tensor {list(record.shape)}: it"
                          " cannot be taken apart")  # fmt: skip
