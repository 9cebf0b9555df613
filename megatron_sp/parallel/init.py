"""Weight initialization that depends only on (seed, parameter name): the same in every layout."""

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
        return draw_normal(shape, self.std, self.seed, f"{self.name}.weight")


def name_generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator for one parameter."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    """Return a whole weight, N(0, std^2) in fp32 on torch's default device, of which layouts take slices."""
    made = empty(shape, dtype=torch.float32, device=torch.get_default_device())
    if made.is_meta:  # drawing no numbers takes time too
        return made
    return made.normal_(0.0, std, generator=name_generator(seed, name))


def output_std(std: float, num_layers: int) -> float:
    """Return GPT-2's standard deviation for projections that write to the residual stream."""
    return std / math.sqrt(2.0 * num_layers)
