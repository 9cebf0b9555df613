"""Other programs' checkpoints, read and written."""
