"""Convert checkpoints of Hugging Face, Megatron and Megatron-DeepSpeed: the same as ``megatron-sp convert``."""

from door import enter

if __name__ == "__main__":
    enter("convert")
