"""Report on one or several runs as a self-contained HTML page."""
