"""The door to ``megatron-sp chaos``: the program is ``tools/chaos`` of the repository, and no part of the wheel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from megatron_sp.utils.errors import ConfigError

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "chaos"


def main(argv: list[str], prog: str) -> int:
    """Run the program; return its exit code. Raises ConfigError: it is not beside the package."""
    load()
    code: int = importlib.import_module("chaos.command").main(argv, prog)
    return code


def load() -> None:
    """Make the program importable as ``chaos``, without tools/ on the path, whose names other packages have, too.

    Raises:
        ConfigError: it is not beside the package.
    """
    if not (PROGRAM / "__init__.py").is_file():
        raise ConfigError(
            "megatron-sp chaos is a program of the repository, tools/chaos, which an installed package does not have"
            f" ({PROGRAM} is not there): run `pip install -e .` in a clone of the repository, and the same command"
            " again"
        )
    if "chaos" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "chaos", PROGRAM / "__init__.py", submodule_search_locations=[str(PROGRAM)]
        )
        assert spec is not None
        sys.modules["chaos"] = importlib.util.module_from_spec(spec)
