"""Make a task to fine-tune on: the same as ``megatron-sp data section-task``."""

from megatron_sp.commands.section_task import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
