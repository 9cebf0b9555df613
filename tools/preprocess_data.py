"""Tokenize text into .bin and .idx: the same as ``megatron-sp preprocess``."""

from door import enter

if __name__ == "__main__":
    enter("preprocess", "preprocess")
