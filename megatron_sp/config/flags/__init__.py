"""The command line: parser, help, configuration files, Megatron's and DeepSpeed's spellings."""
