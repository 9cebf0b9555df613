"""Save, verify, load."""
