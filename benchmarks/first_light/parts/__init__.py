"""What is measured: a module for each subject, whose functions take a ``Context`` and record."""
