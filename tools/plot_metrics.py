"""Draw the curves of runs: the same as ``megatron-sp plot``."""

from megatron_sp.commands.plot import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
