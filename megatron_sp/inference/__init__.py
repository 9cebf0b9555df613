"""Trained models at work: generation with a key/value cache, evaluation, serving."""
