"""``megatron-sp ckpt``: list, show, verify, compare, prune and merge checkpoints (docs/how-to/ckpt.md)."""
