"""Inference: generation with a KV cache, evaluation, serving."""
