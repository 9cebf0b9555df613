"""Fine-tune a classifier on a pretrained BERT: the same as ``megatron-sp finetune``."""

from door import enter

if __name__ == "__main__":
    enter("finetune", "finetune")
