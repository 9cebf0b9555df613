"""The way from a script of this folder into the package; each script is one command of ``megatron-sp``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NoReturn


def enter(command: str, module: str, argv: list[str] | None = None) -> NoReturn:
    """Run a command's program and exit with its code.

    Without the package a script says so in one line and exits with code 2: Python looks for imports in this folder, not
    in the repository that it belongs to.

    Args:
        command: the words that select it after ``megatron-sp``.
        module: the module with its ``main``.
        argv: the words for ``main`` (default: those of the command line).
    """
    try:
        main = importlib.import_module(module).main
        from megatron_sp.utils.entry_point import run_program
    except ModuleNotFoundError as error:
        if error.name != "megatron_sp":
            raise
        print(
            f"error: the package megatron_sp is not installed in {sys.prefix}: run `pip install -e .` in"
            f" {Path(__file__).resolve().parents[1]}, or `python -m megatron_sp {command} ...` there",
            file=sys.stderr,
        )
        sys.exit(2)
    run_program(lambda: main(argv))
