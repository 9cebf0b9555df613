"""The ``megatron-sp`` command: one file or folder for each subcommand."""
