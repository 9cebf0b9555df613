"""Errors and exit codes, files, numbers for people, facts about the host."""
