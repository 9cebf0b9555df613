"""Convert checkpoints of Hugging Face, Megatron and Megatron-DeepSpeed: the same as ``megatron-sp convert``."""

import sys

from door import enter

if __name__ == "__main__":
    enter("convert", "megatron_sp.commands.cli", ["convert", *sys.argv[1:]])
