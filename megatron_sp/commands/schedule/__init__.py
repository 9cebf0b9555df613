"""``megatron-sp schedule``: schedules of models that are not ours, on the command line."""
