"""Flat buffers, ZeRO, optimizers, gradient norm and learning rate schedule."""
