"""A completions endpoint for a model: requests, a queue, batches, HTTP."""
