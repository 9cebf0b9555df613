"""``megatron-sp chaos``: a training is killed, stopped, starved and damaged again and again, and must come out with the same weights."""
