"""Collectives as functions, and registration of how a class of modules is split."""

from megatron_sp.schedule.slapo.methods import ShardMethod, register_shard_method
from megatron_sp.schedule.slapo.sharding.sync_ops import (
    all_gather_forward_output,
    reduce_backward_grad,
    reduce_forward_output,
    reduce_scatter_forward_output,
    scatter_forward_output,
)

__all__ = [
    "ShardMethod", "all_gather_forward_output", "reduce_backward_grad", "reduce_forward_output", "reduce_scatter_forward_output",
    "register_shard_method", "scatter_forward_output",
]  # fmt: skip
