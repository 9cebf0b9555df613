"""Weights and moments in the optimizer files of ZeRO, found again by name.

Stages 1 and 2 (and the bf16 optimizer) lay all parameters of a group end to end, with the paddings that the file names, and cut that
vector into equal ranges, one for each data parallel rank; what the last ranges have beyond the end may be left out of the file:

    | a a a a a b b . c c | c c c c c d d d d d | d d - - - - - - - - |      '.' padding between parameters, '-' beyond the end
          rank 0                 rank 1                 rank 2

Stage 3 cuts every parameter for itself into equal parts, the last one padded, and each rank lays its parts end to end:

    | a a b c c c d d d d | a a b c c c d d d d | a - - c c - d d d d |

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py :: state_dict (``rigid`` and ``elastic``), runtime/zero/stage3.py ::
_rigid_state_dict, runtime/bf16_optimizer.py :: state_dict; the arithmetic as in utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.convert.archive.pickle_tree import Object, TensorRecord
from megatron_sp.convert.formats.counters import scale_of_deepspeed, whole
from megatron_sp.convert.formats.deepspeed_files import Files, Stored, Stretch, dtype_of
from megatron_sp.convert.formats.deepspeed_owners import require_padding
from megatron_sp.convert.formats.deepspeed_states import ModelStates, as_dict, number, plain_name
from megatron_sp.convert.model import KINDS, LossScale
from megatron_sp.utils.errors import CheckpointError

MASTER, MOMENTS = KINDS[0], KINDS[1:]
_ALIGNMENT = 2  # elements that stages 1 and 2 round a rank's range up to


class Flat(NamedTuple):
    """What a rank keeps of a group."""

    path: Path
    record: TensorRecord

    @property
    def numel(self) -> int:
        return math.prod(self.record.shape)


@dataclass
class Partition:
    """A rank's optimizer file.

    Attributes:
        flats: by kind, what it keeps of each group.
        step: updates so far, or None where it is not said.
        fragments: by group and name, (start, count) of what this rank has of a parameter; absent in older files.
        paddings: by group, elements behind each parameter; absent where there are none.
        count: ranks that a group is divided over.
        squares: of stage 3, Adam's second moments of each group, wanted or not; none where there are none.
    """

    path: Path
    stage: int
    count: int
    flats: dict[str, list[Flat]]
    step: int | None
    fragments: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    paddings: list[list[int]] | None = None
    squares: list[Flat] = field(default_factory=list)
    loss_scale: LossScale | None = None


@dataclass
class ZeroTensors:
    """By kind and the parameter's own name, what all data parallel ranks have together."""

    tensors: dict[str, dict[str, Stored]]
    step: int | None
    loss_scale: LossScale | None


def read_partition(files: Files, path: Path, *, moments: bool) -> Partition:
    """Look at a rank's file.

    Args:
        moments: those are wanted too.
    Raises:
        CheckpointError: it is not a file of ZeRO, or its optimizer keeps something else than Adam's two moments.
    """
    where = str(path)
    state = as_dict(as_dict(files.tree(path), where).get("optimizer_state_dict"), f"{where}, optimizer_state_dict")
    stage = int(number(state.get("zero_stage")) or (3 if "fp32_flat_groups" in state else 1))
    masters = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if stage not in (1, 2, 3) or not isinstance(masters, list) or not masters:
        raise CheckpointError(
            f"{where} is of stage {stage} and has no fp32 weights of it: files of ZeRO 1, 2 and 3 and of the bf16 optimizer are read, with"
            " the optimizer in memory (not on NVMe); --no-optimizer does not help, for the weights are in these files"
            if stage == 3
            else f"{where} has no fp32 weights (single_partition_of_fp32_groups): it is of another optimizer than ZeRO's; move it aside to"
            " convert the weights alone"
        )
    flats = {MASTER: [_flat(path, item) for item in masters]}
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    states, param_groups = _base_states(base, path)
    if moments:
        flats |= _moments(states, len(masters), path)
    return Partition(
        path, stage, _count(state.get("partition_count"), path), flats, _step(files, path, state, states, param_groups),
        _fragments(state.get("param_slice_mappings"), path), _paddings(state.get("param_alignment_paddings"), path),
        _squares(states, flats[MASTER], path) if stage == 3 else [], scale_of_deepspeed(state.get("loss_scaler")),
    )  # fmt: skip


