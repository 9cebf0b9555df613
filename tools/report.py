"""Write the page about a run: the same as ``megatron-sp report``."""

from door import enter

if __name__ == "__main__":
    enter("report", "report")
