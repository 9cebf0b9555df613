"""Helpers without communication."""