def gather(files: Files, states: list[ModelStates], paths: dict[int, Path], *, moments: bool) -> ZeroTensors:
    """Find every parameter of a model parallel rank.

    Args:
        states: in stage 3 of every data parallel rank, else of the one that there is.
        paths: the optimizer files by data parallel rank.
    Raises:
        CheckpointError: files are missing, or of different saves, or do not fit each other.
    """
    ranks = [read_partition(files, paths[rank], moments=moments) for rank in sorted(paths)]
    _require_alike(ranks)
    of = _stage_3 if ranks[0].stage == 3 else _stage_1
    tensors = {kind: dict(of(ranks, kind, states[0])) for kind in ranks[0].flats}
    if ranks[0].stage == 3:
        tensors[MASTER] |= dict(_frozen(states))
        if all(rank.squares for rank in ranks):
            require_padding(files, [[Stored.whole(*flat) for flat in rank.squares] for rank in ranks], states[0].shapes)
    for name, original in states[0].shared.items():
        for found in tensors.values():
            if original in found:
                found[name] = found[original]
    return ZeroTensors(tensors, ranks[0].step, ranks[0].loss_scale)


def _require_alike(ranks: list[Partition]) -> None:
    first = ranks[0]
    if first.count != len(ranks):
        raise CheckpointError(f"{first.path} is one of {first.count} files of data parallel ranks, and {len(ranks)} are there: files are"
                              " missing, or left over from another save")  # fmt: skip
    for other in ranks[1:]:
        for what in ("stage", "count", "step", "paddings"):
            if getattr(first, what) != getattr(other, what):
                raise CheckpointError(f"{other.path}: its {what} is {getattr(other, what)}, that of {first.path.name} is"
                                      f" {getattr(first, what)}: they are of different saves")  # fmt: skip
        if {kind: len(flats) for kind, flats in first.flats.items()} != {kind: len(flats) for kind, flats in other.flats.items()}:
            raise CheckpointError(
                f"{other.path} and {first.path.name} do not have the same groups of parameters: they are of different saves"
            )


