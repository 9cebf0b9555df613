"""Have a trained BERT guess hidden words: the same as ``megatron-sp fill-mask``."""

from door import enter

if __name__ == "__main__":
    enter("fill-mask", "fill_mask")
