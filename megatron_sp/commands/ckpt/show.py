"""``ckpt show``: one checkpoint in full: model, progress, schedule, flags, versions, bytes by kind and by module, tensors, values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.manifest import Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt.facts import facts, layout_words
from megatron_sp.commands.ckpt.names import by_kind, by_module, kind_of, matching, num_bytes
from megatron_sp.commands.ckpt.places import step_folder
from megatron_sp.commands.ckpt.survey import STEP, Entry, look_at
from megatron_sp.commands.ckpt.text import SHORT_DTYPES, Progress, aligned, date, plural, warn
from megatron_sp.config.schema import Config, ModelConfig, diff
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_bytes, format_parameters

_PROGRESS = ("step", "consumed_samples", "scheduled_samples", "consumed_tokens", "num_updates", "skipped_steps", "bad_steps")
_STATISTICS = ("min", "max", "mean", "std", "norm")
_COUNTS = ("count", "zeros", "nan", "infinite")
Record = dict[str, Any]


def run(path: Path, ckpt_step: int | None, *, tensors: str | None, values: Sequence[str], as_json: bool) -> int:
    """Print one checkpoint.

    Args:
        tensors: list the tensors whose names match this pattern; None: list none.
        values: names or patterns of tensors whose values are read for statistics.
    Raises:
        CheckpointError: the checkpoint is missing, its manifest or state is damaged, or no tensor matches.
    """
    step_dir = step_folder(path, ckpt_step)
    listed, state = read_manifest(step_dir), read_state(step_dir)
    listing = [] if tensors is None else matching(listed.tensors, tensors)
    wanted = list(dict.fromkeys(name for pattern in values for name in matching(listed.tensors, pattern)))
    entry = look_at(step_dir, listed.step, STEP)
    for problem in entry.problems:
        warn(f"{step_dir}: {problem}")
    record = _record(entry, listed, state)
    if tensors is not None:
        record["tensors"] = {name: _tensor(listed, name) for name in listing}
    if wanted:
        record["values"] = read_values(step_dir, wanted)
    print(json.dumps(record, indent=1) if as_json else "\n".join(_text(record)))
    return 0


def read_values(step_dir: Path, names: Sequence[str]) -> dict[str, Record]:
    """Return statistics of these tensors, which are read one block at a time."""
    from megatron_sp.checkpoint.stream import NativeReader
    from megatron_sp.commands.ckpt.values import Values

    reader = NativeReader(step_dir, verified=True)
    with Progress("reading tensors", sum(reader.tensors()[name].num_bytes for name in names)) as progress:
        return {name: Values.of(reader.blocks(name), progress.add).to_dict() for name in names}


def _record(entry: Entry, listed: Manifest, state: Record) -> Record:
    config, warnings = _config_of(state)
    for warning in warnings:
        warn(warning)
    changed = {} if config is None else diff(Config(), config)
    return {
        "path": str(entry.path), "saved": entry.saved, "bytes": listed.num_bytes, "files": len(listed.files), "complete": entry.is_complete,
        **facts(listed, state),
        "model": None if config is None else _model_words(config.model),
        "progress": {key: state[key] for key in _PROGRESS if key in state},
        **{key: state.get(key) for key in ("schedule", "loss_scaler", "data_fingerprint", "versions")},
        "changed_flags": {key: {"value": value, "default": default} for key, (default, value) in changed.items()},
        "by_kind": [
            {"kind": kind, "dtype": SHORT_DTYPES.get(dtype, dtype), **vars(total)}
            for (kind, dtype), total in by_kind(listed.tensors).items()
        ],
        "by_module": {module: vars(total) for module, total in by_module(listed.tensors).items()},
        "other_state": sorted(set(state) - _KNOWN_STATE),
    }  # fmt: skip


_KNOWN_STATE = {
    *_PROGRESS, "schedule", "loss_scaler", "data_fingerprint", "evaluation_data", "samples", "tokenizer", "versions", "config", "layout",
    "has_optimizer", "format_version",
}  # fmt: skip


def _config_of(state: Record) -> tuple[Config | None, list[str]]:
    if state.get("config") is None:
        return None, ["state.json has no configuration"]
    try:
        return Config.from_dict(state["config"])
    except ConfigError as error:
        return None, [str(error)]


def _model_words(model: ModelConfig) -> str:
    words = [plural(model.num_layers or 0, "layer"), f"hidden {model.hidden_size}", f"{model.num_attention_heads} heads"]
    words += [f"{model.num_query_groups} kv heads"] if model.num_query_groups else []
    words += [f"ffn {model.ffn_hidden_size}"] if model.ffn_hidden_size else []
    words += [f"sequence {model.seq_length}", f"vocabulary {model.vocab_size}"]
    return f"{'BERT' if model.is_bert else 'GPT'}, {', '.join(words)}"


def _tensor(listed: Manifest, name: str) -> Record:
    dtype, shape = listed.tensors[name]
    return {"dtype": SHORT_DTYPES.get(dtype, dtype), "shape": list(shape), "bytes": num_bytes(dtype, shape), "kind": kind_of(name)[0]}


def _text(record: Record) -> list[str]:
    versions = record["versions"] if isinstance(record["versions"], dict) else {}
    rows = [
        ("saved", f"{date(record['saved'])}, {format_bytes(record['bytes'])} in {plural(record['files'], 'file')}"),
        ("model", record["model"] or "unknown: no configuration"),
        ("parameters", f"{format_parameters(record['parameters'])} {'+'.join(record['dtypes'])}"),
        ("optimizer", ", ".join(record["optimizer"]) or "none"),
        ("progress", ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in record["progress"].items())),
        ("processes", layout_words(record["layout"])),
        ("schedule", _pairs(record["schedule"])),
        ("loss scaler", _pairs(record["loss_scaler"])),
        ("data", _short(record["data_fingerprint"])),
        ("versions", _pairs(versions)),
    ]
    if record["other_state"]:
        rows.append(("other state", ", ".join(record["other_state"])))
    lines = [record["path"], *aligned(rows)]
    lines += ["", "bytes by kind", *_kind_rows(record), "", "weights by module (a star: all layers)", *_module_rows(record)]
    flags = [(_flag(key), _plain(e["value"]), f"(default {_plain(e['default'])})") for key, e in record["changed_flags"].items()]
    lines += ["", f"flags that differ from their defaults: {len(flags)}", *aligned(flags)]
    lines += ["", "tensors", *_tensor_rows(record["tensors"])] if isinstance(record["tensors"], dict) else []
    lines += ["", "values (of the finite ones)", *_value_rows(record["values"])] if "values" in record else []
    return lines


def _kind_rows(record: Record) -> list[str]:
    kinds = record["by_kind"]
    whole = max(1, sum(row["num_bytes"] for row in kinds))
    rows = [(row["kind"], row["dtype"], *_size_cells(row), f"{100 * row['num_bytes'] / whole:.0f} %") for row in kinds]
    return aligned(rows, (2, 3, 4, 5))


def _module_rows(record: Record) -> list[str]:
    whole = max(1, record["parameters"])
    rows = [(name, *_size_cells(total), f"{100 * total['elements'] / whole:.1f} %") for name, total in record["by_module"].items()]
    return aligned(rows, (1, 2, 3, 4))


def _size_cells(total: Record) -> tuple[str, str, str]:
    return plural(total["tensors"], "tensor"), f"{total['elements']:,}", format_bytes(total["num_bytes"])


def _tensor_rows(tensors: Record) -> list[str]:
    return aligned([(name, t["dtype"], _plain(t["shape"]), format_bytes(t["bytes"])) for name, t in tensors.items()], (3,))


def _value_rows(values: Record) -> list[str]:
    rows: list[tuple[str, ...]] = [("tensor", *_STATISTICS, *_COUNTS)]
    for name, found in values.items():
        numbers = ["-" if found[key] is None else f"{found[key]:.6g}" for key in _STATISTICS]
        rows.append((name, *numbers, *(f"{found[key]:,}" for key in _COUNTS)))
    return aligned(rows, range(1, 10))


def _flag(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


def _pairs(value: Any) -> str:
    if not isinstance(value, dict):
        return "-" if value is None else _plain(value)
    return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items() if entry is not None)


def _short(fingerprint: Any) -> str:
    return "-" if fingerprint is None else str(fingerprint)[:16]


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
