"""Order in which a pass uses the units of a model, as plain numbers, for training and for planning.

Units: 0 is the embedding, 1 to ``num_layers`` are the blocks, ``num_layers + 1`` is the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.config.schema import KernelConfig


def recompute_plan(kernels: KernelConfig, num_layers: int) -> list[tuple[int, int, bool]]:
    """Return (first layer, last layer + 1, whether to recompute) for consecutive groups of layers."""
    if kernels.recompute_granularity != "full":
        return [(0, num_layers, False)]
    number = kernels.recompute_num_layers or 1
    if kernels.recompute_method == "block":
        number = min(number, num_layers)
        return [(i, i + 1, True) for i in range(number)] + [(number, num_layers, False)]
    return [(i, min(i + number, num_layers), True) for i in range(0, num_layers, number)]


def ends_recomputed(kernels: KernelConfig, num_layers: int) -> bool:
    """Return whether backward begins with a recomputation; True without layers: it reads no parameters first."""
    groups = [again for first, last, again in recompute_plan(kernels, num_layers) if first < last]
    return not groups or groups[-1]


def expand_order(order: Sequence[int], units: Sequence[tuple[int, ...]]) -> list[int]:
    return [unit for number in order for unit in units[number]]


def unit_order(
    kernels: KernelConfig, num_layers: int, *, tied: bool, backward: bool, embedding_again: bool = False
) -> list[int]:
    """Return the units in the order in which a pass reads their parameters; ``backward``: a forward and a backward one.

    With ``embedding_again`` backward reads the embedding's parameters too, and no tied head has kept them whole.
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
