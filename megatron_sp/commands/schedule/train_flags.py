"""Command line of training an external model: the flags of every training, and ``--model FOLDER``, whose config.json gives the shape.

Nothing here imports torch, so that errors are reported at once, except for folders whose file only transformers can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_sp.config.schema import raise_all
from megatron_sp.tasks.external_shape import REQUIRED, contradictions, shape_of
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config

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
        shape = {} if folder is None else _shape(folder)
    except ReportedError as error:
        raise SystemExit(_told(error)) from None
    more = f"{description} Besides the flags below: --model FOLDER, a local config.json, and weights if they are there."
    flags = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = parse_config([*flags, *words], prog=prog, description=more, family=family)
    if folder is not None:
        try:
            raise_all(list(contradictions(config, shape, folder)))
        except ReportedError as error:
            raise SystemExit(_told(error)) from None
    return config, folder


def _shape(folder: str) -> dict[str, int]:
    """Return the shape of a folder's model; transformers is imported only if the file does not name it as most do."""
    shape = shape_of(folder)
    if all(field in shape for field in REQUIRED):
        return shape
    from megatron_sp.tasks.external_weights import whole_shape_of

    return whole_shape_of(folder)


def _told(error: ReportedError) -> int:
    """Print a message, on the first rank; return the exit code."""
    if is_first_rank():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


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
