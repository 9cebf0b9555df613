"""Data pipeline: preprocessing, indexed data sets, samples, batches and tokenizers."""
