"""Tokenize text into .bin and .idx: ``python tools/preprocess_data.py --input x.jsonl --output-prefix data/x --append-eod ...``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package beside this folder, installed or not

from megatron_sp.utils.program import run_program


def main(argv: list[str] | None = None) -> int:
    from megatron_sp.data.preprocess_cli import main  # imports numpy, which wants memory

    return main(argv)


if __name__ == "__main__":
    run_program(main)
