"""Continue text with a trained model: the same as ``megatron-sp generate``."""

from door import enter

if __name__ == "__main__":
    enter("generate", "generate")
