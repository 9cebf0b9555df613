"""Train a tokenizer: the same as ``megatron-sp tokenizer``."""

from door import enter

if __name__ == "__main__":
    enter("tokenizer", "tokenizer")
