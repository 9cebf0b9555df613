"""``ckpt show`` and ``diff``: what one checkpoint holds, and where two differ.

The layout over processes is shown, but does not count as a difference. torch is imported only where values are read.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.checkpoint.manifest import Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt.folders import STEP, look_at, step_folder
from megatron_sp.commands.ckpt.tables import (
    SHORT_DTYPES,
    WEIGHTS,
    Tensors,
    Total,
    by_kind,
    by_module,
    date,
    facts,
    flag,
    kind_of,
    layout_of,
    layout_words,
    plural,
    warn,
)  # fmt: skip
from megatron_sp.config import schema
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.format import aligned, format_bytes, format_parameters

EXIT_DIFFERENT = 1
_PROGRESS = (
    "step",
    "consumed_samples",
    "scheduled_samples",
    "consumed_tokens",
    "num_updates",
    "skipped_steps",
    "bad_steps",
)
_STATE = ("schedule", "loss_scaler", "data_fingerprint")
_KNOWN_STATE = {
    *_PROGRESS, *_STATE, "versions", "evaluation_data", "samples", "tokenizer", "config", "layout", "has_optimizer", "format_version",
}  # fmt: skip
_STATISTICS = ("min", "max", "mean", "std", "norm")
_COUNTS = ("count", "zeros", "nan", "infinite")
_NOT_COUNTED = (
    "parallel.", "kernels.", "checkpoint.", "logging.", "batch.micro_batch_size", "batch.eval_", "batch.skip_train", "batch.exit_",
    "batch.kill_switch_path", "batch.no_exit_signal_handler", "data.num_workers", "data.data_cache_path", "data.valid_", "data.test_",
    "data.multiple_validation_sets", "data.full_validation",
)  # fmt: skip
"""Beginnings of the fields that change no checkpoint: layout, output, validation, and when a process ends."""
_MAX_ROWS = 20
Record = dict[str, Any]


# --------------------------------------------------------------------------------------------------------------- show


def show(path: Path, ckpt_step: int | None, *, tensors: str | None, values: Sequence[str], as_json: bool) -> int:
    """Print one checkpoint in full.

    Args:
        tensors: list the tensors whose names match this pattern; None: list none.
        values: names or patterns of tensors whose values are read for statistics.
    Raises:
        CheckpointError: the checkpoint is missing, its manifest or state is damaged, or no tensor matches.
    """
    step_dir = step_folder(path, ckpt_step)
    listed, state = read_manifest(step_dir), read_state(step_dir)
    listing = [] if tensors is None else _matching(listed.tensors, tensors)
    wanted = list(dict.fromkeys(name for pattern in values for name in _matching(listed.tensors, pattern)))
    record = _checkpoint_record(step_dir, listed, state)
    if tensors is not None:
        record["tensors"] = {
            name: _tensor_record(*listed.tensors[name]) | {"kind": kind_of(name)[0]} for name in listing
        }
    if wanted:
        from megatron_sp.commands.ckpt.tensors import read_values

        record["values"] = read_values(step_dir, wanted)
    print(json.dumps(record, indent=1) if as_json else "\n".join(_checkpoint_lines(record)))
    return 0


def _matching(tensors: Tensors, pattern: str) -> list[str]:
    # the names that equal the pattern or match it as a shell pattern. Raises CheckpointError: no name does
    names = [name for name in sorted(tensors) if name == pattern or fnmatchcase(name, pattern)]
    if not names:
        near = difflib.get_close_matches(pattern, list(tensors), n=3, cutoff=0.4) or sorted(tensors)[:3]
        raise CheckpointError(
            f"no tensor matches {pattern!r}; nearest: {', '.join(near) or 'it has no tensors at all'}"
        )
    return names


def _checkpoint_record(step_dir: Path, listed: Manifest, state: Record) -> Record:
    entry = look_at(step_dir, listed.step, STEP)
    config, warnings = _config_of(state)
    for warning in [*(f"{step_dir}: {problem}" for problem in entry.problems), *warnings]:
        warn(warning)
    changed = {} if config is None else schema.diff(Config(), config)
    return {
        "path": str(entry.path), "saved": entry.saved, "bytes": listed.num_bytes, "files": len(listed.files),
        "complete": not entry.problems, **facts(listed, state), "model": None if config is None else _model_words(config.model),
        "progress": {key: state[key] for key in _PROGRESS if key in state},
        **{key: state.get(key) for key in (*_STATE, "versions")},
        "changed_flags": {key: {"value": value, "default": default} for key, (default, value) in changed.items()},
        "by_kind": [
            {"kind": kind, "dtype": SHORT_DTYPES.get(dtype, dtype), **vars(total)}
            for (kind, dtype), total in by_kind(listed.tensors).items()
        ],
        "by_module": {module: vars(total) for module, total in by_module(listed.tensors).items()},
        "other_state": sorted(set(state) - _KNOWN_STATE),
    }  # fmt: skip


def _config_of(state: Record) -> tuple[Config | None, list[str]]:
    if state.get("config") is None:
        return None, ["state.json has no configuration"]
    try:
        return Config.from_dict(state["config"])
    except ConfigError as error:
        return None, [str(error)]


def _model_words(model: ModelConfig) -> str:
    words = [
        plural(model.num_layers or 0, "layer"),
        f"hidden {model.hidden_size}",
        f"{model.num_attention_heads} heads",
    ]
    words += [f"{model.num_query_groups} kv heads"] if model.num_query_groups else []
    words += [f"ffn {model.ffn_hidden_size}"] if model.ffn_hidden_size else []
    words += [f"sequence {model.seq_length}", f"vocabulary {model.vocab_size}"]
    return f"{'BERT' if model.is_bert else 'GPT'}, {', '.join(words)}"


def _tensor_record(dtype: str, shape: tuple[int, ...]) -> Record:
    total = Total()
    total.add(dtype, shape)
    return {"dtype": SHORT_DTYPES.get(dtype, dtype), "shape": list(shape), "bytes": total.num_bytes}


def _checkpoint_lines(record: Record) -> list[str]:
    fingerprint, parameters = record["data_fingerprint"], format_parameters(record["parameters"])
    rows = [
        ("saved", f"{date(record['saved'])}, {format_bytes(record['bytes'])} in {plural(record['files'], 'file')}"),
        ("model", record["model"] or "unknown: no configuration"),
        ("parameters", f"{parameters} {'+'.join(record['dtypes'])}"),
        ("optimizer", ", ".join(record["optimizer"]) or "none"),
        (
            "progress",
            ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in record["progress"].items()),
        ),
        ("processes", layout_words(record["layout"])),
        ("schedule", _pairs(record["schedule"])),
        ("loss scaler", _pairs(record["loss_scaler"])),
        ("data", "-" if fingerprint is None else str(fingerprint)[:16]),
        ("versions", _pairs(record["versions"] if isinstance(record["versions"], dict) else {})),
        *([("other state", ", ".join(record["other_state"]))] if record["other_state"] else []),
    ]
    kinds, modules = record["by_kind"], record["by_module"]
    whole, all_bytes = max(1, record["parameters"]), max(1, sum(row["num_bytes"] for row in kinds))
    by_kind_rows = [
        (row["kind"], row["dtype"], *_sizes(row), f"{100 * row['num_bytes'] / all_bytes:.0f} %") for row in kinds
    ]
    by_module_rows = [
        (name, *_sizes(total), f"{100 * total['elements'] / whole:.1f} %") for name, total in modules.items()
    ]
    flags = [
        (flag(key), _plain(e["value"]), f"(default {_plain(e['default'])})")
        for key, e in record["changed_flags"].items()
    ]
    lines = [record["path"], *aligned(rows)]
    lines += ["", "bytes by kind", *aligned(by_kind_rows, (2, 3, 4, 5))]
    lines += ["", "weights by module (a star: all layers)", *aligned(by_module_rows, (1, 2, 3, 4))]
    lines += ["", f"flags that differ from their defaults: {len(flags)}", *aligned(flags)]
    if isinstance(record["tensors"], dict):
        tensors = [
            (name, t["dtype"], _plain(t["shape"]), format_bytes(t["bytes"])) for name, t in record["tensors"].items()
        ]
        lines += ["", "tensors", *aligned(tensors, (3,))]
    if "values" in record:
        rows_of_values: list[tuple[str, ...]] = [("tensor", *_STATISTICS, *_COUNTS)]
        for name, statistics in record["values"].items():
            numbers = ["-" if statistics[key] is None else f"{statistics[key]:.6g}" for key in _STATISTICS]
            rows_of_values.append((name, *numbers, *(f"{statistics[key]:,}" for key in _COUNTS)))
        lines += ["", "values (of the finite ones)", *aligned(rows_of_values, range(1, 10))]
    return lines


def _sizes(total: Record) -> tuple[str, str, str]:
    return plural(total["tensors"], "tensor"), f"{total['elements']:,}", format_bytes(total["num_bytes"])


def _pairs(value: Any) -> str:
    if not isinstance(value, dict):
        return "-" if value is None else _plain(value)
    return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items() if entry is not None)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


# --------------------------------------------------------------------------------------------------------------- diff


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
    """

    name: str
    a: str | None
    b: str | None
    max_abs: float | None = None
    max_rel: float | None = None
    beyond: int = 0  # number of values beyond the tolerances
    values: int = 0


