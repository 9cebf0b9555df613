"""A run: setup, loop, step, state, logs, watchdog, self-checks."""
