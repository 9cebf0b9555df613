"""Continue text with a trained model: the same as ``megatron-sp generate``."""

from megatron_sp.commands.generate import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
