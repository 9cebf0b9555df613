"""Parallel layers (`layers.py`), tensor and Ulysses sequence parallelism: comm and ops put together."""
