"""Checks of tensors beyond files and hashes: they must be complete, finite, consistent, and have the configuration's shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megatron_sp.checkpoint import load
from megatron_sp.checkpoint.manifest import Manifest, read_state
from megatron_sp.checkpoint.pieces import tiling_problem
from megatron_sp.checkpoint.stream import TensorReader, tensor_infos
from megatron_sp.commands.ckpt.names import WEIGHTS, Tensors, kind_of, weights_of
from megatron_sp.commands.ckpt.structure import expected_shapes
from megatron_sp.commands.ckpt.text import Progress
from megatron_sp.commands.ckpt.values import Values
from megatron_sp.utils.errors import CheckpointError, ReportedError


def deep_problems(step_dir: Path, listed: Manifest) -> list[str]:
    """Return all problems of a checkpoint beyond the bytes of its files."""
    index: load.Index = defaultdict(list)
    found = []
    for file in load.data_files(listed):
        try:
            rows = load.read_headers(step_dir, [file])
        except (CheckpointError, OSError) as error:
            found.append(str(error))
            continue
        for row in rows:
            try:
                for name, pieces in load.make_index(step_dir, listed, [row]).items():
                    index[name] += pieces
            except CheckpointError as error:
                found.append(str(error))
    whole = set()
    for name, (_, shape) in sorted(listed.tensors.items()):
        if problem := tiling_problem(shape, [piece.rect for piece in index.get(name, [])]):
            found.append(f"{name} {list(shape)} is not stored completely and once: {problem}")
        else:
            whole.add(name)
    found += _not_finite(TensorReader(step_dir, tensor_infos(listed), index), whole)
    return [*found, *_unpaired(listed.tensors), *_of_another_shape(step_dir, listed)]


def _not_finite(reader: TensorReader, names: set[str]) -> Iterator[str]:
    tensors = reader.tensors()
    with Progress("reading tensors", sum(tensors[name].num_bytes for name in names)) as progress:
        for name in sorted(names):
            try:
                values = Values.of(reader.blocks(name), progress.add)
            except CheckpointError as error:
                yield str(error)
                continue
            if values.nans or values.infinities:
                yield f"{name} has values that are not finite: {values.nans:,} NaN and {values.infinities:,} infinite of {values.count:,}"


def _unpaired(tensors: Tensors) -> Iterator[str]:
    """Yield inconsistent optimizer state: it must belong to a weight, have its shape, and be of every kind for each weight that has any."""
    weights, owned = weights_of(tensors), defaultdict(set)
    for name, (_, shape) in sorted(tensors.items()):
        kind, weight = kind_of(name)
        if kind == WEIGHTS:
            continue
        owned[kind].add(weight)
        if weight not in weights:
            yield f"{name} is of a weight that is not there ({weight})"
        elif weights[weight][1] != shape:
            yield f"{name} has the shape {list(shape)}, its weight {list(weights[weight][1])}"
    stepped = set().union(*owned.values())
    if owned and any(weights.get(name, ("", ()))[0] in ("F16", "BF16") for name in stepped):
        owned.setdefault("master", set())
    for kind, names in sorted(owned.items()):
        needed = {n for n in stepped if weights.get(n, ("", ()))[0] in ("F16", "BF16")} if kind == "master" else stepped
        for weight in sorted(needed - names):
            yield f"optimizer.{kind}.{weight} is missing: other state of this weight is there"


def _of_another_shape(step_dir: Path, listed: Manifest) -> Iterator[str]:
    try:
        state = read_state(step_dir)
        expected = expected_shapes(state.get("config"), listed.tensors)
    except (ReportedError, OSError) as error:
        yield f"the shapes of the configuration's model cannot be determined: {error}"
        return
    weights = weights_of(listed.tensors)
    for name, shape in sorted(expected.items()):
        if name not in weights:
            yield f"{name} {list(shape)} is missing: the configuration's model has it"
        elif weights[name][1] != shape:
            yield f"{name} has the shape {list(weights[name][1])}, the configuration's model {list(shape)}"
    for name in sorted(set(weights) - set(expected)):
        yield f"{name} {list(weights[name][1])} is not in the configuration's model"
    has_optimizer = any(kind_of(name)[0] != WEIGHTS for name in listed.tensors)
    if state.get("has_optimizer") is not None and bool(state["has_optimizer"]) != has_optimizer:
        found = "optimizer state" if has_optimizer else "no optimizer state"
        yield f"state.json says has_optimizer {state['has_optimizer']}, but the checkpoint has {found}"