def diff(
    a: Path, b: Path, *, tensors: str | None, weights_only: bool, rtol: float | None, atol: float | None, as_json: bool
) -> int:
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
    rows = [] if tensors is not None else _state_differences(folders, lists)
    chosen = [
        {
            name: value
            for name, value in listed.tensors.items()
            if (name == (tensors or "*") or fnmatchcase(name, tensors or "*"))
            and not (weights_only and kind_of(name)[0] != WEIGHTS)
        }
        for listed in lists
    ]
    if tensors is not None and not any(chosen):
        raise CheckpointError(
            f"no tensor of {folders[0]} or {folders[1]} matches {tensors!r}: see megatron-sp ckpt show STEP --tensors"
        )
    differing = _tensor_differences(folders, chosen[0], chosen[1], rtol, atol)
    compared, same = len(set(chosen[0]) | set(chosen[1])), not differing and not any(row.counts for row in rows)
    if as_json:
        tensor_records = [
            {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row._asdict().items()}
            for row in differing
        ]
        record = {
            "a": str(folders[0]), "b": str(folders[1]), "same": same, "state": [row._asdict() for row in rows],
            "compared_tensors": compared, "tensors": tensor_records,
        }  # fmt: skip
        print(json.dumps(record, indent=1))
    else:
        equal = f"{compared - len(differing):,} of {plural(compared, 'tensor')} equal"
        equal += "" if rtol is None and atol is None else " within the tolerances"
        lines = [
            f"a: {folders[0]}",
            f"b: {folders[1]}",
            *_difference_lines(rows, differing),
            f"{'the same' if same else 'different'}: {equal}",
        ]
        print("\n".join(lines))
    return 0 if same else EXIT_DIFFERENT


