"""Slapo's API for schedules: its examples run unchanged, on this package's layers.

    sch = create_schedule(model)
    sch["attention.out_proj"].shard("weight", axis=1)
    sch["attention.out_proj"].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
    sch["attention.resid_dropout"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1)
    model, _ = build(sch)

Improvements: nothing but ``replace`` changes the model before ``build()``; the order of the other lines does not
matter; a bias after a sum is added once; gradients that are sums over the ranks are complete after ``backward()``;
``Verify`` compares those, too. Subgraph primitives (trace, find, fuse, decompose, pipeline stages) are rejected, with
an alternative. Source: Slapo (Chen et al., ASPLOS 2024, arXiv:2302.08005), from its documentation.
"""

from megatron_sp.schedule.slapo.build import build
from megatron_sp.schedule.slapo.methods import Primitive, ShardMethod, register_primitive, register_shard_method
from megatron_sp.schedule.slapo.random import checkpoint, get_cuda_rng_tracker, set_random_seed
from megatron_sp.schedule.slapo.schedule import SlapoSchedule, create_schedule, list_primitives
from megatron_sp.schedule.slapo.verify import Verify
from megatron_sp.schedule.slapo.weights import init_empty_weights

__all__ = [
    "Primitive", "ShardMethod", "SlapoSchedule", "Verify", "build", "checkpoint", "create_schedule", "get_cuda_rng_tracker",
    "init_empty_weights", "list_primitives", "register_primitive", "register_shard_method", "set_random_seed",
]  # fmt: skip
