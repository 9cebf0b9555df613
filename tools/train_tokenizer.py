"""Train a tokenizer: the same as ``megatron-sp tokenizer``."""

from megatron_sp.commands.tokenizer import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
