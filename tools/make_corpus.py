"""Write a JSONL corpus of the text that comes with Python: the same as ``megatron-sp data corpus``."""

from megatron_sp.commands.corpus import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
