"""Axes over which a schedule may split a model, with process groups or only with their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups
from megatron_sp.utils.errors import ConfigError

AXES = ("dp", "cp", "sp", "tp")
OF_LINES = ("dp", "sp", "tp")
"""Axes over which a line may communicate by itself; cp is that of ``context()`` alone."""


@dataclass(frozen=True)
class _Imagined:
    """A group that has a size and a rank but cannot communicate, for checks without a job."""

    ranks: int
    place: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True)
class Mesh:
    """Process groups along the axes.

    Attributes:
        tp, sp, dp: group along one axis.
    """

    tp: Group = field(default=SINGLE_RANK)
    sp: Group = field(default=SINGLE_RANK)
    dp: Group = field(default=SINGLE_RANK)
    dp_sp: Group = field(default=SINGLE_RANK)  # dp, cp and sp together: all ranks that have the same parameters
    world: Group = field(default=SINGLE_RANK)
    cp: Group = field(default=SINGLE_RANK)

    @classmethod
    def of(cls, groups: ParallelGroups) -> Mesh:
        """Create the mesh of a job from its process groups."""
        return cls(groups.tp, groups.sp, groups.dp, groups.dp_cp_sp, groups.world, groups.cp)

    @classmethod
    def sizes(cls, tp: int = 1, sp: int = 1, dp: int = 1, *, cp: int = 1, tp_rank: int = 0, sp_rank: int = 0) -> Mesh:
        """Create a mesh without a job: a schedule on it can be checked and shown, but not run unless all sizes are 1.

        Raises:
            ConfigError: a size is below 1.
        """
        for name, size in (("tp", tp), ("sp", sp), ("dp", dp), ("cp", cp)):
            if size < 1:
                raise ConfigError(f"{name} ({size}) must be at least 1")
        replicas = dp * cp * sp
        return cls(
            imagined(tp, tp_rank),
            imagined(sp, sp_rank),
            imagined(dp),
            imagined(replicas, sp_rank),
            imagined(replicas * tp),
            imagined(cp),
        )

    def group(self, axis: str) -> Group:
        """Return the group of an axis. Raises ConfigError if there is no such axis."""
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis!r}: the axes are {', '.join(AXES)}")
        return cast(Group, getattr(self, axis))

    @property
    def is_imagined(self) -> bool:
        """True if the mesh has sizes only, so that nothing can run on it."""
        return any(isinstance(self.group(axis), _Imagined) for axis in AXES)

    @property
    def replicas(self) -> tuple[Group, ...]:
        """Groups over which, one after another, gradients of parameters are summed: dp, cp and sp, as one or each by itself."""
        apart = self.dp.size() * self.cp.size() * self.sp.size()
        return (self.dp_sp,) if self.dp_sp.size() == apart else (self.dp, self.cp, self.sp)

    def __str__(self) -> str:
        shown = [axis for axis in reversed(AXES) if axis != "cp" or self.cp.size() > 1]
        return ", ".join(f"{axis} {self.group(axis).size()}" for axis in shown)


def imagined(size: int, rank: int = 0) -> Group:
    # a group that only knows its size and rank
    return SINGLE_RANK if size == 1 else cast(Group, _Imagined(size, rank))
