"""Convert checkpoints of Hugging Face, Megatron and Megatron-DeepSpeed: the same as ``megatron-sp convert``."""

import sys

from megatron_sp.commands.cli import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(lambda: main(["convert", *sys.argv[1:]]))
