"""Write the page about a run: the same as ``megatron-sp report``."""

from megatron_sp.commands.report import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
