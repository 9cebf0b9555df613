"""``megatron-sp schedule``: schedules of external models on the command line."""
