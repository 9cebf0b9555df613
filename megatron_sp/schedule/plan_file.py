"""Schedules as YAML files, which can be read, reviewed and kept with a model, and cannot contain code.

    schema: 1
    model_type: llama
    transformers: ">=5.23,<6"
    seq_dim: 1
    lines:
      - {on: "model.layers.*.self_attn", do: sync, mode: fwd_pre, op: copy, arg: hidden_states}
      - {on: "model.layers.*.self_attn.{q,k,v}_proj", do: column, input: prepared}

Files are read with YAML's safe loader; every key, word and type is checked, every glob is matched against the model,
and error messages give the line number.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from megatron_sp.ops import availability
from megatron_sp.schedule.apply.ulysses import CONTEXT_OPTIONS, OPTIONS
from megatron_sp.schedule.core.directives import AXES_OF_LINES, Directive, PathError, expand
from megatron_sp.schedule.core.hooks import MODES, OPS
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.files import read_text, write_output

SCHEMA = 1
MAX_FILE_BYTES = 1024 * 1024
_MAX_DEPTH = 6
_HEAD = ("schema", "model_type", "transformers", "seq_dim", "lines")
_NUMBER, _WORD, _FLAG = (int,), (str,), (bool,)
_TYPES = {int: "a whole number", str: "a word", bool: "true or false", list: "a list", dict: "settings",
          object: "a value"}  # fmt: skip
_LISTS_OF_NAMES = ("names", "inputs")  # other lists are of sizes
_CUT: dict[str, tuple[type, ...]] = {"blocks": (int, list), "heads": _NUMBER}
# keys of each kind of line, with their types
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "shard": {"tensor": _WORD, "axis": _NUMBER, **_CUT},
    "column": {"input": _WORD, "gather": _FLAG, "replicas": _FLAG, **_CUT},
    "row": {"reduce": _WORD, "axis": _NUMBER, **_CUT},
    "sync": {
        "mode": _WORD, "op": _WORD, "axis": _NUMBER, "arg": (int, str), "out": (int, str), "grad": _WORD, "over": _WORD,
    },
    "vocab_parallel": {},
    "sum_gradients": {"names": (list,)},
    "checkpoint": {"policy": _WORD},
    "rng": {"axis": _WORD},
    "set": {"attribute": _WORD, "value": (object,), "divide": _WORD},
    "annotate": {"parameter": _WORD, "key": _WORD, "value": (object,)},
    "sequence": {"leave": _WORD, "inside": _WORD, "arg": (int, str)},
    "ulysses": {"axis": _WORD, **OPTIONS},
    "context": {"axis": _WORD, **CONTEXT_OPTIONS},
    "zero": {"stage": _NUMBER, "optimizer": (dict,), "micro_batches": _NUMBER, "blocks": _WORD},
}  # fmt: skip
_NEEDED = {
    "shard": ("tensor", "axis"), "row": ("reduce",), "sync": ("mode", "op"), "set": ("attribute",), "rng": ("axis",),
    "annotate": ("parameter", "key"), "sequence": ("leave",), "ulysses": ("axis",), "context": ("axis",),
    "zero": ("stage",),
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": MODES, "op": OPS, "grad": ("reduce_scatter", "slice"), "over": AXES_OF_LINES, "divide": AXES_OF_LINES,
    "input": ("copy", "prepared"), "reduce": ("all_reduce", "reduce_scatter"),
}  # fmt: skip


def save(path: str | Path, model: nn.Module, directives: list[Directive], seq_dim: int) -> None:
    """Write a schedule file."""
    if refused := [f"{d} ({d.where})" for d in directives if not _is_plain(d.args)]:
        later = "Save before these lines, and add them in code after load()"
        raise ConfigError(f"{path} is not written, for it cannot hold what is code: {'; '.join(refused)}. {later}")
    head: dict[str, Any] = {"schema": SCHEMA}
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(model_type, str) and model_type:
        head["model_type"] = model_type
    is_hugging_face = any(c.__module__.startswith("transformers.") for c in type(model).__mro__)
    if (version := _version()) is not None and is_hugging_face:
        head["transformers"] = f">={version[0]}.{version[1]},<{version[0] + 1}"
    head["seq_dim"] = seq_dim
    lines = ["lines:" if directives else "lines: []"]
    for d in directives:
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in {"on": d.on, "do": d.do, **d.args}.items()}
        line = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
        # YAML 1.1 reads `on` as true, so it comes quoted; the reader here knows
        lines.append("  - " + line.strip().replace("{'on':", "{on:", 1))
    try:
        write_output(path, "\n".join([yaml.safe_dump(head, sort_keys=False).rstrip(), *lines]) + "\n")
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from None


def _is_plain(value: Any) -> bool:
    # whether a value is a JSON value
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def load(path: str | Path, model: nn.Module) -> tuple[list[Directive], int]:
    """Read the lines and the dim of positions from a schedule file.

    Raises ConfigError: it is no schedule, or was written for another model or transformers.
    """
    name, file = str(path), Path(path).name
    data, numbers = _read(path)
    head = _mapping(data, name, "a schedule")
    _require_known(head, _HEAD, name)
    schema, seq_dim, lines = head.get("schema"), head.get("seq_dim", 1), head.get("lines")
    if schema != SCHEMA or isinstance(schema, bool):
        reads = f"this version reads schema {SCHEMA}: save the schedule again"
        raise ConfigError(f"{name}: schema is {schema!r}, and {reads}")
    _require_model(head, model, name)
    if not isinstance(seq_dim, int) or isinstance(seq_dim, bool) or not -8 <= seq_dim < 8:
        raise ConfigError(f"{name}: seq_dim is {seq_dim!r}, and must be a dim of activations: 1 of [b, s, h]")
    if not isinstance(lines, list):
        what = "must be a list of lines like {on: 'layers.*.fc1', do: column}"
        raise ConfigError(f"{name}: lines is {lines!r}, and {what}")
    places = [f"{file}:{numbers[i]}" if i < len(numbers) else file for i in range(len(lines))]
    return [_directive(line, where, model) for line, where in zip(lines, places, strict=True)], seq_dim


def _directive(line: Any, where: str, model: nn.Module) -> Directive:
    if isinstance(line, dict):
        line = {"on" if key is True else key: value for key, value in line.items()}  # what YAML 1.1 makes of `on`
    args = dict(_mapping(line, where, "a line"))
    on, do = args.pop("on", None), args.pop("do", None)
    if not isinstance(on, str) or not isinstance(do, str):
        raise ConfigError(f"{where}: a line says `on`, a glob of modules, and `do`: it has {on!r} and {do!r}")
    if do not in _KEYS:
        raise ConfigError(f"{where}: do {do!r} is not known{_near(do, _KEYS)}; a file can have {', '.join(_KEYS)}")
    _require_known(args, tuple(_KEYS[do]), f"{where}: {do}")
    if missing := [key for key in _NEEDED.get(do, ()) if key not in args]:
        raise ConfigError(f"{where}: {do} needs {', '.join(missing)}")
    for key, value in args.items():
        types, what = _KEYS[do][key], f"{where}: {key} of {do} is {value!r}, and must be"
        is_right = isinstance(value, types) and (not isinstance(value, bool) or bool in types or object in types)
        if not is_right or not _is_plain(value):
            raise ConfigError(f"{what} {' or '.join(_TYPES[t] for t in types)}")
        if key in _CHOICES and value not in _CHOICES[key]:
            near, known = _near(value, _CHOICES[key]), ", ".join(_CHOICES[key])
            raise ConfigError(f"{where}: {key} {value!r} is not known{near}: it is one of {known}")
        kind, name = (str, "names") if key in _LISTS_OF_NAMES else (int, "sizes")
        if isinstance(value, list) and not all(isinstance(v, kind) for v in value):
            raise ConfigError(f"{what} a list of {name}")
    try:
        for glob in (on, *(args[key] for key in ("enter", "leave", "inside", "core") if key in args)):
            expand(model, glob)
    except PathError as error:
        raise PathError(f"{where}: {error}") from None
    return Directive(on, do, args, where)


def _mapping(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: {what} is written as `key: value`, and this is {type(value).__name__}")
    return value


def _require_known(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where} does not know {key!r}{_near(key, known)}, only {', '.join(known)}")


def _near(word: str, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _require_model(head: dict[str, Any], model: nn.Module, name: str) -> None:
    # raise ConfigError if a file was written for another model, or another version of transformers
    wanted, model_type = head.get("model_type"), getattr(getattr(model, "config", None), "model_type", None)
    if wanted is not None and wanted != model_type:
        it_is = f"this {type(model).__name__} is {model_type or 'none'}"
        raise ConfigError(f"{name} is for models of type {wanted!r}, and {it_is}: use its own schedule")
    spec, version = head.get("transformers"), _version()
    if spec is None:
        return
    if version is None:
        raise ConfigError(f"{name} is for transformers {spec}, which is not installed here: pip install -e '.[hf]'")
    for part in str(spec).split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+){0,2})\s*", part)
        if match is None or not isinstance(spec, str):
            what = "must be a range of versions such as '>=5.23,<6'"
            raise ConfigError(f"{name}: transformers is {spec!r}, and {what}")
        sign, bound = match[1], tuple(map(int, match[2].split(".")))
        full = (*bound, 0, 0, 0)[:3]
        holds = {">=": version >= full, "<=": version <= full, ">": version > full, "<": version < full}
        # 5.23 is every 5.23.x
        holds |= {"==": version[: len(bound)] == bound, "!=": version[: len(bound)] != bound}
        if not holds[sign]:
            here = ".".join(map(str, version))
            raise ConfigError(f"{name} is for transformers {spec}, and here is {here}: verify() it, and save it again")


def _version() -> tuple[int, ...] | None:
    kernel = availability.installed("transformers")
    return (*map(int, re.findall(r"\d+", kernel.version)[:3]), 0, 0, 0)[:3] if kernel.available else None


def _read(path: str | Path) -> tuple[Any, list[int]]:
    # (contents of a file, line number of each entry of ``lines``)
    text = read_text(path, str(path), MAX_FILE_BYTES, "a schedule")
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):  # references can make a small file huge
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ConfigError(f"{path} line {line}: a schedule has neither deep nesting nor references")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _require_once(root, str(path))
        items = root.value if isinstance(root, yaml.MappingNode) else ()
        lines = next((value for key, value in items if key.value == "lines"), None)
        numbers = [item.start_mark.line + 1 for item in lines.value] if isinstance(lines, yaml.SequenceNode) else []
        return yaml.safe_load(text), numbers
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{f' line {mark.line + 1}' if mark else ''}: not a schedule in YAML: {what}") from None


def _require_once(node: Any, name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                raise ConfigError(f"{name} line {key.start_mark.line + 1}: {key.value} is written twice")
            seen.add(str(key.value))
            _require_once(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_once(value, name)
