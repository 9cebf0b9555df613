"""Completions endpoint for a model: requests, queue, continuous batching, HTTP."""
