"""Report how good a trained model is: the same as ``megatron-sp evaluate``."""

from door import enter

if __name__ == "__main__":
    enter("evaluate", "evaluate")
