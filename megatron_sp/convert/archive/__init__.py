"""Readers and writers of pickle, zip and torch files of other programs that run no code from the files."""