def _stage_1(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    """Equal ranges of all parameters laid end to end.

    Where the ranks say themselves what they have (``param_slice_mappings``), that is not looked at: DeepSpeed 0.19.8 lists it in the
    order of the model also where ``round_robin_gradients`` has laid the parameters otherwise. Weights of the wrong place
    are not those of the model rounded, which is compared when they are read.
    """
    groups = len(ranks[0].flats[MASTER])
    if not states.groups:
        yield from _by_fragments(ranks, kind, states)
        return
    if len(states.groups) != groups:
        raise CheckpointError(f"{states.path} has {len(states.groups)} groups of parameters, {ranks[0].path.name} has {groups}: they are of"
                              " different saves")  # fmt: skip
    for index, shapes in enumerate(states.groups):
        flats = [rank.flats[kind][index] for rank in ranks]
        paddings = ranks[0].paddings[index] if ranks[0].paddings else [0] * len(shapes)
        if len(paddings) != len(shapes):
            raise CheckpointError(f"{ranks[0].path} has {len(paddings)} paddings for {len(shapes)} parameters: it is damaged")
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            parts = list(_ranges(flats, at, math.prod(shape), name))
            stretches = tuple(Stretch(flats[rank].path, flats[rank].record, first, count) for rank, first, count in parts)
            yield name, Stored(shape, dtype_of(flats[0].path, flats[0].record), stretches)
            at += math.prod(shape) + padding
        _require_used_up(flats, at)


def _ranges(flats: list[Flat], at: int, count: int, name: str) -> Iterator[tuple[int, int, int]]:
    """(rank, first, count) of the elements from ``at`` on; all ranks in front of the last that has any have equal ranges."""
    size = flats[0].numel
    while count:
        rank = min(at // size, len(flats) - 1) if size else len(flats) - 1
        first = at - rank * size
        take = min(count, flats[rank].numel - first)
        if take <= 0:
            raise CheckpointError(f"{flats[rank].path} ends before {name} does: it is cut short, or of another save than the model states")
        yield rank, first, take
        at, count = at + take, count - take


def _require_used_up(flats: list[Flat], needed: int) -> None:
    unit = _ALIGNMENT * len(flats)
    there = sum(flat.numel for flat in flats)
    if -(-needed // unit) != -(-there // unit):
        raise CheckpointError(f"{flats[0].path} and the files of the other ranks have {there:,} elements, its parameters need {needed:,}"
                              f" (rounded up to {unit}): they are of another save than the model states")  # fmt: skip


def _by_fragments(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    """Without shapes in the model states (bf16 without ZeRO), the ranks' own lists and the shapes of the 16-bit weights."""
    if not any(rank.fragments for rank in ranks):
        raise CheckpointError(f"{states.path} has no param_shapes and {ranks[0].path.name} no param_slice_mappings: which parameters are in"
                              " the optimizer's files cannot be told; move them aside to convert the weights alone")  # fmt: skip
    for index in range(len(ranks[0].flats[MASTER])):
        found: dict[str, list[Stretch]] = {}
        for rank in ranks:
            flat = rank.flats[kind][index]
            for name, (first, count) in (rank.fragments[index] if index < len(rank.fragments) else {}).items():
                if first + count > flat.numel:
                    raise CheckpointError(f"{flat.path} ends before {name} does: it is cut short")
                found.setdefault(name, []).append(Stretch(flat.path, flat.record, first, count))
        for name, stretches in found.items():
            shape, there = states.module[name].shape if name in states.module else None, sum(s.count for s in stretches)
            if shape is None or math.prod(shape) != there:
                raise CheckpointError(f"{stretches[0].path} has {there:,} elements of {name}, which is {shape} in {states.path.name}")
            yield name, Stored(shape, dtype_of(stretches[0].path, stretches[0].record), tuple(stretches))


def _stage_3(ranks: list[Partition], kind: str, states: ModelStates) -> Iterator[tuple[str, Stored]]:
    """Every parameter in equal parts, each rank's parts end to end, over the groups of a rank as if they were one."""
    at = 0
    for name, shape in states.shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        stretches: list[Stretch] = []
        for index, rank in enumerate(ranks):
            stretches += _across(rank.flats[kind], at, max(0, min(part, numel - index * part)), name)
        flat = ranks[0].flats[kind][0]
        yield name, Stored(shape, dtype_of(flat.path, flat.record), tuple(stretches))
        at += part
    for rank in ranks:
        if at != (there := sum(flat.numel for flat in rank.flats[kind])):
            raise CheckpointError(f"{rank.path} has {there:,} elements of its parts of the parameters, {at:,} are needed: it is of another"
                                  " save than the model states")  # fmt: skip


def _across(flats: list[Flat], at: int, count: int, name: str) -> Iterator[Stretch]:
    for flat in flats:
        if count and at < flat.numel:
            take = min(count, flat.numel - at)
            yield Stretch(flat.path, flat.record, at, take)
            at, count = at + take, count - take
        at = max(0, at - flat.numel) if count else 0
    if count:
        raise CheckpointError(f"{flats[0].path} ends before {name} does: it is cut short, or of another save than the model states")


def _frozen(states: list[ModelStates]) -> Iterator[tuple[str, Stored]]:
    """Parameters that are not trained: stage 3 keeps a part of each in the model states of every rank."""
    for name, shape in states[0].frozen_shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(states))
        stretches = []
        for index, state in enumerate(states):
            record = state.frozen_parts.get(name)
            if record is None or math.prod(record.shape) != part:
                raise CheckpointError(f"{state.path} has {record.shape if record else 'nothing'} of {name}, {part:,} elements are needed")
            stretches.append(Stretch(state.path, record, 0, max(0, min(part, numel - index * part))))
        yield name, Stored(shape, dtype_of(stretches[0].path, stretches[0].record), tuple(stretches))


def _flat(path: Path, item: Any) -> Flat:
    if not isinstance(item, TensorRecord):
        raise CheckpointError(f"{path}: a group of the optimizer is {type(item).__name__} where a tensor should be: it is damaged")
    return Flat(path, item)


def _base_states(base: Any, path: Path) -> tuple[list[dict[Any, Any]], list[Any]]:
    """The optimizer's state of each group, and its settings: a list (``elastic``), or a state dict of torch (``rigid``)."""
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


def _moments(states: list[dict[Any, Any]], groups: int, path: Path) -> dict[str, list[Flat]]:
    """Adam's; none before the first step. Raises CheckpointError: those of another optimizer."""
    if not states or not any(state for state in states):
        return {}
    if len(states) != groups:
        raise CheckpointError(f"{path} has the optimizer's state of {len(states)} groups of {groups}: --no-optimizer takes the rest")
    for state in states:
        tensors = sorted(str(key) for key, value in state.items() if isinstance(value, TensorRecord) and value.shape)
        if tensors != sorted(MOMENTS):
            raise CheckpointError(f"{path}: its optimizer keeps {', '.join(tensors) or 'nothing'}, and only Adam's {' and '.join(MOMENTS)}"
                                  " can be converted: --no-optimizer takes the weights alone")  # fmt: skip
    return {kind: [_flat(path, state[kind]) for state in states] for kind in MOMENTS}


def _squares(states: list[dict[Any, Any]], masters: list[Flat], path: Path) -> list[Flat]:
    """Of the shape that the weights have, or none."""
    found = [Flat(path, item) for state in states if isinstance(item := state.get(MOMENTS[1]), TensorRecord)]
    return found if [flat.numel for flat in found] == [flat.numel for flat in masters] else []


def _step(files: Files, path: Path, state: dict[Any, Any], states: list[dict[Any, Any]], groups: list[Any]) -> int | None:
    """Where optimizers keep the number of updates: apart (``elastic``), beside the moments, or in their settings."""
    settings = (group.get("step") for group in groups[:1] if isinstance(group, dict))
    for place in (state.get("base_optimizer_state_step"), *(s.get("step") for s in states[:1]), *settings):
        if (step := whole_number(files, path, place)) is not None:
            return step
    return None


def whole_number(files: Files, path: Path, value: Any) -> int | None:
    """A count that is kept as a number or as a tensor of one element; None: it is neither."""
    return whole(value, lambda record: files.read(path, record))


def _fragments(value: Any, path: Path) -> list[dict[str, tuple[int, int]]]:
    """``param_slice_mappings``: by group and name, deepspeed.utils.tensor_fragment.fragment_address."""
    found = []
    for group in value if isinstance(value, list) else []:
        found.append(
            {plain_name(str(name)): _address(item, path) for name, item in as_dict(group, f"{path}, param_slice_mappings").items()}
        )
    return found


def _address(item: Any, path: Path) -> tuple[int, int]:
    attributes = item.attributes if isinstance(item, Object) else {}
    start, count = attributes.get("start"), attributes.get("numel")
    if not (isinstance(start, int) and isinstance(count, int) and start >= 0 and count >= 0):
        raise CheckpointError(f"{path}: param_slice_mappings has {str(item)[:100]} where a start and a number should be: it is damaged")
    return start, count


def _paddings(value: Any, path: Path) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(g, list) and all(isinstance(n, int) and 0 <= n < 4096 for n in g) for g in value):
        raise CheckpointError(f"{path}: param_alignment_paddings must be lists of small numbers: it is damaged")
    return value


def _count(value: Any, path: Path) -> int:
    """The largest group's: experts have smaller ones."""
    counts = [n for item in (value if isinstance(value, list) else [value]) if (n := number(item)) is not None]
    if not counts or max(counts) < 1:
        raise CheckpointError(f"{path} does not say how many ranks its groups are divided over (partition_count): it is damaged")
    return int(max(counts))
