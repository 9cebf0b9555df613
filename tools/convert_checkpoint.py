#!/usr/bin/env python
"""Convert checkpoints between this package, Hugging Face, Megatron and Megatron-DeepSpeed.

    python tools/convert_checkpoint.py --from hf --input llama-3.2-1b --to megatron_sp --output runs/llama

The same as ``megatron-sp convert``; docs/convert.md has the formats.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.commands.cli import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(lambda: main(["convert", *sys.argv[1:]]))
