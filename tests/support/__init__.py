"""Shared helpers of the tests: ranks to fork, models to build, files to break, and the programs that mutate the sources."""
