"""Models as lists of units."""
