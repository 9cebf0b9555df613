"""``megatron-sp chaos``: a training is killed, stopped, damaged, and must end with the same weights."""
