"""Conversion of checkpoints from and to the formats of other programs."""
