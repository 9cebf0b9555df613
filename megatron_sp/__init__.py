"""Megatron-style pretraining of GPT and BERT in plain PyTorch, with the parallel layers written out by hand.

Importing this package loads nothing else: no torch, no environment variable, no output.
"""

__version__ = "0.3.0"
