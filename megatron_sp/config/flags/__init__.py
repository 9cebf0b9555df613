"""Command line: parser, help, configuration files, and compatibility with Megatron's flags and DeepSpeed's JSON."""
