"""Local maths of one device, each operation with a plain PyTorch form."""
