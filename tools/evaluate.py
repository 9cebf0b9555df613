"""Report how good a trained model is: the same as ``megatron-sp evaluate``."""

from megatron_sp.commands.evaluate import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
