"""One file for each format: how it is recognised, read and written."""
