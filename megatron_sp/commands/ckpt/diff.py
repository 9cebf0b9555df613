"""``ckpt diff``: differences of two checkpoints. Their layout over processes is shown, but does not count as a difference."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.checkpoint.manifest import Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt.facts import layout_of, layout_words
from megatron_sp.commands.ckpt.names import WEIGHTS, Tensors, kind_of
from megatron_sp.commands.ckpt.places import step_folder
from megatron_sp.commands.ckpt.text import SHORT_DTYPES, Progress, aligned, plural, warn
from megatron_sp.config.schema import Config, diff
from megatron_sp.utils.errors import CheckpointError, ConfigError

EXIT_DIFFERENT = 1
_STATE = ("step", "consumed_samples", "scheduled_samples", "consumed_tokens", "num_updates", "skipped_steps", "bad_steps", "schedule",
          "loss_scaler", "data_fingerprint")  # fmt: skip
_NOT_COUNTED = (
    "parallel.", "kernels.", "checkpoint.", "logging.", "batch.micro_batch_size", "batch.eval_", "batch.skip_train", "batch.exit_",
    "batch.kill_switch_path", "batch.no_exit_signal_handler", "data.num_workers", "data.data_cache_path", "data.valid_", "data.test_",
    "data.multiple_validation_sets", "data.full_validation",
)  # fmt: skip
"""Beginnings of the fields that change no checkpoint: layout, output, validation, and when a process ends."""
_MAX_ROWS = 20


class Difference(NamedTuple):
    """A value that is ``a`` in one checkpoint and ``b`` in the other; ``counts``: it affects the exit code."""

    name: str
    a: Any
    b: Any
    counts: bool = True


class TensorDifference(NamedTuple):
    """A tensor that differs between the checkpoints.

    Attributes:
        a, b: dtype and shape; None if the tensor is absent.
        max_abs, max_rel: max|a-b|, and max|a-b| / max|b|; None if values were not compared.
        beyond: number of values beyond the tolerances.
        values: number of all values.
    """

    name: str
    a: str | None
    b: str | None
    max_abs: float | None = None
    max_rel: float | None = None
    beyond: int = 0
    values: int = 0


def run(
    a: Path, b: Path, *, tensors: str | None, weights_only: bool, rtol: float | None, atol: float | None, as_json: bool
) -> int:  # fmt: skip
    """Compare two checkpoints and print the differences.

    Args:
        tensors: compare only tensors whose names match this pattern; None: everything.
        rtol, atol: tolerances; if both are None, values and dtypes must be equal.
    Returns:
        The exit code: 0 if they are the same, 1 if they differ.
    Raises:
        ConfigError: a tolerance is not a finite number >= 0.
        CheckpointError: a checkpoint is missing or damaged, or no tensor matches.
    """
    for name, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} ({value}) must be a number of at least 0")
    folders = step_folder(a), step_folder(b)
    lists = read_manifest(folders[0]), read_manifest(folders[1])
    rows = [] if tensors is not None else state_rows(folders, lists)
    chosen = [_chosen(listed.tensors, tensors or "*", weights_only) for listed in lists]
    if tensors is not None and not any(chosen):
        raise CheckpointError(f"no tensor of {folders[0]} or {folders[1]} matches {tensors!r}: see megatron-sp ckpt show STEP --tensors")
    found = tensor_rows(folders, chosen[0], chosen[1], rtol, atol)
    same = not found and not any(row.counts for row in rows)
    compared = len(set(chosen[0]) | set(chosen[1]))
    if as_json:
        print(json.dumps(_as_dict(folders, rows, found, compared, same), indent=1))
    else:
        print("\n".join(_text(folders, rows, found, compared, same, rtol is None and atol is None)))
    return 0 if same else EXIT_DIFFERENT


def _chosen(tensors: Tensors, pattern: str, weights_only: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: value
        for name, value in tensors.items()
        if (name == pattern or fnmatchcase(name, pattern)) and not (weights_only and kind_of(name)[0] != WEIGHTS)
    }


def state_rows(folders: Sequence[Path], lists: Sequence[Manifest]) -> list[Difference]:
    """Return the differences of ``state.json``: progress, schedule and flags; layout and versions, too, but not counted."""
    states = [read_state(folder) for folder in folders]
    layouts = [layout_words(layout_of(listed, state)) for listed, state in zip(lists, states, strict=True)]
    rows = [Difference(key, states[0].get(key), states[1].get(key)) for key in _STATE]
    rows.append(Difference("processes", layouts[0], layouts[1], counts=False))
    rows.append(Difference("versions", states[0].get("versions"), states[1].get("versions"), counts=False))
    try:
        old, new = (Config.from_dict(state.get("config"))[0] for state in states)
        changed = diff(old, new)
    except ConfigError as error:
        warn(f"the configurations cannot be compared: {error}")
        changed = {}
    rows += [Difference(_flag(key), x, y, counts=not key.startswith(_NOT_COUNTED)) for key, (x, y) in changed.items()]
    return [row for row in rows if row.a != row.b]


def tensor_rows(folders: Sequence[Path], a: Tensors, b: Tensors, rtol: float | None, atol: float | None) -> list[TensorDifference]:
    """Return the tensors that are in one checkpoint only, or differ in dtype, shape or values; values are read in blocks."""
    from megatron_sp.checkpoint.stream import BLOCK_BYTES, NativeReader
    from megatron_sp.commands.ckpt.distance import Distance

    readers = [NativeReader(folder, verified=True) for folder in folders]
    exact = rtol is None and atol is None
    rows = [TensorDifference(name, _show(a.get(name)), _show(b.get(name))) for name in sorted(set(a) ^ set(b))]
    both = sorted(set(a) & set(b))
    sizes = [reader.tensors() for reader in readers]
    with Progress("comparing", sum(sizes[0][name].num_bytes for name in both)) as progress:
        for name in both:
            if a[name][1] != b[name][1]:
                rows.append(TensorDifference(name, _show(a[name]), _show(b[name])))
                continue
            width = max(sizes[0][name].dtype.itemsize, sizes[1][name].dtype.itemsize)
            blocks = (r.blocks(name, BLOCK_BYTES * s[name].dtype.itemsize // width) for r, s in zip(readers, sizes, strict=True))
            distance = Distance.of(zip(*blocks, strict=True), rtol or 0.0, atol or 0.0, progress.add)
            if distance.beyond or (exact and a[name][0] != b[name][0]):
                rows.append(
                    TensorDifference(
                        name, _show(a[name]), _show(b[name]), distance.max_abs, distance.max_rel, distance.beyond, distance.count
                    )
                )
    return rows


def _show(tensor: tuple[str, tuple[int, ...]] | None) -> str | None:
    return None if tensor is None else f"{SHORT_DTYPES.get(tensor[0], tensor[0])} {list(tensor[1])}"


def _text(
    folders: Sequence[Path], rows: list[Difference], found: list[TensorDifference], compared: int, same: bool, exact: bool
) -> list[str]:
    lines = [f"a: {folders[0]}", f"b: {folders[1]}"]
    for title, some in (
        ("state and flags", [row for row in rows if row.counts]),
        ("shown but not counted: how it was run", [row for row in rows if not row.counts]),
    ):
        if some:
            lines += [f"{title}:", *aligned([("", "a", "b"), *((row.name, _plain(row.a), _plain(row.b)) for row in some)])]
    lines += _tensor_text(found)
    equal = f"{compared - len(found):,} of {plural(compared, 'tensor')} equal{'' if exact else ' within the tolerances'}"
    lines.append(f"{'the same' if same else 'different'}: {equal}")
    return lines


def _tensor_text(found: list[TensorDifference]) -> list[str]:
    if not found:
        return []
    alone = [row for row in found if (row.a is None or row.b is None) and kind_of(row.name)[0] != WEIGHTS]  # one line for many similar ones
    rest = [row for row in found if row not in alone]
    ordered = sorted(rest, key=lambda row: (row.max_rel is not None, kind_of(row.name)[0] != WEIGHTS, -(row.max_rel or 0.0), row.name))
    table = [("", "a", "b", "max|a-b|", "/max|b|", "values beyond"), *map(_tensor_cells, ordered[:_MAX_ROWS])]
    more = [f"  ... and {len(rest) - _MAX_ROWS} more (--json has all)"] if len(rest) > _MAX_ROWS else []
    return [*(["tensors:", *aligned(table, (3, 4)), *more] if rest else []), *_only_in_one(alone), *_worst(found)]


def _only_in_one(alone: list[TensorDifference]) -> list[str]:
    counts = Counter((kind_of(row.name)[0], "b" if row.a is None else "a") for row in alone)
    return [f"{kind}: {plural(count, 'tensor')} only in {side}" for (kind, side), count in sorted(counts.items())]


def _worst(found: list[TensorDifference]) -> list[str]:
    """Return a line for each kind of tensor with different values."""
    kinds: dict[str, list[TensorDifference]] = {}
    for row in found:
        if row.max_abs is not None:
            kinds.setdefault(kind_of(row.name)[0], []).append(row)
    lines = []
    for kind, rows in sorted(kinds.items(), key=lambda item: (item[0] != WEIGHTS, item[0])):
        far, worst = max(row.max_abs or 0.0 for row in rows), max(row.max_rel or 0.0 for row in rows)
        lines.append(f"{kind}: {plural(len(rows), 'tensor')} with other values, max|a-b| up to {far:.3g}, relative up to {worst:.3g}")
    return lines


def _tensor_cells(row: TensorDifference) -> tuple[str, ...]:
    a, b = row.a or "absent", row.b or "absent"
    if row.max_abs is None or row.max_rel is None:
        return row.name, a, b, "-", "-", "-"
    return row.name, a, "same" if a == b else b, f"{row.max_abs:.3g}", f"{row.max_rel:.3g}", f"{row.beyond:,} of {row.values:,}"


def _as_dict(folders: Sequence[Path], rows: list[Difference], found: list[TensorDifference], compared: int, same: bool) -> dict[str, Any]:
    return {
        "a": str(folders[0]),
        "b": str(folders[1]),
        "same": same,
        "state": [row._asdict() for row in rows],
        "compared_tensors": compared,
        "tensors": [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row._asdict().items()} for row in found],
    }


def _flag(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return "-" if value is None else str(value)
