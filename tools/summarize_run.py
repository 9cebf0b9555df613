"""Summarize a run in a few lines: the same as ``megatron-sp summarize``."""

from megatron_sp.commands.summarize import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
