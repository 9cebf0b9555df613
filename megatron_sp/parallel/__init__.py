"""Parallel layers: comm and ops put together."""
