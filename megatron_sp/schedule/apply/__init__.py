"""Application of a schedule to a model: weights split, exchanges inserted, forwards replaced."""
