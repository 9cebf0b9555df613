"""Utilities: errors and exit codes, files, number formatting, host information."""
