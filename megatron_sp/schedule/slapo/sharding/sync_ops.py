"""Slapo's exchanges as functions, for hooks of one's own: names and arguments are Slapo's, the moves are those of ``parallel/regions.py``.

    function                     forward         backward
    all_gather_forward_output    all_gather      reduce_scatter, or slice where all ranks go on alike
    reduce_scatter_forward_output  reduce_scatter  all_gather
    scatter_forward_output       slice           all_gather
    reduce_forward_output        all_reduce      nothing
    reduce_backward_grad         nothing         all_reduce

``group=None`` is everybody in the job. Neither what comes in nor its gradient is changed in place.
"""

from __future__ import annotations

from torch import Tensor

from megatron_sp.comm.groups import Group, world_group
from megatron_sp.parallel.regions import copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to


def all_gather_forward_output(inp: Tensor, dim: int, group: Group | None = None, tensor_parallel_output_grad: bool = True) -> Tensor:
    """All ranks' tensors joined along ``dim``.

    Args:
        tensor_parallel_output_grad: the ranks use the result differently, so their gradients are summed; False: all do the same with it.
    """
    return gather_from(inp, group or world_group(), dim, "reduce_scatter" if tensor_parallel_output_grad else "slice")


def reduce_scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    """This rank's part, along ``dim``, of the sum over the ranks. Raises ValueError: the dim cannot be cut evenly."""
    return reduce_scatter_to(inp, group or world_group(), dim)


def scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    """This rank's part, along ``dim``, of what all ranks have. Raises ValueError: the dim cannot be cut evenly."""
    return scatter_to(inp, group or world_group(), dim)


def reduce_forward_output(inp: Tensor, group: Group | None = None) -> Tensor:
    """The sum over the ranks."""
    return reduce_from(inp, group or world_group())


def reduce_backward_grad(inp: Tensor, group: Group | None = None) -> Tensor:
    """``inp`` itself; its gradient is the sum over the ranks."""
    return copy_to(inp, group or world_group())
