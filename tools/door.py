"""The way from a script of this folder into the package; each script is one command of ``megatron-sp``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NoReturn


def enter(command: str, module: str = "cli") -> NoReturn:
    """Run ``megatron-sp COMMAND`` with the words of this command line, and exit with its code.

    Without the package a script says so in one line and exits with code 2: Python looks for imports in this folder, not
    in the repository that it belongs to.

    Args:
        module: the command's own program in megatron_sp/commands, if it has one.
    """
    words = [*(command.split() if module == "cli" else []), *sys.argv[1:]]
    try:
        main = importlib.import_module(f"megatron_sp.commands.{module}").main
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
    run_program(lambda: main(words))
