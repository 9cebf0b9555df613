"""Tokenize text into .bin and .idx: the same as ``megatron-sp preprocess``."""

from megatron_sp.commands.preprocess import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
