"""Fine-tune a classifier on a pretrained BERT: the same as ``megatron-sp finetune``."""

from megatron_sp.commands.finetune import main
from megatron_sp.utils.program import run_program

if __name__ == "__main__":
    run_program(main)
