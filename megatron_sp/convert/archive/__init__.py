"""Pickle, zip and torch files of other programs, read and written without running anything in them."""
