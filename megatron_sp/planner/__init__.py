"""Which layout for which GPUs: layouts enumerated, their memory and time predicted, the fastest that fit shown (``megatron-sp plan``)."""
