"""Make a task to fine-tune on: the same as ``megatron-sp data section-task``."""

from door import enter

if __name__ == "__main__":
    enter("data section-task")
