"""``megatron-sp ckpt``: looking at, checking, comparing, thinning out and merging checkpoints. docs/ckpt.md"""
