"""Adam's state in classic Megatron checkpoints, and the assignment of its tensors to parameters.

Two forms are read. The plain optimizer numbers its parameters, in one or two groups (with and without weight decay),
and has fp32 copies of 16-bit weights. The distributed optimizer has three flat buffers for each model of a rank in
``distrib_optim.pt``:

    parameters from the last to the first, each at the next multiple of 64 (since 2024-08) or without gaps, bucket after bucket

Neither contains names, so the order is taken from the file's own list of parameters, lengths must match exactly, and
each weight must be its rounded fp32 copy when that is read. Everything else is refused rather than guessed. Source:
megatron-core 0.16.1, distrib_optimizer.py :: get_parameter_state_dp_zero, param_and_grad_buffer.py,
optimizer/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile
from megatron_sp.convert.formats.counters import of_megatron
from megatron_sp.convert.formats.megatron_files import ModelChunk, Opened, RankFile, RankFiles, Stored
from megatron_sp.convert.formats.megatron_folder import OPTIMIZER
from megatron_sp.convert.formats.megatron_names import ignored
from megatron_sp.convert.formats.megatron_order import is_decayed, registered
from megatron_sp.convert.model import Fate, LossScale
from megatron_sp.utils.errors import CheckpointError

_WAY_OUT = "give --no-optimizer to convert the weights alone"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 64


class Found(NamedTuple):
    """Kinds of tensors that every parameter has, and the fates of others."""

    kinds: tuple[str, ...]
    fates: list[Fate]
    num_updates: int | None = None  # Adam's update count, if it is stored
    loss_scale: LossScale | None = None  # state of fp16's loss scaling


class Parameter(NamedTuple):
    """A parameter of a rank; ``find`` handles them in the order in which modules register them."""

    chunk: ModelChunk
    name: str  # our name, with the layer's number within the file
    weight: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.record.shape


def find(opened: Opened, store: RankFiles) -> Found:
    """Add the optimizer's tensors to a store, as ``prefix + kind + "." + name``.

    Raises:
        CheckpointError: there are some, but they cannot be assigned to parameters.
    """
    has = [_has_state(file) for file in opened.files]
    if not any(has):
        return Found((), [])
    if not all(has):
        without = opened.files[has.index(False)].file.path.parent
        raise CheckpointError(f"{without} has no state of the optimizer, and other ranks have: copy all files, or {_WAY_OUT}")
    fates: list[Fate] = []
    is_half = False
    for file in opened.files:
        parameters = list(_parameters(opened, file))
        is_half = parameters[0].weight.record.dtype in _HALF
        if (file.rank.path / OPTIMIZER).exists():
            _add_distributed(opened, file, parameters, store, fates, is_half)
        else:
            _add_plain(file, parameters, store, is_half)
    first = opened.files[0]
    return Found(("master", *_MOMENTS) if is_half else _MOMENTS, fates, *of_megatron(first.tree, first.file.read))


def _has_state(file: RankFile) -> bool:
    if (file.rank.path / OPTIMIZER).exists():
        return True
    state = _inner(file).get("state")
    return isinstance(state, dict) and any(isinstance(one, dict) and "exp_avg" in one for one in state.values())


def _inner(file: RankFile) -> Mapping[Any, Any]:
    """Return the state dict of Adam itself, which is inside that of the mixed-precision optimizer, or on its own for fp32."""
    found = file.tree.get("optimizer")
    if isinstance(found, list):
        raise CheckpointError(f"{file.file.path} has several chained optimizers, whose parameters cannot be told apart: {_WAY_OUT}")
    if not isinstance(found, dict):
        return {}
    inner = next((found[key] for key in ("optimizer", "optimizer_state_dict") if isinstance(found.get(key), dict)), found)
    return inner  # type: ignore[no-any-return]


def _parameters(opened: Opened, file: RankFile) -> Iterator[Parameter]:
    """Yield all parameters of a rank, one virtual stage after the other."""
    dropped = ignored()
    for chunk in opened.chunks:
        if chunk.rank != file.rank:
            continue
        by_listed = {stored.shown.rsplit(":", 1)[-1]: name for name, stored in chunk.tensors.items()}
        for listed in registered([name for name in by_listed if not _matches(name, dropped)]):
            name = by_listed[listed]
            yield Parameter(chunk, name, chunk.tensors[name])


def _matches(name: str, patterns: Mapping[str, str]) -> bool:
    import re

    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _add(store: RankFiles, parameter: Parameter, tensors: Mapping[str, Stored], is_half: bool) -> None:
    """Add the tensors of a parameter under our names; reading the fp32 copy, or else the first moment, compares copy and weight."""
    prefix = parameter.chunk.prefix
    for kind in ("master", *_MOMENTS) if is_half else _MOMENTS:
        store.add(f"{prefix}{kind}.{parameter.name}", tensors[kind])
    if "master" in tensors:
        store.checks[f"{prefix}{'master' if is_half else 'exp_avg'}.{parameter.name}"] = (prefix + parameter.name, tensors["master"])


def _add_plain(file: RankFile, parameters: list[Parameter], store: RankFiles, is_half: bool) -> None:
    inner, where = _inner(file), file.file.path
    groups, state = inner.get("param_groups"), inner["state"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) and _is_numbers(group.get("params")) for group in groups):
        raise CheckpointError(f"{where}: the optimizer has no groups of parameters: {_WAY_OUT}")
    numbers = [group["params"] for group in groups if group["params"]]
    masters = _masters(file, [len(part) for part in numbers]) if is_half else [[] for _ in numbers]
    for part, copies, members in zip(numbers, masters, _members(file, parameters, numbers, state), strict=True):
        for i, (number, parameter) in enumerate(zip(part, members, strict=True)):
            records = {kind: state[number].get(kind) for kind in _MOMENTS}
            if is_half:
                records["master"] = copies[i]
            tensors = {}
            for kind, record in records.items():
                if not isinstance(record, TensorRecord) or record.shape != parameter.shape:
                    raise CheckpointError(f"{where}: {kind} number {number} is not of the shape of {parameter.weight.shown}: {_WAY_OUT}")
                tensors[kind] = Stored(file.file, record, f"{file.rank.path.name}:optimizer.{kind}.{number}")
            _add(store, parameter, tensors, is_half)


def _is_numbers(value: Any) -> bool:
    """Return whether a value is a list of integers, by which optimizers identify parameters."""
    return isinstance(value, list) and all(isinstance(number, int) for number in value)


def _masters(file: RankFile, lengths: list[int]) -> list[list[Any]]:
    outer = file.tree["optimizer"]
    found: list[Any] = next((outer[key] for key in ("fp32_from_fp16_params", "fp32_from_fp16") if isinstance(outer.get(key), list)), [])
    found = [group for group in found if group]
    if [len(group) for group in found] != lengths:
        raise CheckpointError(
            f"{file.file.path}: groups of {lengths} parameters, but of {[len(group) for group in found]} fp32 copies: which is which cannot"
            f" be told; {_WAY_OUT}"
        )
    return found


def _members(file: RankFile, parameters: list[Parameter], numbers: list[list[Any]], state: Mapping[Any, Any]) -> list[list[Parameter]]:
    """Return the parameters of each group: all in one, or those with and those without weight decay, in either order."""
    decayed = [p for p in parameters if is_decayed(p.name, p.shape)]
    others = [p for p in parameters if not is_decayed(p.name, p.shape)]
    for candidate in ([parameters], [decayed, others], [others, decayed]):
        groups = [group for group in candidate if group]
        if [len(group) for group in groups] == [len(part) for part in numbers] and _shapes_fit(groups, numbers, state):
            return groups
    raise CheckpointError(
        f"{file.file.path}: the optimizer has groups of {[len(part) for part in numbers]} parameters, the model {len(decayed)} with and"
        f" {len(others)} without weight decay: which is which cannot be told; {_WAY_OUT}"
    )


def _shapes_fit(groups: list[list[Parameter]], numbers: list[list[Any]], state: Mapping[Any, Any]) -> bool:
    for group, part in zip(groups, numbers, strict=True):
        for parameter, number in zip(group, part, strict=True):
            one = state.get(number)
            if not isinstance(one, dict) or getattr(one.get("exp_avg"), "shape", None) != parameter.shape:
                return False
    return True


def _add_distributed(
    opened: Opened, file: RankFile, parameters: list[Parameter], store: RankFiles, fates: list[Fate], is_half: bool
) -> None:  # fmt: skip
    opened_file = TorchFile(file.rank.path / OPTIMIZER)
    chunks = list({id(p.chunk): p.chunk for p in parameters}.values())
    buffers = _buffers(opened_file, len(chunks))
    for number, (chunk, rows) in enumerate(zip(chunks, buffers, strict=True)):
        mine = [p for p in parameters if p.chunk is chunk]
        starts = _starts(opened, opened_file, mine, rows["param"])
        for parameter, start in zip(mine, starts, strict=True):
            kinds = (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
            tensors = {
                kind: Stored(
                    opened_file, _part(rows[key], start, parameter.shape), f"{file.rank.path.name}/{OPTIMIZER}:{number}.{key}[{start}:]"
                )
                for kind, key in kinds
            }
            _add(store, parameter, tensors, is_half)
        if not is_half:
            fates.append(Fate(f"{file.rank.path.name}/{OPTIMIZER}:{number}.param", "", "the weights again, which are fp32 already"))


def _buffers(file: TorchFile, count: int) -> list[dict[str, TensorRecord]]:
    """Return the flat buffers param, exp_avg and exp_avg_sq of each model of a rank."""
    tree = file.tree if isinstance(file.tree, dict) else {}
    numbers = [key for key in tree if isinstance(key, int)]
    if sorted(numbers) != list(range(count)):
        raise CheckpointError(
            f"{file.path} has {len(numbers)} rows of parameters for {count} models of a rank: its form is not known here; {_WAY_OUT}"
        )
    return [_rows(file, tree[number]) for number in range(count)]


def _rows(file: TorchFile, by_dtype: Any) -> dict[str, TensorRecord]:
    inner = next(iter(by_dtype.values())) if isinstance(by_dtype, dict) and len(by_dtype) == 1 else None
    found: dict[str, TensorRecord] = {}
    for key in ("param", *_MOMENTS):
        row = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(row, list) and len(row) == 1:  # older than 2024-02: a single tensor for each bucket
            row = row[0]
        if not isinstance(row, TensorRecord) or len(row.shape) != 1 or row.stride != (1,) or row.dtype != torch.float32:
            raise CheckpointError(f"{file.path}: {key} is not one row of fp32 numbers: its form is not known here; {_WAY_OUT}")
        found[key] = row
    if len({row.shape for row in found.values()}) != 1:
        raise CheckpointError(f"{file.path}: its rows have different lengths: it is damaged; {_WAY_OUT}")
    return found


def _part(row: TensorRecord, start: int, shape: tuple[int, ...]) -> TensorRecord:
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return replace(row, offset=row.offset + start, shape=shape, stride=tuple(stride))


def _starts(opened: Opened, file: TorchFile, parameters: list[Parameter], row: TensorRecord) -> list[int]:
    """Return the start of each parameter in the flat buffers. Raises CheckpointError: no layout, or more than one, has this length."""
    length = row.shape[0]
    fitting = {starts for starts, total in _layouts(opened.args, opened.pp, parameters) if total == length}
    if len(fitting) != 1:
        raise CheckpointError(
            f"{file.path} has rows of {length:,} numbers for parameters of {sum(math.prod(p.shape) for p in parameters):,}:"
            f" {'no' if not fitting else 'more than one'} known way of laying them out has this length; {_WAY_OUT}"
        )
    return list(fitting.pop())


def _layouts(args: Mapping[str, Any], pp: int, parameters: list[Parameter]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (starts, total length) of every layout that Megatron has used."""
    yield _laid_out(parameters, 1, None, set())
    dp = args.get("data_parallel_size")
    bucket = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (dp if isinstance(dp, int) else 1))
    shared = (
        {"embedding.word_embeddings.weight", "output_layer.weight"}
        if pp > 1 and not args.get("untie_embeddings_and_output_weights")
        else set()
    )
    for alignment in (1, _ALIGNMENT):
        yield _laid_out(parameters, alignment, None, shared)
        yield _laid_out(parameters, alignment, int(bucket), shared)


def _laid_out(parameters: list[Parameter], alignment: int, bucket_size: int | None, shared: set[str]) -> tuple[tuple[int, ...], int]:
    """Lay out parameters as in Megatron's buffer, without the padding at the end of buckets, which files do not contain."""
    starts: dict[str, int] = {}
    behind, at, is_empty = 0, 0, True  # total length of the previous buckets; position in this one
    for parameter in reversed(parameters):
        at = -(-at // alignment) * alignment
        alone = parameter.name in shared
        if alone and not is_empty:
            behind, at = behind + at, 0
        starts[parameter.name] = behind + at
        at, is_empty = at + math.prod(parameter.shape), False
        if alone or (bucket_size is not None and at >= bucket_size):
            behind, at, is_empty = behind + at, 0, True
    return tuple(starts[p.name] for p in parameters), behind + at
