"""``megatron-sp chaos``: inject faults into a training again and again, and check that it ends with the same weights as without."""
