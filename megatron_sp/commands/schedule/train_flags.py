"""Command line of training an external model: the flags of every training, and ``--model FOLDER``, whose config.json gives the shape.

Nothing here imports torch, so that errors are reported at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config

_NAMES = {
    "--num-layers": ("num_hidden_layers", "n_layer"), "--hidden-size": ("hidden_size", "n_embd"),
    "--num-attention-heads": ("num_attention_heads", "n_head"), "--num-query-groups": ("num_key_value_heads",),
    "--ffn-hidden-size": ("intermediate_size", "n_inner"), "--kv-channels": ("head_dim",), "--vocab-size": ("vocab_size",),
    "--max-position-embeddings": ("max_position_embeddings", "n_positions"),
}  # fmt: skip


LONG = {"tp": "tensor-model-parallel-size", "sp": "sequence-parallel-size", "cp": "context-parallel-size"}


def parse_external(
    argv: Sequence[str] | None = None, *, description: str, family: str, prog: str | None = None
) -> tuple[Config, str | None]:
    """Return (configuration, folder of the model or None), for an entry point; prints and exits like ``parse_config``.

    Args:
        argv: the arguments after the program's name (default: this process's).
        description: first line of --help.
        family: "gpt" or "bert": the kind of data that the model is trained on.
        prog: the program's name in --help.
    """
    from megatron_sp.commands.pretrain import parse_config  # not for `megatron-sp --help`

    prog = prog or os.path.basename(sys.argv[0])
    try:
        words, folder = take_folder(list(sys.argv[1:] if argv is None else argv))
        shape = [] if folder is None else flags_of(folder)
    except ReportedError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    more = f"{description} Besides the flags below: --model FOLDER, a local config.json, and weights if they are there."
    return parse_config([*shape, *words], prog=prog, description=more, family=family), folder


def take_folder(words: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without ``--model FOLDER``, and the folder."""
    rest, folder, at = [], None, 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        if name != "--model":
            rest.append(words[at])
        elif equals:
            folder = value
        elif at + 1 < len(words):
            at += 1
            folder = words[at]
        else:
            raise ConfigError("--model needs a folder with a config.json")
        at += 1
    return rest, folder


def flags_of(folder: str) -> list[str]:
    """Return the shape in a config.json as flags; later flags on the command line take precedence.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    path = Path(folder) / "config.json"
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {folder}: {path} cannot be read ({error}): give a local folder with transformers' config.json"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"--model {folder}: {path} must be an object")
    words = []
    for flag, names in _NAMES.items():
        value = next((found[name] for name in names if isinstance(found.get(name), int)), None)
        words += [] if value is None else [flag, str(value)]
    return words
