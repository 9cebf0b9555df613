"""``ckpt show`` and ``diff``: what one checkpoint holds, and where two differ.

The layout over processes is shown, but does not count as a difference. torch is imported only where values are read.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.checkpoint.manifest import Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt import folders
from megatron_sp.commands.ckpt.folders import WEIGHTS, Record, Tensors, kind_of, plural, warn
from megatron_sp.config import schema
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import EXIT_OK, CheckpointError, ConfigError
from megatron_sp.utils.format import aligned, format_bytes, format_parameters

EXIT_DIFFERENT = 1
_PROGRESS = (
    "step", "consumed_samples", "scheduled_samples", "consumed_tokens", "num_updates", "skipped_steps", "bad_steps",
)  # fmt: skip
_STATE = ("schedule", "loss_scaler", "data_fingerprint")
_KNOWN_STATE = {
    *_PROGRESS, *_STATE, "versions", "evaluation_data", "samples", "tokenizer", "config", "layout", "has_optimizer",
    "format_version",
}  # fmt: skip
_STATISTICS, _COUNTS = ("min", "max", "mean", "std", "norm"), ("count", "zeros", "nan", "infinite")
# beginnings of the fields that change no checkpoint: layout, output, validation, and when a process ends
_NOT_COUNTED = (
    "parallel.", "kernels.", "checkpoint.", "logging.", "batch.micro_batch_size", "batch.eval_", "batch.skip_train",
    "batch.exit_", "batch.kill_switch_path", "batch.no_exit_signal_handler", "data.num_workers", "data.data_cache_path",
    "data.valid_", "data.test_", "data.multiple_validation_sets", "data.full_validation",
)  # fmt: skip
_MAX_ROWS = 20


# --------------------------------------------------------------------------------------------------------------- show


def show(path: Path, ckpt_step: int | None, *, tensors: str | None, values: Sequence[str], as_json: bool) -> int:
    """Print one checkpoint in full, the tensors that match a pattern, and statistics of the ``values`` of some."""
    step_dir = folders.step_folder(path, ckpt_step)
    listed, state = read_manifest(step_dir), read_state(step_dir)
    listing = [] if tensors is None else _matching(listed.tensors, tensors)
    wanted = list(dict.fromkeys(name for pattern in values for name in _matching(listed.tensors, pattern)))
    record = _checkpoint_record(step_dir, listed, state)
    if tensors is not None:
        record["tensors"] = {}
        for name in listing:
            (dtype, shape), total = listed.tensors[name], folders.Total()
            total.add(dtype, shape)
            row = {"dtype": folders.SHORT_DTYPES.get(dtype, dtype), "shape": list(shape), "bytes": total.num_bytes}
            record["tensors"][name] = row | {"kind": kind_of(name)[0]}
    if wanted:
        from megatron_sp.commands.ckpt.tensors import read_values

        record["values"] = read_values(step_dir, wanted)
    print(json.dumps(record, indent=1) if as_json else "\n".join(_checkpoint_lines(record)))
    return EXIT_OK


def _matching(tensors: Tensors, pattern: str) -> list[str]:
    # the names that equal the pattern or match it as a shell pattern
    names = [name for name in sorted(tensors) if name == pattern or fnmatchcase(name, pattern)]
    if not names:
        near = difflib.get_close_matches(pattern, list(tensors), n=3, cutoff=0.4) or sorted(tensors)[:3]
        hint = f"nearest: {', '.join(near) or 'it has no tensors at all'}"
        raise CheckpointError(f"no tensor matches {pattern!r}; {hint}")
    return names


def _checkpoint_record(step_dir: Path, listed: Manifest, state: Record) -> Record:
    entry = folders.look_at(step_dir, listed.step, folders.STEP)
    config, warnings = None, ["state.json has no configuration"]
    if state.get("config") is not None:
        try:
            config, warnings = Config.from_dict(state["config"])
        except ConfigError as error:
            warnings = [str(error)]
    for warning in [*(f"{step_dir}: {problem}" for problem in entry.problems), *warnings]:
        warn(warning)
    changed = {} if config is None else schema.diff(Config(), config)
    modules: dict[str, folders.Total] = {}  # a module of all layers is one entry, with ``*`` for the layer's number
    for name, (dtype, shape) in sorted(folders.weights_of(listed.tensors).items()):
        module = re.sub(r"\.[0-9]+(?=\.)", ".*", name).rpartition(".")[0] or name
        modules.setdefault(module, folders.Total()).add(dtype, shape)
    return {
        "path": str(entry.path), "saved": entry.saved, "bytes": listed.num_bytes, "files": len(listed.files),
        "complete": not entry.problems, **folders.facts(listed, state),
        "model": None if config is None else _model(config),
        "progress": {key: state[key] for key in _PROGRESS if key in state},
        **{key: state.get(key) for key in (*_STATE, "versions")},
        "changed_flags": {key: {"value": value, "default": default} for key, (default, value) in changed.items()},
        "by_kind": [
            {"kind": kind, "dtype": folders.SHORT_DTYPES.get(dtype, dtype), **vars(total)}
            for (kind, dtype), total in folders.by_kind(listed.tensors).items()
        ],
        "by_module": {module: vars(total) for module, total in modules.items()},
        "other_state": sorted(set(state) - _KNOWN_STATE),
    }  # fmt: skip


def _model(config: Config) -> str:
    model = config.model
    words = [
        plural(model.num_layers or 0, "layer"),
        f"hidden {model.hidden_size}",
        f"{model.num_attention_heads} heads",
    ]
    words += [f"{model.num_query_groups} kv heads"] if model.num_query_groups else []
    words += [f"ffn {model.ffn_hidden_size}"] if model.ffn_hidden_size else []
    words += [f"sequence {model.seq_length}", f"vocabulary {model.vocab_size}"]
    return f"{'BERT' if model.is_bert else 'GPT'}, {', '.join(words)}"


def _checkpoint_lines(record: Record) -> list[str]:
    fingerprint, versions, size = record["data_fingerprint"], record["versions"], format_bytes(record["bytes"])
    progress = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in record["progress"].items())
    rows = [
        ("saved", f"{folders.date(record['saved'])}, {size} in {plural(record['files'], 'file')}"),
        ("model", record["model"] or "unknown: no configuration"),
        ("parameters", f"{format_parameters(record['parameters'])} {'+'.join(record['dtypes'])}"),
        ("optimizer", ", ".join(record["optimizer"]) or "none"), ("progress", progress),
        ("processes", folders.layout_words(record["layout"])), ("schedule", _pairs(record["schedule"])),
        ("loss scaler", _pairs(record["loss_scaler"])), ("data", "-" if fingerprint is None else str(fingerprint)[:16]),
        ("versions", _pairs(versions if isinstance(versions, dict) else {})),
        *([("other state", ", ".join(record["other_state"]))] if record["other_state"] else []),
    ]  # fmt: skip

    def sizes(total: Record, share: str) -> tuple[str, ...]:
        return plural(total["tensors"], "tensor"), f"{total['elements']:,}", format_bytes(total["num_bytes"]), share

    lines, kinds = [record["path"], *aligned(rows)], record["by_kind"]
    whole = max(1, sum(row["num_bytes"] for row in kinds))
    cells = [(row["kind"], row["dtype"], *sizes(row, f"{100 * row['num_bytes'] / whole:.0f} %")) for row in kinds]
    lines += ["", "bytes by kind", *aligned(cells, (2, 3, 4, 5))]
    whole, modules = max(1, record["parameters"]), record["by_module"]
    cells = [(name, *sizes(total, f"{100 * total['elements'] / whole:.1f} %")) for name, total in modules.items()]
    lines += ["", "weights by module (a star: all layers)", *aligned(cells, (1, 2, 3, 4))]
    changed = record["changed_flags"].items()
    flags = [(_flag(key), _plain(e["value"]), f"(default {_plain(e['default'])})") for key, e in changed]
    lines += ["", f"flags that differ from their defaults: {len(flags)}", *aligned(flags)]
    if isinstance(record["tensors"], dict):  # else their number
        listed = record["tensors"].items()
        cells = [(name, t["dtype"], _plain(t["shape"]), format_bytes(t["bytes"])) for name, t in listed]
        lines += ["", "tensors", *aligned(cells, (3,))]
    if "values" in record:
        cells = [("tensor", *_STATISTICS, *_COUNTS)]
        for name, statistics in record["values"].items():
            numbers = ["-" if statistics[key] is None else f"{statistics[key]:.6g}" for key in _STATISTICS]
            cells.append((name, *numbers, *(f"{statistics[key]:,}" for key in _COUNTS)))
        lines += ["", "values (of the finite ones)", *aligned(cells, range(1, 10))]
    return lines


def _flag(field: str) -> str:
    return "--" + field.rpartition(".")[2].replace("_", "-")


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
    """A tensor that differs between the checkpoints."""

    name: str
    a: str | None  # dtype and shape; None if the tensor is absent
    b: str | None
    max_abs: float | None = None  # max|a-b|; None if values were not compared
    max_rel: float | None = None  # max|a-b| / max|b|
    beyond: int = 0  # number of values beyond the tolerances
    values: int = 0


def diff(
    a: Path, b: Path, *, tensors: str | None, weights_only: bool, rtol: float | None, atol: float | None, as_json: bool
) -> int:
    """Print the differences of two checkpoints, or of the ``tensors`` that match a pattern; return 0 if there are none.

    Without tolerances values and dtypes must be equal.
    """
    for name, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} ({value}) must be a number of at least 0")
    step_dirs = folders.step_folder(a), folders.step_folder(b)
    lists = read_manifest(step_dirs[0]), read_manifest(step_dirs[1])
    rows = [] if tensors is not None else _state_differences(step_dirs, lists)
    pattern = tensors or "*"
    chosen: list[Tensors] = []
    for listed in lists:
        kept = folders.weights_of(listed.tensors) if weights_only else listed.tensors
        chosen.append({name: kept[name] for name in kept if name == pattern or fnmatchcase(name, pattern)})
    if tensors is not None and not any(chosen):
        where, way = f"{step_dirs[0]} or {step_dirs[1]}", "see megatron-sp ckpt show STEP --tensors"
        raise CheckpointError(f"no tensor of {where} matches {tensors!r}: {way}")
    differing = _tensor_differences(step_dirs, chosen[0], chosen[1], rtol, atol)
    compared, same = len(set(chosen[0]) | set(chosen[1])), not differing and not any(row.counts for row in rows)
    if as_json:
        records = [row._asdict() for row in differing]
        for tensor in records:  # JSON has no infinities: they become words
            tensor |= {key: str(x) for key, x in tensor.items() if isinstance(x, float) and not math.isfinite(x)}
        record = {
            "a": str(step_dirs[0]), "b": str(step_dirs[1]), "same": same, "state": [row._asdict() for row in rows],
            "compared_tensors": compared, "tensors": records,
        }  # fmt: skip
        print(json.dumps(record, indent=1))
    else:
        equal = f"{compared - len(differing):,} of {plural(compared, 'tensor')} equal"
        equal += "" if rtol is None and atol is None else " within the tolerances"
        verdict = f"{'the same' if same else 'different'}: {equal}"
        print(f"a: {step_dirs[0]}", f"b: {step_dirs[1]}", *_difference_lines(rows, differing), verdict, sep="\n")
    return EXIT_OK if same else EXIT_DIFFERENT


def _state_differences(step_dirs: Sequence[Path], lists: Sequence[Manifest]) -> list[Difference]:
    # the differences of ``state.json``: progress, schedule, flags; layout and versions do not count
    states = [read_state(folder) for folder in step_dirs]
    known = [folders.facts(*checkpoint) for checkpoint in zip(lists, states, strict=True)]
    layouts = [folders.layout_words(row["layout"]) for row in known]
    rows = [Difference(key, states[0].get(key), states[1].get(key)) for key in (*_PROGRESS, *_STATE)]
    rows.append(Difference("processes", layouts[0], layouts[1], counts=False))
    rows.append(Difference("versions", states[0].get("versions"), states[1].get("versions"), counts=False))
    try:
        old, new = (Config.from_dict(state.get("config"))[0] for state in states)
        changed = schema.diff(old, new)
    except ConfigError as error:
        warn(f"the configurations cannot be compared: {error}")
        changed = {}
    rows += [Difference(_flag(key), x, y, not key.startswith(_NOT_COUNTED)) for key, (x, y) in changed.items()]
    return [row for row in rows if row.a != row.b]


def _tensor_differences(
    step_dirs: Sequence[Path], a: Tensors, b: Tensors, rtol: float | None, atol: float | None
) -> list[TensorDifference]:  # fmt: skip
    # the tensors that are in one checkpoint only, or differ in dtype, shape or values
    from megatron_sp.commands.ckpt.tensors import distances

    def words(tensor: tuple[str, tuple[int, ...]] | None) -> str | None:
        return None if tensor is None else f"{folders.SHORT_DTYPES.get(tensor[0], tensor[0])} {list(tensor[1])}"

    both = [name for name in sorted(set(a) & set(b)) if a[name][1] == b[name][1]]
    others = sorted((set(a) | set(b)) - set(both))
    rows = [TensorDifference(name, words(a.get(name)), words(b.get(name))) for name in others]
    is_exact = rtol is None and atol is None
    for name, far in distances(step_dirs, both, rtol or 0.0, atol or 0.0):
        if far.beyond or (is_exact and a[name][0] != b[name][0]):
            found = far.max_abs, far.max_rel(), far.beyond, far.count
            rows.append(TensorDifference(name, words(a[name]), words(b[name]), *found))
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
    if rest:  # what has no common shape first, then weights, then by distance
        rest.sort(key=lambda r: (r.max_rel is not None, kind_of(r.name)[0] != WEIGHTS, -(r.max_rel or 0.0), r.name))
        table = [("", "a", "b", "max|a-b|", "/max|b|", "values beyond")]
        for row in rest[:_MAX_ROWS]:
            a, b, cells = row.a or "absent", row.b or "absent", ("-", "-", "-")
            if row.max_abs is not None and row.max_rel is not None:
                b = "same" if a == b else b
                cells = f"{row.max_abs:.3g}", f"{row.max_rel:.3g}", f"{row.beyond:,} of {row.values:,}"
            table.append((row.name, a, b, *cells))
        lines += ["tensors:", *aligned(table, (3, 4))]
        lines += [f"  ... and {len(rest) - _MAX_ROWS} more (--json has all)"] if len(rest) > _MAX_ROWS else []
    sides = Counter((kind_of(row.name)[0], "b" if row.a is None else "a") for row in alone)
    lines += [f"{kind}: {plural(count, 'tensor')} only in {side}" for (kind, side), count in sorted(sides.items())]
    kinds: dict[str, list[TensorDifference]] = {}
    for tensor in tensors:
        if tensor.max_abs is not None:
            kinds.setdefault(kind_of(tensor.name)[0], []).append(tensor)
    for kind, of_kind in sorted(kinds.items(), key=lambda item: (item[0] != WEIGHTS, item[0])):
        far, worst = max(row.max_abs or 0.0 for row in of_kind), max(row.max_rel or 0.0 for row in of_kind)
        counted = f"{plural(len(of_kind), 'tensor')} with other values"
        lines.append(f"{kind}: {counted}, max|a-b| up to {far:.3g}, relative up to {worst:.3g}")
    return lines
