"""Comparison of a step of the split model with the whole one: every gradient, in fp64."""
