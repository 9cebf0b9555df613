"""Serve a trained GPT over HTTP: the same as ``megatron-sp serve``."""

from megatron_sp.commands.serve import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
