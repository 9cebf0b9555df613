"""Placement rules: what each torch function does to shares and partial sums, by family of functions. ``table.py`` has them all by name."""
