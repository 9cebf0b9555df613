"""Local maths: each op with a plain PyTorch form; knows nothing of ranks."""
