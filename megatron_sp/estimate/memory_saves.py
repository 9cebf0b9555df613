"""Host memory for the copy of a background save in closed form: the part of a checkpoint that a rank writes.

    16-bit weights    2 + 4 (master) + 4 + 4 (Adam)    = 14 bytes a parameter
    fp32 weights      4 + 4 + 4                        = 12

divided by the number of ranks that hold the same parameters: from ZeRO stage 1 on each rank writes its shard; at stage
0 whole tensors are distributed over the replicas, so that the maximum is at least the largest tensor. This module does
not import torch; a test compares it with the distribution in a run.
"""

from __future__ import annotations

import math

from megatron_sp.config.schema import Config
from megatron_sp.estimate.rough import rough_ranks


def copy_bytes(config: Config, world_size: int) -> int:
    """Return the bytes of host memory on the rank that writes most; 0 without background saves."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or not checkpoint.save_interval or not checkpoint.async_save or config.batch.skip_train:
        return 0
    rank = max(rough_ranks(config, world_size, "cpu"), key=lambda rank: rank.num_params)
    with_state, is_16_bit = not checkpoint.no_save_optim, rank.e == 2
    state = with_state * rank.wide * (2 if config.optimizer.optimizer == "adam" else 1)
    each = rank.e + state + with_state * rank.wide * is_16_bit
    vocab = config.model.vocab_size or 0
    padding = (
        max(0, rank.rows - vocab) * rank.h * (1 + config.model.untie_embeddings_and_output_weights)
    )  # of the vocabulary: not saved
    share = math.ceil((rank.shard - padding / rank.replicas) * each)
    if config.parallel.zero_stage > 0 or rank.replicas == 1:
        return share
    return max(share, min(rank.rows, vocab) * rank.h * max(rank.e, rank.wide if with_state else 0))