def _state_differences(folders: Sequence[Path], lists: Sequence[Manifest]) -> list[Difference]:
    # the differences of ``state.json``: progress, schedule, flags; layout and versions do not count
    states = [read_state(folder) for folder in folders]
    layouts = [layout_words(layout_of(listed, state)) for listed, state in zip(lists, states, strict=True)]
    rows = [Difference(key, states[0].get(key), states[1].get(key)) for key in (*_PROGRESS, *_STATE)]
    rows.append(Difference("processes", layouts[0], layouts[1], counts=False))
    rows.append(Difference("versions", states[0].get("versions"), states[1].get("versions"), counts=False))
    try:
        old, new = (Config.from_dict(state.get("config"))[0] for state in states)
        changed = schema.diff(old, new)
    except ConfigError as error:
        warn(f"the configurations cannot be compared: {error}")
        changed = {}
    rows += [Difference(flag(key), x, y, counts=not key.startswith(_NOT_COUNTED)) for key, (x, y) in changed.items()]
    return [row for row in rows if row.a != row.b]


def _tensor_differences(
    folders: Sequence[Path], a: Tensors, b: Tensors, rtol: float | None, atol: float | None
) -> list[TensorDifference]:  # fmt: skip
    # the tensors that are in one checkpoint only, or differ in dtype, shape or values
    from megatron_sp.commands.ckpt.tensors import distances

    def words(tensor: tuple[str, tuple[int, ...]] | None) -> str | None:
        return None if tensor is None else f"{SHORT_DTYPES.get(tensor[0], tensor[0])} {list(tensor[1])}"

    both = [name for name in sorted(set(a) & set(b)) if a[name][1] == b[name][1]]
    rows = [
        TensorDifference(name, words(a.get(name)), words(b.get(name))) for name in sorted((set(a) | set(b)) - set(both))
    ]
    is_exact = rtol is None and atol is None
    for name, far in distances(folders, both, rtol or 0.0, atol or 0.0):
        if far.beyond or (is_exact and a[name][0] != b[name][0]):
            rows.append(
                TensorDifference(
                    name, words(a[name]), words(b[name]), far.max_abs, far.max_rel(), far.beyond, far.count
                )
            )
    return rows


