"""Flat buffers, ZeRO, optimizers, gradient norm, learning rate."""
