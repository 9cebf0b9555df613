"""Host memory for the copy of a background save in closed form: the part of a checkpoint that a rank writes.

    16-bit weights    2 + 4 (master) + 4 + 4 (Adam)    = 14 bytes a parameter
    fp32 weights      4 + 4 + 4                        = 12

divided by the number of ranks that hold the same parameters: from ZeRO stage 1 on each rank writes its shard; at stage
0 whole tensors are distributed over the replicas, so that the maximum is at least the largest tensor. This module does
not import torch; a test compares it with the distribution in a run.
"""

from __future__ import annotations

from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_rank import largest_form
from megatron_sp.estimate.workload import workload_of


def copy_bytes(config: Config, world_size: int) -> int:
    """Return the bytes of host memory on the rank that writes most; 0 without background saves."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or not checkpoint.save_interval or not checkpoint.async_save or config.batch.skip_train:
        return 0
    parallel = config.parallel
    form = largest_form(workload_of(config, world_size, "cpu"))
    shape = form.shape
    with_state = not checkpoint.no_save_optim
    wide = shape.wide
    state = with_state * wide * (2 if config.optimizer.optimizer == "adam" else 1)
    each = shape.e + state + with_state * wide * shape.is_16_bit
    ranks = parallel.dp_size(world_size) * shape.cp * shape.sp
    tables = 1 + config.model.untie_embeddings_and_output_weights
    padding = max(0, shape.rows - (config.model.vocab_size or 0)) * shape.h * tables  # padding rows are not saved
    of_experts = sum(map(form.zero.size, form.zero.experts))
    share = -(-(form.zero.num_params - of_experts - padding) * each // ranks) + -(
        -of_experts * each // form.zero.expert_ranks
    )
    if parallel.zero_stage > 0 or ranks == 1:
        return share
    return max(share, min(shape.rows, config.model.vocab_size or 0) * shape.h * max(shape.e, wide if with_state else 0))
