"""Configuration of a run: the schema (dataclasses), the rules between fields, presets, and the command line."""
