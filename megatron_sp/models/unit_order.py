"""In which order a pass uses the parts of a model: plain numbers, for runs and for plans alike.

Units: 0 is the embedding, 1 to ``num_layers`` are the blocks, ``num_layers + 1`` is the head.
"""

from __future__ import annotations

from megatron_sp.config.schema import KernelConfig


def recompute_plan(kernels: KernelConfig, num_layers: int) -> list[tuple[int, int, bool]]:
    """(first layer, last layer + 1, recompute it?) for consecutive runs of layers."""
    if kernels.recompute_granularity != "full":
        return [(0, num_layers, False)]
    number = kernels.recompute_num_layers or 1
    if kernels.recompute_method == "block":
        number = min(number, num_layers)
        return [(i, i + 1, True) for i in range(number)] + [(number, num_layers, False)]
    return [(i, min(i + number, num_layers), True) for i in range(0, num_layers, number)]


def unit_order(kernels: KernelConfig, num_layers: int, *, tied: bool, backward: bool, embedding_again: bool = False) -> list[int]:
    """Units in the order in which a pass reads their parameters.

    Args:
        kernels: what is recomputed.
        num_layers: blocks.
        tied: the head reads the embedding's table.
        backward: with the backward pass; else the forward pass alone.
        embedding_again: the embedding reads parameters in backward too, and is not there still for the head.
    """
    forward = list(range(num_layers + 2)) + ([0] if tied else [])
    if not backward:
        return forward
    back: list[int] = []
    for first, last, again in reversed(recompute_plan(kernels, num_layers)):
        if again:
            back += range(first + 1, last + 1)
        back += reversed(range(first + 1, last if again else last + 1))
    return forward + back + ([0] if embedding_again else [])
