"""Make any PyTorch model tensor-, sequence- and Ulysses-parallel without rewriting it: ``docs/schedule.md``."""

from megatron_sp.schedule.kinds import Kind, register_shardable
from megatron_sp.schedule.mesh import Mesh
from megatron_sp.schedule.paths import PathError
from megatron_sp.schedule.schedule import Schedule, Selection, load, schedule

__all__ = ["Kind", "Mesh", "PathError", "Schedule", "Selection", "load", "register_shardable", "schedule"]
