"""Have a trained BERT guess hidden words: the same as ``megatron-sp fill-mask``."""

from megatron_sp.commands.fill_mask import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
