"""From files to batches; ranks come in as plain integers."""
