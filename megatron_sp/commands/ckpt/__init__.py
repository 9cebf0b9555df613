"""``megatron-sp ckpt``: list, show, verify, compare, prune and merge checkpoints (docs/ckpt.md)."""
