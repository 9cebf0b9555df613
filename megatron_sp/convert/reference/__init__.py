"""Independent models computed directly from other programs' files, in plain torch, as a reference for conversions.

Nothing here uses the conversion's lists of tensors, or our model and its ops.
"""
