"""Summarize a run in a few lines: the same as ``megatron-sp summarize``."""

from door import enter

if __name__ == "__main__":
    enter("summarize", "summarize")
