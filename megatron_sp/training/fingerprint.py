"""Fingerprint of the initial model, compared over ranks before the first step: a rank with another seed or version is found at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.utils.errors import ConfigError


class Fingerprint:
    """Names, dtypes, shapes and bit sums of parameters."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._experts: set[str] = set()

    def add(self, named: Iterable[tuple[str, Tensor]], *, of_experts: bool = False) -> None:
        """Add parameters to the fingerprint; those of experts are the same on ranks with the same ep rank only."""
        for name, param in named:
            if of_experts:
                self._experts.add(name)
            self.of[name] = f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)} {_sum_of_bits(param)}"

    def digest(self, *, of_experts: bool = False) -> str:
        """Return a short hash of all parameters added so far, of experts or of all others."""
        lines = (f"{n} {v}" for n, v in self.of.items() if (n in self._experts) == of_experts)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def require_equal(self, groups: ParallelGroups, ep_rank: int = 0) -> None:
        """Check that ranks with the same tp and pp rank have the same parameters, with the same ep rank the same experts. Collective.

        Raises:
            ConfigError: they differ; raised on all ranks, with a rank and a parameter in the message.
        """
        stage = groups.pp_rank
        mine = [[f"{stage}/{groups.tp_rank}", self.digest()], [f"{stage}/ep{ep_rank}", self.digest(of_experts=True)]]
        of_part: dict[str, tuple[int, str]] = {}
        odd: tuple[int, int] | None = None
        for rank, digests in enumerate(gather_json(mine, groups.control)):
            for part, digest in digests:
                first, known = of_part.setdefault(part, (rank, digest))
                if known != digest and odd is None:
                    odd = first, rank
        if odd is None:
            return
        both = gather_json(self.of if groups.rank in odd else None, groups.control)
        ours, theirs = both[odd[0]], both[odd[1]]
        name = next((n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "the order of the parameters")
        raise ConfigError(
            f"rank {odd[1]} has another model than rank {odd[0]}: {name} is {theirs.get(name, 'absent')} there and"
            f" {ours.get(name, 'absent')} here (type, shape, sum of the bits); start all ranks with the same flags, seed and versions"
        )


def _sum_of_bits(x: Tensor) -> int:
    """Return the sum of the elements' bit patterns as integers; does not depend on the device."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.detach().contiguous().view(width).sum(dtype=torch.int64))
