"""Slapo's collectives as functions, for custom hooks: names and arguments are Slapo's, the operations are in ``parallel/regions.py``.

    function                     forward         backward
    all_gather_forward_output    all_gather      reduce_scatter, or slice if all ranks use the result alike
    reduce_scatter_forward_output  reduce_scatter  all_gather
    scatter_forward_output       slice           all_gather
    reduce_forward_output        all_reduce      nothing
    reduce_backward_grad         nothing         all_reduce

``group=None`` means all ranks. Neither the input nor its gradient is changed in place.
"""

from __future__ import annotations

from torch import Tensor

from megatron_sp.comm.groups import Group, world_group
from megatron_sp.parallel.regions import copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to


def all_gather_forward_output(inp: Tensor, dim: int, group: Group | None = None, tensor_parallel_output_grad: bool = True) -> Tensor:
    """Gather all ranks' tensors along ``dim``.

    Args:
        tensor_parallel_output_grad: True if the ranks use the result differently, so that gradients are summed; False
            if all use it alike.
    """
    return gather_from(inp, group or world_group(), dim, "reduce_scatter" if tensor_parallel_output_grad else "slice")


def reduce_scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    """Return this rank's share, along ``dim``, of the sum over the ranks. Raises ValueError: the dim is not divisible."""
    return reduce_scatter_to(inp, group or world_group(), dim)


def scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    """Return this rank's share, along ``dim``, of what all ranks have. Raises ValueError: the dim is not divisible."""
    return scatter_to(inp, group or world_group(), dim)


def reduce_forward_output(inp: Tensor, group: Group | None = None) -> Tensor:
    """Return the sum over the ranks."""
    return reduce_from(inp, group or world_group())


def reduce_backward_grad(inp: Tensor, group: Group | None = None) -> Tensor:
    """Return ``inp`` itself; its gradient is summed over the ranks."""
    return copy_to(inp, group or world_group())
