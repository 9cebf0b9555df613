"""Training runs: setup, loop, step, state, logs, watchdog, self-checks."""
