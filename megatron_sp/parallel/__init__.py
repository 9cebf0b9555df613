"""Parallel layers (`layers.py`), tensor parallelism and Ulysses sequence parallelism, built on comm and ops."""
