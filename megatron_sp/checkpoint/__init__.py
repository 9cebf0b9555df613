"""Saving, verifying, loading and resharding checkpoints."""
