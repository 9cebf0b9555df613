"""From flags to a finished run."""
