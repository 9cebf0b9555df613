"""Models of other programs computed straight from their files, in plain torch: what conversions are checked against.

Nothing here knows of the lists by which tensors are converted, nor of our model or its ops.
"""
