"""Write a JSONL corpus of the text that comes with Python: the same as ``megatron-sp data corpus``."""

from door import enter

if __name__ == "__main__":
    enter("data corpus")
