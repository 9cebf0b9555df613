"""``megatron-sp chaos``: a training is killed, stopped, starved of disk and damaged, and must end with the same weights."""
