"""Flags from a YAML file, with the same names, values and checks as on the command line.

The file is parsed into nodes only and never constructed into objects, so a tag such as ``!!python/object`` is rejected
as mere text; words keep their spelling in the file (``1e-4`` is a number here, though YAML 1.1 calls it a string), and
every message can name its line. Keys are flag names with ``-`` or ``_``, flat or under the name of their group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import yaml

from megatron_sp.config.flags.flag_names import Setting, canonical
from megatron_sp.config.schema import GROUPS
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import read_text

MAX_FILE_BYTES = 256 * 1024  # a whole configuration takes 5 KB, a blend of a thousand data sets fits as well
_MAX_DEPTH = 5  # group, flag, list; two more, so that deeper nesting gets a message of its own
_TAG = "tag:yaml.org,2002:"
_SCALARS = ("str", "int", "float", "bool", "null", "timestamp")


def read_config_file(path: str) -> list[Setting]:
    """Read the settings of a YAML file, in its order; empty values (``null``, ``[]``) keep the default.

    Raises:
        ConfigError: the file is missing, too large, not YAML, or contains anything but flags with words or lists of
            words.
    """
    name = os.path.basename(path)
    text = read_text(path, f"--config {path}", MAX_FILE_BYTES, "a file of flags")
    try:
        _check_depth(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"--config {path}{f' line {mark.line + 1}' if mark else ''}: not YAML: {getattr(error, 'problem', '')}"
        ) from None
    empty = root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _TAG + "null")
    return [] if empty else list(_settings(root, name, inside=""))


def _check_depth(text: str, path: str) -> None:
    """Reject deeply nested YAML, on which composing would spend seconds; events are read one by one, so this stops
    early.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"--config {path}: nested too deeply; flags are flat or under the name of their group")


def _settings(node: Any, name: str, inside: str) -> Iterator[Setting]:
    if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
        raise ConfigError(f"{_line(name, node)}: expected lines of 'flag: value'{f' under {inside}' if inside else ''}")
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not _plain(key):
            raise ConfigError(f"{_line(name, key)}: expected the name of a flag")
        flag = canonical(key.value)
        if flag in seen:
            raise ConfigError(f"{_line(name, key)}: {key.value} is given twice")
        seen.add(flag)
        if isinstance(value, yaml.MappingNode) and not inside:
            if key.value not in GROUPS:
                raise ConfigError(
                    f"{_line(name, key)}: {key.value} is not a group of flags; the groups are {', '.join(GROUPS)}"
                )
            yield from _settings(value, name, inside=key.value)
        else:
            words = tuple(_words(value, name, key.value))
            if words:
                yield Setting(flag, words, f"{_line(name, key)}: {key.value}")


def _words(node: Any, name: str, key: str) -> Iterator[str]:
    items = node.value if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq" else [node]
    for item in items:
        if not isinstance(item, yaml.ScalarNode) or not _plain(item):
            raise ConfigError(
                f"{_line(name, item)}: the value of {key} must be a word, a number, true, false, or a list of these"
            )
        if item.tag != _TAG + "null":
            yield item.value


def _plain(node: Any) -> bool:
    return node.tag.removeprefix(_TAG) in _SCALARS


def _line(name: str, node: Any) -> str:
    return f"{name} line {node.start_mark.line + 1}"
