"""A step of the split model compared with the whole one, every gradient, in fp64."""
