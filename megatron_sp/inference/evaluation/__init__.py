"""Evaluation of trained models: perplexity, last words, multiple choice, masked tokens."""
