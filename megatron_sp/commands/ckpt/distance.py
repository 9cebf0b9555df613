"""Distance between two tensors, accumulated block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sp.commands.ckpt.values import BLOCK_BYTES


@dataclass
class Distance:
    """Distance of values a from values b.

    Attributes:
        max_abs: max|a-b|; inf if only one of the two is finite, or they are different infinities.
        largest: max|b| over finite values.
        beyond: number of values with |a-b| > atol + rtol*|b|; NaN equals NaN.
        count: number of all values.
    """

    max_abs: float = 0.0
    largest: float = 0.0
    beyond: int = 0
    count: int = 0

    @classmethod
    def of(cls, blocks: Iterable[tuple[Tensor, Tensor]], rtol: float, atol: float, progress: Callable[[int], None]) -> Distance:
        """Compute the distance of two tensors given in blocks of equal shapes; ``progress`` receives the bytes of the first's blocks."""
        found = cls()
        for a, b in blocks:
            step = max(1, BLOCK_BYTES // max(a.element_size(), b.element_size()))
            for x, y in zip(a.reshape(-1).split(step), b.reshape(-1).split(step), strict=True):
                found.add(x, y, rtol, atol)
            progress(a.numel() * a.element_size())
        return found

    def add(self, x: Tensor, y: Tensor, rtol: float, atol: float) -> None:
        """Add a block of values, the same number from each tensor."""
        self.count += x.numel()
        if not x.numel():
            return
        if x.dtype == y.dtype and torch.equal(x, y):  # the common case, and by far the fastest to detect
            finite = y[torch.isfinite(y)] if y.is_floating_point() else y
            self.largest = max(self.largest, float(finite.double().abs().max()) if finite.numel() else 0.0)
            return
        x, y = x.double(), y.double()
        same = (x == y) | (torch.isnan(x) & torch.isnan(y))
        distance = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        size = torch.where(torch.isfinite(y), y.abs(), 0.0)
        self.max_abs, self.largest = max(self.max_abs, float(distance.max())), max(self.largest, float(size.max()))
        self.beyond += int((distance > atol + rtol * size).sum())

    @property
    def max_rel(self) -> float:
        """Relative distance: max|a-b| / max|b|."""
        if self.max_abs == 0.0:
            return 0.0
        return self.max_abs / self.largest if self.largest else math.inf
