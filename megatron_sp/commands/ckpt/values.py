"""Statistics of a tensor's values, accumulated block by block in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 8 << 20


@dataclass
class Values:
    """Statistics of a tensor; all except the counts are of finite values only.

    Attributes:
        count: number of all values.
        nans, infinities, zeros: number of such values.
        norm: square root of the sum of squares.
    """

    count: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    mean: float = 0.0
    norm: float = 0.0
    _squares: float = 0.0  # of the distances from the mean
    _finite: int = 0

    @classmethod
    def of(cls, blocks: Iterable[Tensor], progress: Callable[[int], None] = lambda num_bytes: None) -> Values:
        """Compute the statistics of a tensor given in blocks; ``progress`` receives the bytes of each block."""
        found = cls()
        for block in blocks:
            for part in block.reshape(-1).split(max(1, BLOCK_BYTES // block.element_size())):
                found.add(part)
            progress(block.numel() * block.element_size())
        return found

    def add(self, part: Tensor) -> None:
        """Add values; sums are in fp64, means and squares are combined as in Chan, Golub and LeVeque (1979)."""
        x = part.double()
        good = torch.isfinite(x)
        self.count += x.numel()
        if not bool(good.all()):
            self.nans += int(torch.isnan(x).sum())
            self.infinities += int(torch.isinf(x).sum())
            x = x[good]
        if not x.numel():
            return
        n, mean = x.numel(), float(x.mean())
        total = self._finite + n
        self._squares += float((x - mean).square().sum()) + (mean - self.mean) ** 2 * self._finite * n / total
        self.mean += (mean - self.mean) * n / total
        self._finite = total
        self.zeros += int((x == 0).sum())
        self.smallest, self.largest = min(self.smallest, float(x.min())), max(self.largest, float(x.max()))
        self.norm = math.hypot(self.norm, float(torch.linalg.vector_norm(x)))

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self._squares / self._finite) if self._finite else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics for JSON; None in place of those that are not finite."""
        numbers = {"min": self.smallest, "max": self.largest, "mean": self.mean, "std": self.std, "norm": self.norm}
        counts = {"count": self.count, "zeros": self.zeros, "nan": self.nans, "infinite": self.infinities}
        return {name: value if self._finite and math.isfinite(value) else None for name, value in numbers.items()} | counts
