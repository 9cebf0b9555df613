"""Weight initialization that depends only on (seed, parameter name): the same in every layout and order of construction.

The full tensor is always drawn, in fp32 on the CPU, from a generator keyed by the name; a sharded layout takes its
slice afterwards.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty


@dataclass(frozen=True)
class WeightInit:
    """Initial weight of a layer."""

    name: str  # name of the layer in the model; together with ``seed`` it determines the values
    std: float
    seed: int
    dtype: torch.dtype

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Return the whole weight in fp32; see ``draw_normal``."""
        return draw_normal(shape, self.std, self.seed, f"{self.name}.weight")


def name_generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator for one parameter."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    """Return the full initial tensor of one parameter: N(0, std^2), fp32, on torch's default device (meta: without values)."""
    made = empty(shape, dtype=torch.float32, device=torch.get_default_device())
    return (
        made if made.is_meta else made.normal_(0.0, std, generator=name_generator(seed, name))
    )  # drawing no numbers takes time too


def output_std(std: float, num_layers: int) -> float:
    """Return the standard deviation for projections that write to the residual stream (scaled by GPT-2's 1/sqrt(2 * layers))."""
    return std / math.sqrt(2.0 * num_layers)