def _difference_lines(rows: list[Difference], tensors: list[TensorDifference]) -> list[str]:
    def plain(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {entry}" for key, entry in value.items())
        return "-" if value is None else str(value)

    lines = []
    for title, counts in (("state and flags", True), ("shown but not counted: how it was run", False)):
        some = [(row.name, plain(row.a), plain(row.b)) for row in rows if row.counts == counts]
        lines += [f"{title}:", *aligned([("", "a", "b"), *some])] if some else []
    # optimizer state in one of the two only is one line for each kind: there may be many such tensors
    alone = [row for row in tensors if (row.a is None or row.b is None) and kind_of(row.name)[0] != WEIGHTS]
    rest = [row for row in tensors if row not in alone]
    if rest:
        rest.sort(
            key=lambda row: (row.max_rel is not None, kind_of(row.name)[0] != WEIGHTS, -(row.max_rel or 0.0), row.name)
        )
        table = [("", "a", "b", "max|a-b|", "/max|b|", "values beyond"), *map(_tensor_cells, rest[:_MAX_ROWS])]
        lines += ["tensors:", *aligned(table, (3, 4))]
        lines += [f"  ... and {len(rest) - _MAX_ROWS} more (--json has all)"] if len(rest) > _MAX_ROWS else []
    counts_alone = Counter((kind_of(row.name)[0], "b" if row.a is None else "a") for row in alone)
    lines += [
        f"{kind}: {plural(count, 'tensor')} only in {side}" for (kind, side), count in sorted(counts_alone.items())
    ]
    kinds: dict[str, list[TensorDifference]] = {}
    for tensor in tensors:
        if tensor.max_abs is not None:
            kinds.setdefault(kind_of(tensor.name)[0], []).append(tensor)
    for kind, of_kind in sorted(kinds.items(), key=lambda item: (item[0] != WEIGHTS, item[0])):
        far, worst = max(row.max_abs or 0.0 for row in of_kind), max(row.max_rel or 0.0 for row in of_kind)
        lines.append(
            f"{kind}: {plural(len(of_kind), 'tensor')} with other values, max|a-b| up to {far:.3g}, relative up to {worst:.3g}"
        )
    return lines


def _tensor_cells(row: TensorDifference) -> tuple[str, ...]:
    a, b = row.a or "absent", row.b or "absent"
    if row.max_abs is None or row.max_rel is None:
        return row.name, a, b, "-", "-", "-"
    return (
        row.name,
        a,
        "same" if a == b else b,
        f"{row.max_abs:.3g}",
        f"{row.max_rel:.3g}",
        f"{row.beyond:,} of {row.values:,}",
    )
