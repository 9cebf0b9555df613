"""Changing a model as a schedule says: weights split, exchanges inserted, forwards replaced."""
