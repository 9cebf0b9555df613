"""Checkpoint formats: detection, reading and writing of each."""
