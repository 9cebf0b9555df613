"""Draw the curves of runs: the same as ``megatron-sp plot``."""

from door import enter

if __name__ == "__main__":
    enter("plot", "plot")
